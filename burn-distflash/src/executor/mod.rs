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

pub(crate) use backward::{Saved, backward};
pub(crate) use forward::forward;

use crate::attention::ChunkOptions;
use crate::comm::Communicator;
use crate::plan::Plan;
use std::sync::Arc;

/// One call of distributed attention, as the op hands it to the executor and keeps it for backward.
#[derive(Clone, Debug)]
pub struct AttentionCall {
    pub(crate) plan: Arc<Plan>,
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) options: ChunkOptions,
}
