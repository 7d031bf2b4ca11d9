//! The feed-forward half of a layer.

use super::config::LlamaConfig;
use super::init::Init;
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_distflash::{Checkpointing, Join, SegmentError, Tiles, linear, swiglu, tiled_segment};

/// SwiGLU: `down(silu(gate(x)) ∘ up(x))` (Shazeer, arXiv 2002.05202).
#[derive(Module, Debug)]
pub struct Mlp {
    pub(super) gate_proj: Linear,
    pub(super) up_proj: Linear,
    pub(super) down_proj: Linear,
}

impl Mlp {
    pub(super) fn new(config: &LlamaConfig, init: &mut Init) -> Self {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        Self {
            gate_proj: init.linear(width, inner),
            up_proj: init.linear(width, inner),
            down_proj: init.linear(inner, width),
        }
    }

    /// `x` and the result are `[batch, len, hidden_size]`.
    #[must_use]
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let gate = linear(x.clone(), self.gate_proj.weight.val());
        let up = linear(x, self.up_proj.weight.val());
        linear(swiglu(gate, up), self.down_proj.weight.val())
    }

    /// As [`forward`](Self::forward), of so many tokens at a time, forward and backward.
    ///
    /// # Errors
    /// See [`tiled_segment`].
    pub(super) fn forward_tiled(&self, x: Tensor<3>, tile_len: usize) -> Result<Tensor<3>, SegmentError> {
        let tiles = Tiles { dim: 1, len: tile_len, join: Join::Cat };
        tiled_segment(self, x, tiles, Checkpointing::Boundary, |mlp: &Self, x, _| Ok(mlp.forward(x)))
    }
}
