//! What a run would cost, before anything is rented: `distflash plan`.
//!
//! [`Cluster`] says what there is, [`Workload`] what is to be done, and [`Workload::estimate`] what a step costs:
//! attention by a simulation of every kernel and transfer of its schedule ([`simulate`]), the rest by its operations
//! and bytes. `paper.rs` puts the estimates beside what the DistFlashAttn paper measured.

mod choose;
mod cluster;
mod events;
pub mod html;
pub mod paper;
mod report;
mod step;
mod workload;

pub use choose::{Choice, choose};
pub use cluster::{Cluster, ClusterError, DeviceSpec, Link, Rate};
pub use events::{Activity, Scale, Sent, Span, Timeline, simulate};
pub use report::{human_bytes, human_len, human_seconds, table};
pub use step::{Estimate, candidates, kept_bytes, state_bytes};
pub use workload::{MaskKind, Workload};
