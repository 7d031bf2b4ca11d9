//! Attention on one device, over one chunk of keys at a time.

mod chunk;
mod composed;
#[cfg(feature = "cube")]
mod cube;
pub(crate) mod ops;
mod support;

#[cfg(feature = "cuda")]
pub(crate) use cube::has_aligned_rows;
pub(crate) use support::refusal;

pub use chunk::{ChunkAttention, ChunkGradient, ChunkOptions, Previous};
