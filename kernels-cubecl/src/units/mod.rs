//! The kernels for every runtime: f32 arithmetic of single units, operands staged in shared memory.

pub(crate) mod dkdv;
pub(crate) mod dq;
pub(crate) mod forward;
mod launch;
mod shape;
mod tile;

pub(crate) use launch::{launch_backward, launch_forward};
pub use shape::UnitTiles;
