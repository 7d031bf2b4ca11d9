//! Runs a schedule: one loop forward, one backward, both the same shape.
//!
//! At step `t` a rank first collects what was posted for `t`, then posts the transfers of `t + 1`, and
//! only then computes; so step `t`'s compute hides step `t + 1`'s transfers. What it computed for
//! others travels with the post after, and arrives one step later; two exchanges after the last step
//! flush it.
//!
//! Additions happen in the order of the schedule, never of arrival: the same inputs give the same bits.

mod backward;
mod exchange;
mod forward;
mod heads;
mod shared;

pub(crate) use backward::{Saved, backward};
pub(crate) use forward::forward;

pub use heads::{Direction, HeadExchange};
pub(crate) use shared::{Attended, Scattered, SharedHeads};

use crate::attention::ChunkOptions;
use crate::comm::Communicator;
use crate::plan::RankWork;
use crate::schedule::Pass;
use distflash_kernels::RowIntervals;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One call of distributed attention, as the op hands it to the executor and keeps it for backward.
#[derive(Clone, Debug)]
pub struct AttentionCall {
    pub(crate) work: Arc<RankWork>,
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) options: ChunkOptions,
    /// Names its exchanges, the same on all ranks.
    pub(crate) number: u64,
    pub(crate) tally: Arc<Tally>,
    /// Where ranks share heads.
    pub(crate) shared: Option<Arc<SharedHeads>>,
}

/// What a rank has really computed: calls of kernels and their unmasked (query, key) pairs, once per query head.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    forward: Counts,
    backward: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    calls: AtomicU64,
    pairs: AtomicU64,
}

impl Tally {
    fn of(&self, pass: Pass) -> &Counts {
        match pass {
            Pass::Forward => &self.forward,
            Pass::Backward => &self.backward,
        }
    }

    /// One call, of `batch · heads` heads.
    fn add(&self, pass: Pass, seen: &RowIntervals, heads: usize) {
        let counts = self.of(pass);
        counts.calls.fetch_add(1, Ordering::Relaxed);
        counts.pairs.fetch_add(seen.area() * heads as u64, Ordering::Relaxed);
    }

    /// `(calls, pairs)` so far.
    pub fn read(&self, pass: Pass) -> (u64, u64) {
        let counts = self.of(pass);
        (counts.calls.load(Ordering::Relaxed), counts.pairs.load(Ordering::Relaxed))
    }
}
