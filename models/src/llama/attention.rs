//! Self-attention over a sharded sequence.

use super::config::LlamaConfig;
use super::init::Init;
use super::rope::RotaryEmbedding;
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_distflash::{AttentionError, AttentionOptions, Context, dist_attention, linear};

/// Grouped-query attention of this rank's tokens to those of all ranks.
#[derive(Module, Debug)]
pub struct SelfAttention {
    pub(super) q_proj: Linear,
    pub(super) k_proj: Linear,
    pub(super) v_proj: Linear,
    pub(super) o_proj: Linear,
    #[module(skip)]
    pub(super) head_dim: usize,
}

impl SelfAttention {
    pub(super) fn new(config: &LlamaConfig, init: &mut Init) -> Self {
        let (width, head_dim) = (config.hidden_size, config.head_dim);
        let (queries, keys) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        Self {
            q_proj: init.linear(width, queries),
            k_proj: init.linear(width, keys),
            v_proj: init.linear(width, keys),
            o_proj: init.linear(queries, width),
            head_dim,
        }
    }

    /// `x` and the result are `[batch, shard_len, hidden_size]`.
    ///
    /// # Errors
    /// See [`dist_attention`].
    pub fn forward(
        &self,
        x: Tensor<3>,
        rope: &RotaryEmbedding,
        options: &AttentionOptions,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        let [batch, len, _] = x.dims();
        let heads = |projected: Tensor<3>| {
            let count = projected.dims()[2] / self.head_dim;
            projected.reshape([batch, len, count, self.head_dim]).swap_dims(1, 2)
        };
        let query = heads(rope.turn(linear(x.clone(), self.q_proj.weight.val())));
        let key = heads(rope.turn(linear(x.clone(), self.k_proj.weight.val())));
        let value = heads(linear(x, self.v_proj.weight.val()));
        let (out, _) = dist_attention(query, key, value, options, context)?;
        let [_, count, _, _] = out.dims();
        let out = out.swap_dims(1, 2).reshape([batch, len, count * self.head_dim]);
        Ok(linear(out, self.o_proj.weight.val()))
    }
}
