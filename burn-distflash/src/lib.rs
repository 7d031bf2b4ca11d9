#![doc = include_str!("../README.md")]

mod attend;
mod attention;
pub mod comm;
mod context;
mod error;
mod executor;
mod gradients;
mod layout;
mod mask;
mod op;
mod plan;
pub mod schedule;
mod strategy;

pub use attend::{AttentionOptions, dist_attention, flash_attention};
pub use attention::{ChunkAttention, ChunkGradient, ChunkOptions, Previous};
pub use comm::{CommError, Communicator};
pub use context::Context;
pub use distflash_kernels::{IntervalError, Kernel, RowIntervals, Tile};
pub use error::AttentionError;
pub use executor::AttentionCall;
pub use gradients::{SummedGradients, sum_gradients};
pub use layout::{Layout, Rank, Span};
pub use mask::{Mask, MaskError};
pub use op::DistAttention;
pub use strategy::{Strategy, UnknownStrategy};
