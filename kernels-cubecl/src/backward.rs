//! Backward: gradients of a block's queries, keys and values, without atomics: the same bits in every run.

use crate::blueprint::Blueprint;
#[cfg(feature = "cuda")]
use crate::hopper;
use crate::problem::AttentionProblem;
use crate::{matrix, units};
use cubecl::client::Client;
use cubecl::prelude::{AddressType, TensorBinding};

/// Operands and results of [`launch`].
#[derive(Clone, Debug)]
pub struct BackwardTensors {
    /// `[batch, heads, num_rows, head_dim]`, any strides.
    pub query: TensorBinding,
    /// `[batch, kv_heads, num_keys, head_dim]`, any strides.
    pub key: TensorBinding,
    /// As `key`.
    pub value: TensorBinding,
    /// As `query`.
    pub d_out: TensorBinding,
    /// f32 `[batch, heads, num_rows, 1]` over all keys, any strides.
    pub lse: TensorBinding,
    /// f32, as `lse`: `Σ out · d_out` of each row.
    pub delta: TensorBinding,
    /// Dense u32 `[2 · num_rows]`: all lower bounds, then all upper ones.
    pub bounds: TensorBinding,
    /// Dense f32 `[batch, heads, num_rows, head_dim]`, written.
    pub d_query: TensorBinding,
    /// Dense f32 `[2, batch, kv_heads, num_keys, head_dim]`, written: `d_key`, then `d_value`.
    pub d_key_value: TensorBinding,
}

/// Computes this block's share of all gradients of `problem`. `address_type` must reach the last element
/// of every tensor.
///
/// Rows of the operands must be [aligned](Blueprint::needs_aligned_rows) where the blueprint needs it.
///
/// # Panics
/// If the tensors do not have the shapes of `problem`.
pub fn launch(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: Blueprint,
    tensors: BackwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    problem.assert_shapes(&[&tensors.query, &tensors.d_out, &tensors.d_query], &[&tensors.key, &tensors.value]);
    if problem.batch * problem.heads == 0 {
        return;
    }
    match blueprint {
        #[cfg(feature = "cuda")]
        Blueprint::Hopper(tiles) => hopper::launch_backward(client, problem, tiles, tensors, scale, address_type),
        Blueprint::Matrix(tiles) => matrix::launch_backward(client, problem, tiles, tensors, scale, address_type),
        Blueprint::Units(tiles) => units::launch_backward(client, problem, tiles, tensors, scale, address_type),
    }
}
