//! Megatron-LM's way of sharing a layer, as a baseline: each rank computes some heads and some of the MLP for all
//! tokens; between them the residual stream is sharded over the sequence.
//!
//! Weights are whole on every rank, and used in part: their gradients, summed over ranks, are those of the whole.

use super::attention::SelfAttention;
use super::mlp::Mlp;
use super::rope::RotaryEmbedding;
use burn::tensor::Tensor;
use burn_distflash::{
    AttentionError, AttentionOptions, Context, HeadShare, flash_attention, gather_tokens, sum_tokens, swiglu,
};
use std::ops::Range;

/// Columns of a `[inputs, outputs]` weight.
fn columns(weight: Tensor<2>, range: Range<usize>) -> Tensor<3> {
    weight.slice_dim(1, range).unsqueeze()
}

impl SelfAttention {
    /// As [`forward`](Self::forward), by this rank's share of the heads over all tokens; `rope` is that of the whole
    /// sequence. Heads of zeros are added until the ranks divide them, and computed like all others.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub(super) fn forward_megatron(
        &self,
        x: Tensor<3>,
        rope: &RotaryEmbedding,
        options: &AttentionOptions,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        let x = gather_tokens(x, context)?;
        let [batch, len, _] = x.dims();
        let head_dim = self.head_dim;
        let weights = [&self.q_proj, &self.k_proj, &self.v_proj].map(|linear| linear.weight.val());
        let [heads, kv_heads] = [0, 1].map(|i: usize| weights[i].dims()[1] / head_dim);
        let group = heads / kv_heads;
        let is_whole = |kv: &usize| (kv * group).is_multiple_of(context.world_size());
        let padded = (kv_heads..).find(is_whole).expect("one of the next `world_size`");
        let share = HeadShare::cut(padded * group, padded, context.world_size()).swap_remove(context.rank());

        // Some heads of all tokens, those beyond the model's as zeros.
        let project = |weight: &Tensor<2>, wanted: &Range<usize>, present: usize| {
            let real = wanted.start.min(present)..wanted.end.min(present);
            let missing = wanted.len() - real.len();
            let zeros = Tensor::zeros([batch, len, missing * head_dim], (&x.device(), x.dtype()));
            if real.is_empty() {
                return zeros;
            }
            let projected = x.clone().matmul(columns(weight.clone(), real.start * head_dim..real.end * head_dim));
            if missing == 0 { projected } else { Tensor::cat(vec![projected, zeros], 2) }
        };
        let heads_of = |projected: Tensor<3>| {
            let count = projected.dims()[2] / head_dim;
            projected.reshape([batch, len, count, head_dim]).swap_dims(1, 2)
        };
        let output = self.o_proj.weight.val();
        // A rank whose heads are all added ones still takes part, forward and backward.
        let mut sum = x.clone() * 0.;
        for block in share.blocks() {
            let query = heads_of(rope.turn(project(&weights[0], &block.heads, heads)));
            let key = heads_of(rope.turn(project(&weights[1], &block.kv_heads, kv_heads)));
            let value = heads_of(project(&weights[2], &block.kv_heads, kv_heads));
            let (out, _) = flash_attention(query, key, value, options)?;
            let real = block.heads.start.min(heads)..block.heads.end.min(heads);
            if real.is_empty() {
                continue;
            }
            let out = out.slice_dim(1, 0..real.len()).swap_dims(1, 2).reshape([batch, len, real.len() * head_dim]);
            let rows = output.clone().slice_dim(0, real.start * head_dim..real.end * head_dim);
            sum = sum + out.matmul(rows.unsqueeze());
        }
        Ok(sum_tokens(sum, context)?)
    }
}

impl Mlp {
    /// As [`forward`](Self::forward), by this rank's share of the inner width over all tokens.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub(super) fn forward_megatron(&self, x: Tensor<3>, context: &Context) -> Result<Tensor<3>, AttentionError> {
        let x = gather_tokens(x, context)?;
        let inner = self.gate_proj.weight.dims()[1];
        let (rank, world) = (context.rank(), context.world_size());
        let own = inner * rank / world..inner * (rank + 1) / world;
        let mut sum = x.clone() * 0.;
        if !own.is_empty() {
            let [gate, up] = [&self.gate_proj, &self.up_proj]
                .map(|linear| x.clone().matmul(columns(linear.weight.val(), own.clone())));
            let down = self.down_proj.weight.val().slice_dim(0, own);
            sum = sum + swiglu(gate, up).matmul(down.unsqueeze());
        }
        Ok(sum_tokens(sum, context)?)
    }
}

/// The rotary embedding of the whole sequence, as Megatron-LM's ranks see it.
pub(super) fn whole_rope(head_dim: usize, theta: f64, like: &Tensor<3>, context: &Context) -> RotaryEmbedding {
    let positions: Vec<usize> = (0..context.layout().seq_len()).collect();
    RotaryEmbedding::new(&positions, head_dim, theta, like.dtype(), &like.device())
}
