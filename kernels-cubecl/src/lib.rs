//! What an attention kernel computes, and the kernels that do on any CubeCL runtime.
//!
//! Every mask reaches a kernel as [`RowIntervals`]: query row `i` sees the keys `lo[i]..hi[i]` and no
//! others. Tiles of the score matrix are skipped, computed whole, or masked element by element after
//! one comparison of intervals ([`RowIntervals::tile`]).
//!
//! With the feature of a runtime (`cuda`, `wgpu`, `cpu`), `forward` and `backward` are the kernels:
//! chosen and shaped at launch by a `Blueprint`:
//! for matrix units where the device has them, and in f32 arithmetic for every runtime.
//!
//! With the feature `cuda`, `product` is the matrix product of linear layers for Hopper GPUs.
//!
//! The [`mod@reference`] module (feature `reference`) is the f64 host oracle that tests hold every
//! implementation against.

#[cfg(feature = "cube")]
pub mod backward;
#[cfg(feature = "cube")]
mod blueprint;
#[cfg(feature = "emit")]
pub mod emit;
#[cfg(feature = "cube")]
pub mod forward;
#[cfg(feature = "cuda")]
mod hopper;
mod intervals;
mod kernel;
#[cfg(feature = "cube")]
pub mod layer;
#[cfg(feature = "cube")]
mod matrix;
#[cfg(feature = "cube")]
pub mod partial;
#[cfg(feature = "cube")]
mod problem;
#[cfg(feature = "cuda")]
pub mod product;
#[cfg(feature = "reference")]
pub mod reference;
#[cfg(feature = "cube")]
pub mod tune;
#[cfg(feature = "cube")]
mod units;
#[cfg(feature = "cube")]
mod walk;

#[cfg(feature = "cube")]
pub use blueprint::Blueprint;
#[cfg(feature = "cuda")]
pub use hopper::{Half, HopperTiles};
pub use intervals::{IntervalError, RowIntervals, Tile};
pub use kernel::Kernel;
#[cfg(feature = "cube")]
pub use matrix::MatrixTiles;
#[cfg(feature = "cube")]
pub use problem::{AttentionProblem, Refusal};
#[cfg(feature = "cube")]
pub use units::UnitTiles;
