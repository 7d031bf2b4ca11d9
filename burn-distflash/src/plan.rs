//! One mask on one layout, ready to run: the schedule, and what each of a rank's pairs sees.

use crate::layout::{Layout, Rank};
use crate::mask::{Mask, MaskError};
use crate::schedule::{Pair, Schedule, ShardedMask};
use crate::strategy::Strategy;
use distflash_kernels::RowIntervals;
use fnv::FnvHasher;
use std::hash::{Hash, Hasher};

/// What `rank` needs to run attention: who owns what, who computes what, and the intervals of its own
/// pairs.
#[derive(Debug)]
pub(crate) struct Plan {
    pub layout: Layout,
    pub schedule: Schedule,
    /// `work[step]`: this rank's pairs with what they see.
    work: Vec<Vec<(Pair, RowIntervals)>>,
    /// Each rank computes its own and must find that all others have the same.
    pub mask_digest: u64,
    pub schedule_digest: u64,
}

impl Plan {
    pub fn new(
        strategy: Strategy,
        mask: &Mask,
        seq_len: usize,
        world_size: usize,
        rank: Rank,
    ) -> Result<Self, MaskError> {
        let sharded = strategy.shard(mask, seq_len, world_size)?;
        let schedule = strategy.schedule(&sharded);
        Ok(Self::from_schedule(&sharded, schedule, digest(mask), rank))
    }

    /// One rank, whose queries may be fewer or more than the keys.
    pub fn solo(mask: &Mask, num_rows: usize, num_keys: usize) -> Result<Self, MaskError> {
        let intervals = mask.intervals(num_rows, num_keys)?;
        let layout = Layout::contiguous(num_keys, 1);
        let schedule = Schedule::solo(num_rows, num_keys);
        let work = vec![schedule.pairs(0, 0).iter().map(|pair| (pair.clone(), intervals.clone())).collect()];
        Ok(Self { layout, work, mask_digest: digest(mask), schedule_digest: digest(&schedule), schedule })
    }

    fn from_schedule(sharded: &ShardedMask, schedule: Schedule, mask_digest: u64, rank: Rank) -> Self {
        let seen = |pair: &Pair| (pair.clone(), sharded.intervals(pair));
        let work = (0..schedule.num_steps()).map(|t| schedule.pairs(t, rank).iter().map(seen).collect()).collect();
        let (layout, schedule_digest) = (sharded.layout().clone(), digest(&schedule));
        Self { layout, work, mask_digest, schedule_digest, schedule }
    }

    /// This rank's pairs at `step` with what they see; nothing beyond the last step.
    pub fn work(&self, step: usize) -> &[(Pair, RowIntervals)] {
        self.work.get(step).map_or(&[], Vec::as_slice)
    }
}

/// The same on every rank, run and build: FNV-1a.
pub(crate) fn digest(of: &impl Hash) -> u64 {
    let mut hasher = FnvHasher::default();
    of.hash(&mut hasher);
    hasher.finish()
}
