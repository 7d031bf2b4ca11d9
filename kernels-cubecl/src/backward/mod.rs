//! Backward: gradients of a block's queries, keys and values, without atomics: the same bits in every
//! run.

mod dkdv;
mod dq;
mod launch;

pub use launch::{BackwardTensors, launch};
