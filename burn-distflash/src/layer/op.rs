//! These pieces as a backend's operations.
#![allow(clippy::type_complexity, reason = "a backend extension returns its tensors as a tuple")]

use super::composed;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};

/// What Burn's fusion must know of results before they are computed.
#[cfg(feature = "fusion")]
mod spec {
    use crate::attention::ops::accumulator;
    use burn::backend::fusion::custom::TensorSpec;

    /// A number for each row.
    pub fn scale(x: &TensorSpec) -> TensorSpec {
        TensorSpec::new([x.shape[0]].into(), accumulator(x.dtype))
    }
}

/// RMSNorm, SwiGLU and rotary embedding; [`rms_norm`](crate::rms_norm()), [`swiglu`](crate::swiglu()) and
/// [`rotate`](crate::rotate()) are what a model calls.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff, Fusion: cfg(feature = "fusion"))]
pub trait LayerOps: Backend {
    /// `x · scale · weight` of `[rows, width]`, and `scale = 1 / √(mean(x²) + epsilon)` of each row, in the
    /// accumulator's dtype and never tracked.
    #[fusion(meta = |x, _weight, _epsilon| (x.clone(), spec::scale(x)))]
    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::rms_norm::<Self>(x, weight, epsilon)
    }

    /// Gradients of `x` and `weight`.
    #[fusion(meta = |x, weight, _scale, _d_out| (x.clone(), weight.clone()))]
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::rms_norm_backward::<Self>(x, weight, scale, d_out)
    }

    /// `silu(gate) ∘ up`.
    #[fusion(meta = |gate, _up| gate.clone())]
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        composed::swiglu::<Self>(gate, up)
    }

    /// Gradients of `gate` and `up`.
    #[fusion(meta = |gate, up, _d_out| (gate.clone(), up.clone()))]
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        composed::swiglu_backward::<Self>(gate, up, d_out)
    }

    /// `x` of `[batch, len, heads · head_dim]`, turned by angles of `[len, head_dim / 2]`, or turned back.
    #[fusion(meta = |x, _cos, _sin, _back| x.clone())]
    fn rotate(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>, back: bool) -> FloatTensor<Self> {
        composed::rotate::<Self>(x, cos, sin, back)
    }
}

impl LayerOps for Flex {}
