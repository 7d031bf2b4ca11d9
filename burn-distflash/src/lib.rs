#![doc = include_str!("../README.md")]

mod attend;
mod attention;
mod balance;
mod baseline;
pub mod comm;
mod context;
mod error;
mod executor;
mod fsdp;
mod gradients;
mod heads;
mod layer;
mod layout;
mod linear;
mod mask;
mod op;
mod plan;
pub mod schedule;
mod segment;
mod strategy;
mod tokens;

pub use attend::{AttentionOptions, dist_attention, flash_attention};
pub use attention::{ChunkAttention, ChunkGradient, ChunkOptions, Previous};
pub use balance::balanced_layout;
pub use comm::{CommError, Communicator};
pub use context::Context;
pub use distflash_kernels::{IntervalError, Kernel, RowIntervals, Tile};
pub use error::AttentionError;
pub use executor::{AttentionCall, Direction, HeadExchange};
pub use fsdp::{Mesh, MeshError, Prefetch, Sharded, Sharding, UnknownSharding, clip_shards, scale_gradients};
pub use gradients::{SummedGradients, sum_gradients};
pub use heads::{HeadBlock, HeadShare};
pub use layer::{LayerOps, rms_norm, rotate, swiglu};
pub use layout::{Layout, Rank, Span};
pub use linear::{LinearProduct, ProductForm, linear};
pub use mask::{Mask, MaskError};
pub use op::DistAttention;
pub use plan::{Plan, PlanError};
pub use segment::{
    Checkpointing, Flag, Join, KeptBytes, Policy, Replay, SegmentError, SegmentOps, Slot, TensorMapper, Tensors, Tiles,
    UnknownCheckpointing, check_segments, kept_by_segments, segment, tiled_segment,
};
pub use strategy::{Sequence, Strategy, StrategyError, UnknownStrategy};
pub use tokens::{gather_tokens, sum_tokens};
