//! What an attention kernel computes, and the kernels that do on any CubeCL runtime.
//!
//! Every mask reaches a kernel as [`RowIntervals`]: query row `i` sees the keys `lo[i]..hi[i]` and no
//! others. Tiles of the score matrix are skipped, computed whole, or masked element by element after
//! one comparison of intervals ([`RowIntervals::tile`]).
//!
//! With the feature of a runtime (`cuda`, `wgpu`, `cpu`), `forward` and `backward` are the kernels:
//! one source for all runtimes, shaped at launch by a `Blueprint`.
//!
//! The [`mod@reference`] module (feature `reference`) is the f64 host oracle that tests hold every
//! implementation against.

#[cfg(feature = "cube")]
pub mod backward;
#[cfg(feature = "cube")]
mod blueprint;
#[cfg(feature = "cube")]
pub mod forward;
mod intervals;
#[cfg(feature = "cube")]
mod problem;
#[cfg(feature = "reference")]
pub mod reference;
#[cfg(feature = "cube")]
mod tile;

#[cfg(feature = "cube")]
pub use blueprint::Blueprint;
pub use intervals::{IntervalError, RowIntervals, Tile};
#[cfg(feature = "cube")]
pub use problem::{AttentionProblem, Refusal};
