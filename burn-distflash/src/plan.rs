//! A strategy worked out for one mask, length, group and shape: all of a call but its data.

use crate::heads::HeadShare;
use crate::layout::{Layout, Rank};
use crate::mask::{Mask, MaskError};
use crate::schedule::{AttentionShape, Pair, Pass, Schedule, ShardedMask, Simulation};
use crate::strategy::{Strategy, StrategyError};
use distflash_kernels::RowIntervals;
use fnv::FnvHasher;
use std::hash::{Hash, Hasher};

/// Who owns what and who computes what, forward and backward. Built and priced without a device.
///
/// Ranks form a grid: `world_size / head_ranks` groups share the sequence, the `head_ranks` consecutive ranks of a
/// group share the heads.
///
/// ```
/// use burn_distflash::schedule::{AttentionShape, Pass};
/// use burn_distflash::{Mask, Plan, Strategy};
///
/// let shape = AttentionShape { batch: 1, heads: 32, kv_heads: 8, head_dim: 128, element_bytes: 2 };
/// let plan = Plan::new(Strategy::Ulysses, &Mask::causal(), 4096, 8, shape)?;
/// assert_eq!(plan.simulate(Pass::Forward).idle_share(), 0.);
/// # Ok::<(), burn_distflash::PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    strategy: Strategy,
    layout: Layout,
    shape: AttentionShape,
    shares: Vec<HeadShare>,
    sharded: ShardedMask,
    forward: Schedule,
    backward: Schedule,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The mask does not fit the length.
    #[error(transparent)]
    Mask(#[from] MaskError),
    /// The strategy does not fit the group.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
}

impl Plan {
    /// `strategy` for one call of attention.
    ///
    /// # Errors
    /// If the mask does not fit the length, or the strategy the world.
    ///
    /// # Panics
    /// If `kv_heads` does not divide `heads`, or `world_size` is 0.
    pub fn new(
        strategy: Strategy,
        mask: &Mask,
        seq_len: usize,
        world_size: usize,
        shape: AttentionShape,
    ) -> Result<Self, PlanError> {
        strategy.check(world_size)?;
        let rows = mask.intervals(seq_len, seq_len)?;
        let (head_ranks, sequence) = strategy.axes(world_size);
        let groups = sequence.layout_for(&rows, world_size / head_ranks);
        Ok(Self::on_layout(strategy, groups, head_ranks, &rows, shape))
    }

    /// As [`new`](Self::new), where it is already settled which tokens each group of ranks owns.
    pub(crate) fn on_layout(
        strategy: Strategy,
        groups: Layout,
        head_ranks: usize,
        rows: &RowIntervals,
        shape: AttentionShape,
    ) -> Self {
        let layout = groups.split(head_ranks);
        let group = shape.heads / shape.kv_heads;
        let is_enough = |kv_heads: usize| match strategy {
            Strategy::PaddedUlysses => (kv_heads * group).is_multiple_of(head_ranks),
            // No rank without a head: Burn's fusion (0.22.1) adds tensors wrongly on a thread that holds one without
            // elements, and a head of zeros costs next to nothing.
            _ => kv_heads * group >= head_ranks,
        };
        let kv_heads = (shape.kv_heads..).find(|&kv_heads| is_enough(kv_heads)).expect("one of the next `head_ranks`");
        let shape = AttentionShape { heads: kv_heads * group, kv_heads, ..shape };
        let (_, sequence) = strategy.axes(layout.world_size());
        let sharded = ShardedMask::new(groups, rows);
        let forward = match strategy {
            // Whole rows of scores are computed once all keys are there.
            Strategy::RingSelfAttention => Schedule::all_gather(&sharded),
            _ => sequence.schedule(&sharded),
        };
        let transposed = forward.transposed();
        let sent = |schedule: &Schedule| schedule.bytes_sent(&shape, Pass::Backward).iter().sum::<u64>();
        let uneven = |schedule: &Schedule| {
            let simulation = schedule.simulate(&sharded, &shape, Pass::Backward);
            simulation.imbalance() + simulation.idle_share()
        };
        // Where work was dealt or levelled by who computes it, the other side may have more.
        let is_better = sent(&transposed) < sent(&forward) && uneven(&transposed) <= uneven(&forward) + 0.005;
        let backward = if is_better { transposed } else { forward.clone() };
        let shares = HeadShare::cut(shape.heads, shape.kv_heads, head_ranks);
        Self { strategy, layout, shape, shares, sharded, forward, backward }
    }

    /// What it is a plan for.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// Who owns which tokens.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The sizes of attention, with the heads of zeros that were added.
    #[must_use]
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// The heads of each rank of a group.
    #[must_use]
    pub fn shares(&self) -> &[HeadShare] {
        &self.shares
    }

    /// Ranks that share heads.
    #[must_use]
    pub fn head_ranks(&self) -> usize {
        self.shares.len()
    }

    /// The mask as the groups see it.
    #[must_use]
    pub fn sharded_mask(&self) -> &ShardedMask {
        &self.sharded
    }

    /// Who computes what, by group. Backward it may be the transpose, where that sends less.
    #[must_use]
    pub fn schedule(&self, pass: Pass) -> &Schedule {
        match pass {
            Pass::Forward => &self.forward,
            Pass::Backward => &self.backward,
        }
    }

    /// The ranks that share heads with `rank`, itself included.
    pub(crate) fn group(&self, rank: Rank) -> std::ops::Range<Rank> {
        let first = rank / self.head_ranks() * self.head_ranks();
        first..first + self.head_ranks()
    }

    /// What each rank does and sends in one pass. Work is counted once per query head.
    #[must_use]
    pub fn simulate(&self, pass: Pass) -> Simulation {
        if self.strategy == Strategy::RingSelfAttention {
            return self.simulate_whole_rows(pass);
        }
        let groups: Vec<_> = self
            .shares
            .iter()
            .map(|share| self.schedule(pass).simulate(&self.sharded, &self.of_share(share), pass))
            .collect();
        let grid = |rank: Rank| (rank / self.head_ranks(), rank % self.head_ranks());
        let ranks = 0..self.layout.world_size();
        let work = |step: usize| {
            let of = |rank| {
                let (group, place) = grid(rank);
                groups[place].work()[step][group] * (self.shape.batch * self.shares[place].heads().len()) as u64
            };
            ranks.clone().map(of).collect()
        };
        let work = (0..self.schedule(pass).num_steps()).map(work).collect();
        let sent = |rank| {
            let (group, place) = grid(rank);
            groups[place].bytes_sent(group) + self.exchanged_bytes(rank, pass)
        };
        Simulation::new(work, ranks.clone().map(sent).collect())
    }

    fn of_share(&self, share: &HeadShare) -> AttentionShape {
        AttentionShape { heads: share.heads().len(), kv_heads: share.kv_heads().len(), ..self.shape }
    }

    /// Bytes of the all-to-alls over heads that `rank` sends: forward query, key and value one way, `out` and
    /// `lse` the other; backward the gradients.
    fn exchanged_bytes(&self, rank: Rank, pass: Pass) -> u64 {
        let AttentionShape { batch, head_dim, element_bytes, .. } = self.shape;
        let own = &self.shares[rank % self.head_ranks()];
        let vectors = |share: &HeadShare| share.heads().len() + 2 * share.kv_heads().len();
        let sent = |peer: Rank| {
            let theirs = &self.shares[peer % self.head_ranks()];
            let (own_rows, their_rows) = (self.layout.shard_len(rank), self.layout.shard_len(peer));
            let width = head_dim * element_bytes;
            match pass {
                Pass::Forward => {
                    let returned = own.heads().len() * (width + element_bytes.max(4));
                    own_rows * vectors(theirs) * width + their_rows * returned
                }
                Pass::Backward => own_rows * theirs.heads().len() * width + their_rows * vectors(own) * width,
            }
        };
        (batch * self.group(rank).filter(|&peer| peer != rank).map(sent).sum::<usize>()) as u64
    }

    /// Keys and values of all ranks come to all; whole rows of scores are computed, whatever the mask.
    fn simulate_whole_rows(&self, pass: Pass) -> Simulation {
        let AttentionShape { batch, heads, kv_heads, head_dim, element_bytes } = self.shape;
        let (world, seq_len) = (self.layout.world_size(), self.layout.seq_len());
        let work = |rank| (batch * heads * self.layout.shard_len(rank) * seq_len) as u64;
        let row = 2 * batch * kv_heads * head_dim * element_bytes;
        let sent = |rank| {
            let own = self.layout.shard_len(rank);
            (row * match pass {
                Pass::Forward => own * (world - 1),
                Pass::Backward => seq_len - own,
            }) as u64
        };
        Simulation::new(vec![(0..world).map(work).collect()], (0..world).map(sent).collect())
    }
}

/// One rank's pairs of one pass.
#[derive(Debug)]
pub(crate) struct PassWork {
    pub schedule: Schedule,
    /// `pairs[step]`: this rank's, with what they see.
    pub pairs: Vec<Vec<(Pair, RowIntervals)>>,
}

/// One rank's part of a plan.
#[derive(Debug)]
pub(crate) struct RankWork {
    /// This rank in the schedules, which are those of groups.
    pub rank: Rank,
    /// The communicator's rank of each rank of the schedules.
    pub peers: Vec<Rank>,
    forward: PassWork,
    backward: PassWork,
}

impl RankWork {
    pub fn new(plan: &Plan, rank: Rank) -> Self {
        let group = rank / plan.head_ranks();
        let work = |pass| {
            let schedule = plan.schedule(pass).clone();
            let seen = |pair: &Pair| (pair.clone(), plan.sharded.intervals(pair));
            let pairs =
                (0..schedule.num_steps()).map(|t| schedule.pairs(t, group).iter().map(seen).collect()).collect();
            PassWork { schedule, pairs }
        };
        let place = rank % plan.head_ranks();
        let peers = (0..plan.sharded.layout().world_size()).map(|group| group * plan.head_ranks() + place).collect();
        Self { rank: group, peers, forward: work(Pass::Forward), backward: work(Pass::Backward) }
    }

    /// One rank, whose queries may be fewer or more than the keys.
    pub fn solo(mask: &Mask, num_rows: usize, num_keys: usize) -> Result<Self, MaskError> {
        let seen = mask.intervals(num_rows, num_keys)?;
        let work = || {
            let schedule = Schedule::solo(num_rows, num_keys);
            let pairs = vec![schedule.pairs(0, 0).iter().map(|pair| (pair.clone(), seen.clone())).collect()];
            PassWork { schedule, pairs }
        };
        Ok(Self { rank: 0, peers: vec![0], forward: work(), backward: work() })
    }

    pub fn pass(&self, pass: Pass) -> &PassWork {
        match pass {
            Pass::Forward => &self.forward,
            Pass::Backward => &self.backward,
        }
    }
}

/// The same on every rank, run and build: FNV-1a.
pub(crate) fn digest(of: &impl Hash) -> u64 {
    let mut hasher = FnvHasher::default();
    of.hash(&mut hasher);
    hasher.finish()
}
