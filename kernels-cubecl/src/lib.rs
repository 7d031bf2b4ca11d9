//! What an attention kernel computes, independent of who computes it.
//!
//! Every mask reaches a kernel as [`RowIntervals`]: query row `i` sees the keys `lo[i]..hi[i]` and no
//! others. Tiles of the score matrix are skipped, computed whole, or masked element by element after
//! one comparison of intervals ([`RowIntervals::tile`]).
//!
//! The [`mod@reference`] module (feature `reference`) is the f64 host oracle that tests hold every
//! implementation against.

mod intervals;
#[cfg(feature = "reference")]
pub mod reference;

pub use intervals::{IntervalError, RowIntervals, Tile};
