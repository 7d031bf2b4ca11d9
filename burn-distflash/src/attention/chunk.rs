//! The contract between the executor and whoever computes attention.

use super::composed;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, ExtensionType, Flex, backend_extension};
use distflash_kernels::RowIntervals;

/// What queries have already attended to elsewhere.
#[derive(Clone, Debug, ExtensionType)]
pub enum Previous<B: Backend> {
    /// Nothing.
    Nothing,
    /// A partial over other keys.
    Partial {
        /// `[batch, heads, num_rows, head_dim]`, normalised, in the accumulator's dtype.
        out: FloatTensor<B>,
        /// `[batch, heads, num_rows, 1]`, in nats, `-inf` where no key was seen.
        lse: FloatTensor<B>,
    },
}

/// What the gradient of a block is computed from.
#[derive(Clone, Debug, ExtensionType)]
pub struct ChunkGradient<B: Backend> {
    /// As in the forward.
    pub query: FloatTensor<B>,
    /// As in the forward.
    pub key: FloatTensor<B>,
    /// As in the forward.
    pub value: FloatTensor<B>,
    /// Over *all* keys, not only this block's.
    pub lse: FloatTensor<B>,
    /// `Σ out · d_out` over each row's elements, with the final `out`.
    pub delta: FloatTensor<B>,
    /// Gradient of `out`.
    pub d_out: FloatTensor<B>,
}

/// Exact attention of a block of queries over a block of keys, in pieces that can be merged.
///
/// # Shapes
/// - `query`, `d_out`, `out`: `[batch, heads, num_rows, head_dim]`
/// - `key`, `value`: `[batch, kv_heads, num_keys, head_dim]`; query head `h` reads key/value head
///   `h / (heads / kv_heads)`, nothing is repeated
/// - `lse`, `delta`: `[batch, heads, num_rows, 1]`
///
/// The accumulator is f32, or f64 where the operands are: `out`, `lse` and all gradients come in it.
///
/// These are the kernels below the differentiable op; [`flash_attention`](crate::flash_attention) and
/// [`dist_attention`](crate::dist_attention) are what a model calls.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait ChunkAttention: Backend {
    /// `out = softmax(scale · query · keyᵀ) · value` over the keys `mask` lets each row see and those
    /// already in `previous`; `lse` is the logarithm of the softmax's denominator, in nats. A row that
    /// sees nothing gives `out = 0` and `lse = -inf`.
    fn chunk_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] previous: Previous<Self>,
        mask: RowIntervals,
        scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::forward::<Self>(query, key, value, previous, &mask, scale)
    }

    /// This block's share of the gradients of query, key and value. Rows that see nothing get zeros.
    fn chunk_backward(
        #[extension_type] inputs: ChunkGradient<Self>,
        mask: RowIntervals,
        scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        composed::backward::<Self>(inputs, &mask, scale)
    }
}

impl ChunkAttention for Flex {}

/// Present because the dispatcher routes through it; the op below which these methods lie has its own
/// backward, so a tracked tensor never needs them.
impl<B: ChunkAttention, C: CheckpointStrategy> ChunkAttention for Autodiff<B, C> {
    fn chunk_forward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: Previous<Self>,
        _: RowIntervals,
        _: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        panic!("chunk_forward is not differentiable: call flash_attention or dist_attention")
    }

    fn chunk_backward(
        _: ChunkGradient<Self>,
        _: RowIntervals,
        _: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        panic!("chunk_backward is not differentiable: attention has no second derivative here")
    }
}
