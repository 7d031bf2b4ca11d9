//! The kernels for matrix units, by `mma.sync` through CubeCL's manual matrix API: 16-bit operands, f32
//! accumulators that never leave a unit's registers.
//!
//! A plane computes blocks of 16 rows. An instruction multiplies 16×16 by 16×8 elements; which lane holds
//! which of them is fixed (PTX ISA, *Matrix fragments for mma.m16n8k16*), and fixed so that the sums of two
//! neighbouring products are, rounded to 16 bits, the left operand of the next one. Softmax therefore needs
//! no shared memory.

#![allow(clippy::manual_is_multiple_of, reason = "device code has no such method")]

pub(crate) mod dkdv;
pub(crate) mod dq;
pub(crate) mod forward;
mod launch;
mod shape;
mod tile;

pub(crate) use launch::{launch_backward, launch_forward};
pub use shape::MatrixTiles;
