//! The contract between the executor and whoever computes attention.

use super::composed;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, ExtensionType, Flex, backend_extension};
use distflash_kernels::{Kernel, RowIntervals};

/// How a block is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkOptions {
    /// Multiplies the logits.
    pub scale: f64,
    /// Which kernels, where there is a choice.
    pub kernel: Kernel,
}

/// What queries have already attended to elsewhere.
#[derive(Clone, Debug, ExtensionType)]
#[cfg_attr(feature = "fusion", extension_type(fusion))]
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
#[cfg_attr(feature = "fusion", extension_type(fusion))]
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

/// What Burn's fusion must know of a result before it is computed: `like` in the accumulator's dtype, with
/// `width` columns if that is not its own number.
#[cfg(feature = "fusion")]
fn full(
    like: &burn::backend::fusion::custom::TensorSpec,
    width: Option<usize>,
) -> burn::backend::fusion::custom::TensorSpec {
    let mut shape = like.shape.clone();
    if let Some(width) = width {
        shape[3] = width;
    }
    burn::backend::fusion::custom::TensorSpec::new(shape, super::ops::accumulator(like.dtype))
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
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff, Fusion: cfg(feature = "fusion"))]
pub trait ChunkAttention: Backend {
    /// `out = softmax(scale · query · keyᵀ) · value` over the keys `mask` lets each row see and those
    /// already in `previous`; `lse` is the logarithm of the softmax's denominator, in nats. A row that
    /// sees nothing gives `out = 0` and `lse = -inf`.
    #[fusion(meta = |query, _key, _value, _previous, _mask, _options| (full(query, None), full(query, Some(1))))]
    fn chunk_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] previous: Previous<Self>,
        mask: RowIntervals,
        options: ChunkOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::forward::<Self>(query, key, value, previous, &mask, options.scale)
    }

    /// This block's share of the gradients of query, key and value. Rows that see nothing get zeros.
    #[fusion(meta = |inputs, _mask, _options| {
        (full(&inputs.query, None), full(&inputs.key, None), full(&inputs.value, None))
    })]
    fn chunk_backward(
        #[extension_type] inputs: ChunkGradient<Self>,
        mask: RowIntervals,
        options: ChunkOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        composed::backward::<Self>(inputs, &mask, options.scale)
    }

    /// `delta = Σ out · d_out` over each row's elements, in the accumulator's dtype.
    #[fusion(meta = |out, _d_out| full(out, Some(1)))]
    fn chunk_delta(out: FloatTensor<Self>, d_out: FloatTensor<Self>) -> FloatTensor<Self> {
        composed::delta::<Self>(out, d_out)
    }

    /// The partial over the keys of both `a` and `b`, each `(out, lse)` over other keys: attention is a mean
    /// of values with weights, and so is the mean of two such means.
    #[fusion(meta = |out_a, lse_a, _out_b, _lse_b| (out_a.clone(), lse_a.clone()))]
    fn chunk_merge(
        out_a: FloatTensor<Self>,
        lse_a: FloatTensor<Self>,
        out_b: FloatTensor<Self>,
        lse_b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::merge::<Self>((out_a, lse_a), (out_b, lse_b))
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
        _: ChunkOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        panic!("chunk_forward is not differentiable: call flash_attention or dist_attention")
    }

    fn chunk_backward(
        _: ChunkGradient<Self>,
        _: RowIntervals,
        _: ChunkOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        panic!("chunk_backward is not differentiable: attention has no second derivative here")
    }

    fn chunk_delta(_: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
        panic!("chunk_delta is not differentiable: attention has no second derivative here")
    }

    fn chunk_merge(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        panic!("chunk_merge is not differentiable: call flash_attention or dist_attention")
    }
}
