//! Whole sequences from shards and back, for models that share something other than attention.

use crate::comm::CommError;
use crate::context::Context;
use crate::executor::{Direction, HeadExchange};
use crate::op::DistAttention;
use burn::backend::Dispatch;
use burn::tensor::Tensor;

/// All ranks' tokens, on every rank: `[batch, shard_len, width]` becomes `[batch, seq_len, width]`, rank after rank.
/// Differentiable: the gradients of all ranks add up at the tokens' owner.
///
/// All ranks call it together, and so do their backward passes.
///
/// # Errors
/// If a peer is lost or sends nothing within the group's time limit.
///
/// # Panics
/// Unless there are `shard_len` tokens.
pub fn gather_tokens(tensor: Tensor<3>, context: &Context) -> Result<Tensor<3>, CommError> {
    assert_eq!(tensor.dims()[1], context.shard_len(), "this rank's tokens");
    moved(tensor, context, "gathering tokens", Direction::Scatter)
}

/// The transpose of [`gather_tokens`]: `[batch, seq_len, width]`, summed over ranks, of which each keeps its own
/// tokens, `[batch, shard_len, width]`. The sum is taken in f32. Differentiable.
///
/// # Errors
/// As [`gather_tokens`].
///
/// # Panics
/// Unless there are `seq_len` tokens.
pub fn sum_tokens(tensor: Tensor<3>, context: &Context) -> Result<Tensor<3>, CommError> {
    assert_eq!(tensor.dims()[1], context.layout().seq_len(), "the whole sequence");
    moved(tensor, context, "summing tokens", Direction::Gather)
}

/// `tensor` after an all-to-all over heads. Differentiable.
pub(crate) fn exchange_heads(tensor: Tensor<4>, exchange: HeadExchange, direction: Direction) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::exchange_heads(tensor.into_dispatch(), exchange, direction))
}

/// As an exchange of one head, which every rank takes.
fn moved(
    tensor: Tensor<3>,
    context: &Context,
    operation: &'static str,
    direction: Direction,
) -> Result<Tensor<3>, CommError> {
    let comm = context.communicator();
    comm.check()?;
    let world = context.world_size();
    let exchange = HeadExchange {
        number: comm.next_call(),
        comm: comm.clone(),
        operation,
        peers: (0..world).collect(),
        place: context.rank(),
        heads: vec![std::iter::once(0..1).collect(); world],
        lens: (0..world).map(|rank| context.layout().shard_len(rank)).collect(),
    };
    let [batch, len, width] = tensor.dims();
    // To Burn's reshape a 0 means "as before": a shard without tokens keeps them where they were.
    let moved = exchange_heads(tensor.reshape([batch, len, 1, width]).swap_dims(1, 2), exchange, direction);
    comm.check()?;
    let [_, _, len, _] = moved.dims();
    Ok(moved.swap_dims(1, 2).reshape([batch, len, width]))
}
