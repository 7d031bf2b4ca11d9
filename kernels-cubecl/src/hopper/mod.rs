//! The kernels for Hopper (compute capability 9.0): products of whole warpgroups (`wgmma`), operands copied by
//! the tensor memory accelerator, and warpgroups that do one thing each.
//!
//! 16-bit operands of 64 or 128 columns. Written in CubeCL around a few PTX instructions, which live in `ptx`
//! and `wgmma`; the recurrences in `forward` and `backward` read like the portable ones.

#![allow(clippy::manual_is_multiple_of, reason = "device code has no such method")]
#![allow(clippy::collapsible_if, reason = "what is known at compile time comes first, alone")]

pub(crate) mod backward;
pub(crate) mod forward;
mod launch;
pub(crate) mod ptx;
mod shape;
pub(crate) mod wgmma;

pub(crate) use launch::{launch_backward, launch_forward};
#[cfg(feature = "emit")]
pub(crate) use shape::BackwardTiles;
pub use shape::HopperTiles;
pub(crate) use shape::require_hopper;
pub use wgmma::Half;
