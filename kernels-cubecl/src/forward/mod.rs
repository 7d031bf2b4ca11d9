//! Forward: `out` and `lse` of a block of queries, merged into what they saw before.

mod kernel;
mod launch;

pub use launch::{ForwardTensors, launch};
