//! One layer.

use super::attention::SelfAttention;
use super::config::LlamaConfig;
use super::execution::Execution;
use super::init::Init;
use super::mlp::Mlp;
use super::rope::RotaryEmbedding;
use burn::module::Module;
use burn::nn::RmsNorm;
use burn::tensor::Tensor;
use burn_distflash::{AttentionError, AttentionOptions, Context, rms_norm};

/// Attention and MLP, each normalised before and added to the residual stream.
#[derive(Module, Debug)]
pub struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl DecoderLayer {
    pub(super) fn new(config: &LlamaConfig, init: &mut Init) -> Self {
        Self {
            input_layernorm: init.norm(config),
            self_attn: SelfAttention::new(config, init),
            post_attention_layernorm: init.norm(config),
            mlp: Mlp::new(config, init),
        }
    }

    /// As [`forward`](Self::forward), shared Megatron-LM's way; `rope` is that of the whole sequence.
    pub(super) fn forward_megatron(
        &self,
        x: Tensor<3>,
        rope: &RotaryEmbedding,
        options: &AttentionOptions,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        let input = normed(&self.input_layernorm, x.clone());
        let x = x + self.self_attn.forward_megatron(input, rope, options, context)?;
        let input = normed(&self.post_attention_layernorm, x.clone());
        Ok(x + self.mlp.forward_megatron(input, context)?)
    }

    /// `x` and the result are `[batch, shard_len, hidden_size]`.
    ///
    /// # Errors
    /// See [`dist_attention`](burn_distflash::dist_attention).
    pub fn forward(
        &self,
        x: Tensor<3>,
        rope: &RotaryEmbedding,
        execution: &Execution,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        let input = normed(&self.input_layernorm, x.clone());
        let x = x + self.self_attn.forward(input, rope, &execution.attention, context)?;
        let input = normed(&self.post_attention_layernorm, x.clone());
        let fed = match execution.mlp_tile {
            Some(tile_len) => self.mlp.forward_tiled(input, tile_len)?,
            None => self.mlp.forward(input),
        };
        Ok(x + fed)
    }
}

/// `x` normalised by this project's kernels; Burn's `RmsNorm` only holds the weight.
pub(super) fn normed<const D: usize>(norm: &RmsNorm, x: Tensor<D>) -> Tensor<D> {
    rms_norm(x, norm.gamma.val(), norm.epsilon)
}
