//! Attention on one device, over one chunk of keys at a time.

mod chunk;
mod composed;
pub(crate) mod ops;

pub use chunk::{ChunkAttention, ChunkGradient, Previous};
