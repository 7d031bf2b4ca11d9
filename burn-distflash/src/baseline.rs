//! Ring Self-Attention, to compare with: exact, but with whole rows of scores in memory.

use crate::attend::AttentionOptions;
use crate::executor::{AttentionCall, Direction, HeadExchange};
use crate::plan::Plan;
use crate::tokens::exchange_heads;
use burn::tensor::{Bool, DType, Tensor, TensorData};

/// Attention by keys and values gathered from all ranks and whole rows of scores (Li et al., *Sequence
/// Parallelism*, arXiv 2105.13120): `[batch, heads, shard_len, seq_len]` of them, in the accumulator's dtype.
///
/// The same bytes travel as in its ring: every shard of keys and values once to every rank, and back as
/// gradients.
pub(crate) fn whole_rows(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    plan: &Plan,
    options: &AttentionOptions,
    call: AttentionCall,
) -> (Tensor<4>, Tensor<4>) {
    let (dtype, device) = (query.dtype(), query.device());
    let [batch, heads, rows, head_dim] = query.dims();
    let kv_heads = key.dims()[1];
    let world = plan.layout().world_size();
    let all = HeadExchange {
        comm: call.comm.clone(),
        operation: "all keys and values",
        number: call.number,
        peers: (0..world).collect(),
        place: call.comm.rank(),
        heads: vec![std::iter::once(0..2 * kv_heads).collect(); world],
        lens: (0..world).map(|rank| plan.layout().shard_len(rank)).collect(),
    };
    // As one: the order in which a backward pass comes to two exchanges need not be the same on all ranks.
    let both = exchange_heads(Tensor::cat(vec![key, value], 1), all, Direction::Scatter);
    if rows == 0 {
        // Nothing to compute here, but the others wait for this rank's part in the gradients.
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let lse = Tensor::zeros([batch, heads, 0, 1], (&device, wide));
        let nothing = both.sum() * 0.;
        return (query + nothing.reshape([1, 1, 1, 1]), lse);
    }
    let [key, value] = [0..kv_heads, kv_heads..2 * kv_heads].map(|heads| both.clone().slice_dim(1, heads));
    let len = key.dims()[2];
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    // The query heads of one key/value head become rows of one product.
    let group = heads / kv_heads;
    let by_group = |x: Tensor<4>| x.cast(wide).reshape([batch, kv_heads, group * rows, head_dim]);
    let scores = by_group(query).matmul(key.cast(wide).swap_dims(2, 3)).mul_scalar(call.options.scale);
    let scores = scores.reshape([batch, heads, rows, len]);

    let seq_len = plan.layout().seq_len();
    let mask = options.mask.intervals(seq_len, seq_len).expect("the plan's own mask");
    let seen = plan.layout().shard_mask(&mask, call.comm.rank());
    let hidden: Vec<bool> = (0..rows)
        .flat_map(|row| {
            (0..len).map({
                let seen = seen.row(row);
                move |k| !seen.contains(&k)
            })
        })
        .collect();
    let hidden = Tensor::<2, Bool>::from_data(TensorData::new(hidden, [rows, len]), &device);
    let hidden = hidden.reshape([1, 1, rows, len]).expand([batch, heads, rows, len]);
    let scores = scores.mask_fill(hidden.clone(), -1e30);
    let max = scores.clone().detach().max_dim(3);
    let weights = (scores - max.clone()).exp().mask_fill(hidden, 0.);
    let sum = weights.clone().sum_dim(3);
    // Rows that see nothing divide nothing by one.
    let nothing = sum.clone().equal_elem(0.);
    let weights = weights / sum.clone().mask_fill(nothing.clone(), 1.);
    let lse = (max + sum.log()).mask_fill(nothing, f64::NEG_INFINITY).detach();
    let out = weights.reshape([batch, kv_heads, group * rows, len]).matmul(value.cast(wide));
    (out.reshape([batch, heads, rows, head_dim]).cast(dtype), lse)
}
