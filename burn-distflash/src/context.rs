//! What a rank knows about the group and the sequence it shares.

use crate::comm::{CommError, Communicator, local};
use crate::error::AttentionError;
use crate::executor::Tally;
use crate::layout::{Layout, Rank};
use crate::mask::{Mask, MaskError};
use crate::plan::{Plan, PlanError, RankWork};
use crate::schedule::{AttentionShape, Pass};
use crate::segment::check_segments;
use crate::strategy::{Sequence, Strategy, StrategyError};
use burn::tensor::kind::Basic;
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// One rank's place in a sharded sequence: its group, the length of the whole sequence, and the
/// strategy that says who owns and computes what. Make one per rank and sequence length, and use it for
/// every layer and step; clones share everything.
///
/// ```
/// use burn_distflash::comm::local;
/// use burn_distflash::{AttentionError, Context, Sequence};
/// use std::time::Duration;
///
/// let shards = local::run(2, Duration::from_secs(10), |comm| {
///     let context = Context::new(comm, Sequence::Zigzag, 10)?;
///     Ok::<_, AttentionError>(context.layout().positions(context.rank()))
/// })?;
/// assert_eq!(shards, [vec![0, 1, 2, 8, 9], vec![3, 4, 5, 6, 7]]);
/// # Ok::<(), local::RunError>(())
/// ```
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    comm: Arc<dyn Communicator>,
    strategy: Strategy,
    /// Of the groups of ranks that share heads.
    groups: Layout,
    layout: Layout,
    plans: Mutex<HashMap<(Mask, AttentionShape), Arc<RankPlan>>>,
    tally: Arc<Tally>,
    /// Digests of calls that all ranks were found to agree on.
    agreed: Mutex<HashSet<u64>>,
}

/// A plan, with this rank's part of it.
#[derive(Debug)]
pub(crate) struct RankPlan {
    pub plan: Plan,
    pub work: Arc<RankWork>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { comm, strategy, layout, .. } = &*self.0;
        write!(f, "Context({strategy}, {} tokens, rank {} of {})", layout.seq_len(), comm.rank(), comm.world_size())
    }
}

impl Context {
    /// A sequence of `seq_len` tokens over the ranks of `comm`, laid out for causal attention. Nothing is
    /// sent yet.
    ///
    /// # Errors
    /// If the strategy's groups of ranks do not divide the world.
    pub fn new(
        comm: Arc<dyn Communicator>,
        strategy: impl Into<Strategy>,
        seq_len: usize,
    ) -> Result<Self, StrategyError> {
        let strategy = strategy.into();
        strategy.check(comm.world_size())?;
        let (head_ranks, sequence) = strategy.axes(comm.world_size());
        let groups = sequence.layout(seq_len, comm.world_size() / head_ranks);
        Ok(Self::on(comm, strategy, groups))
    }

    /// As [`new`](Self::new), laid out for attention under `mask`: [`Sequence::Adaptive`] then gives all ranks
    /// the same share of it. Attention under any other mask is exact too.
    ///
    /// # Errors
    /// If the mask does not fit the length, or the strategy the world.
    ///
    /// [`Sequence::Adaptive`]: crate::Sequence::Adaptive
    pub fn for_mask(
        comm: Arc<dyn Communicator>,
        strategy: impl Into<Strategy>,
        seq_len: usize,
        mask: &Mask,
    ) -> Result<Self, PlanError> {
        let strategy = strategy.into();
        strategy.check(comm.world_size())?;
        let (head_ranks, sequence) = strategy.axes(comm.world_size());
        let rows = mask.intervals(seq_len, seq_len)?;
        let groups = sequence.layout_for(&rows, comm.world_size() / head_ranks);
        Ok(Self::on(comm, strategy, groups))
    }

    fn on(comm: Arc<dyn Communicator>, strategy: Strategy, groups: Layout) -> Self {
        let layout = groups.split(comm.world_size() / groups.world_size());
        Self(Arc::new(Inner {
            comm,
            strategy,
            groups,
            layout,
            plans: Mutex::default(),
            tally: Arc::default(),
            agreed: Mutex::default(),
        }))
    }

    /// A sequence that one rank has all of.
    #[must_use]
    pub fn solo(seq_len: usize) -> Self {
        let end = local::group(1, Duration::from_secs(60)).remove(0);
        Self::on(Arc::new(end), Sequence::Ring.into(), Layout::contiguous(seq_len, 1))
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.0.comm.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.0.comm.world_size()
    }

    /// How the sequence is sharded.
    #[must_use]
    pub fn strategy(&self) -> Strategy {
        self.0.strategy
    }

    /// Who owns which tokens.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// The group.
    #[must_use]
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.0.comm
    }

    /// Tokens this rank owns.
    #[must_use]
    pub fn shard_len(&self) -> usize {
        self.0.layout.shard_len(self.rank())
    }

    /// This rank's part of a whole tensor whose dimension `dim` runs over the tokens; see
    /// [`Layout::shard`].
    ///
    /// # Panics
    /// If `dim` is not as long as the sequence.
    #[must_use]
    pub fn shard<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, dim: usize) -> Tensor<D, K> {
        self.0.layout.shard(tensor, dim, self.rank())
    }

    /// The global positions of this rank's tokens, for rotary embeddings.
    #[must_use]
    pub fn positions(&self, device: &Device) -> Tensor<1, Int> {
        let positions: Vec<i64> = self.0.layout.positions(self.rank()).into_iter().map(|p| p as i64).collect();
        let len = positions.len();
        Tensor::from_data(TensorData::new(positions, [len]), device)
    }

    /// The gradients of this rank's `loss`, with an error where an exchange during the backward pass or the replay of a
    /// [`segment`](crate::segment()) failed; plain `loss.backward()` would then give NaN.
    ///
    /// # Errors
    /// What the exchange or the replay failed with. Peers get an error too.
    pub fn backward<const D: usize>(&self, loss: &Tensor<D>) -> Result<Gradients, AttentionError> {
        let comm = &self.0.comm;
        comm.check()?;
        let grads = loss.backward();
        // An exchange that failed within a segment fails the segment as well: the cause comes first.
        comm.check()?;
        check_segments().inspect_err(|error| {
            comm.fail(&CommError::Invalid { rank: self.rank(), message: error.to_string() });
        })?;
        Ok(grads)
    }

    /// What this rank's kernels have computed so far: `(calls, pairs)` of unmasked queries and keys, once per query head
    /// and sequence of the batch. [`Plan::simulate`] says beforehand how many pairs there will be.
    #[must_use]
    pub fn computed(&self, pass: Pass) -> (u64, u64) {
        self.0.tally.read(pass)
    }

    pub(crate) fn tally(&self) -> Arc<Tally> {
        self.0.tally.clone()
    }

    pub(crate) fn plan(&self, mask: &Mask, shape: AttentionShape) -> Result<Arc<RankPlan>, MaskError> {
        let mut plans = self.0.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (mask.clone(), shape);
        if let Some(plan) = plans.get(&key) {
            return Ok(plan.clone());
        }
        let Inner { strategy, groups, layout, .. } = &*self.0;
        let rows = mask.intervals(layout.seq_len(), layout.seq_len())?;
        let head_ranks = layout.world_size() / groups.world_size();
        let plan = Plan::on_layout(*strategy, groups.clone(), head_ranks, &rows, shape);
        let plan = Arc::new(RankPlan { work: Arc::new(RankWork::new(&plan, self.rank())), plan });
        plans.insert(key, plan.clone());
        Ok(plan)
    }

    /// Remembers that all ranks agree on `digest`; whether that was news.
    pub(crate) fn is_agreed(&self, digest: u64) -> bool {
        self.0.agreed.lock().unwrap_or_else(PoisonError::into_inner).contains(&digest)
    }

    pub(crate) fn agree(&self, digest: u64) {
        self.0.agreed.lock().unwrap_or_else(PoisonError::into_inner).insert(digest);
    }
}
