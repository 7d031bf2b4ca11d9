//! Forward: `out` and `lse` of a block of queries, merged into what they saw before.

use crate::blueprint::Blueprint;
#[cfg(feature = "cuda")]
use crate::hopper;
use crate::problem::AttentionProblem;
use crate::{matrix, units};
use cubecl::client::Client;
use cubecl::prelude::{AddressType, TensorBinding};

/// Operands and results of [`launch`].
#[derive(Clone, Debug)]
pub struct ForwardTensors {
    /// `[batch, heads, num_rows, head_dim]`, any strides.
    pub query: TensorBinding,
    /// `[batch, kv_heads, num_keys, head_dim]`, any strides.
    pub key: TensorBinding,
    /// As `key`.
    pub value: TensorBinding,
    /// Dense u32 `[2 · num_rows]`: all lower bounds, then all upper ones.
    pub bounds: TensorBinding,
    /// f32 `out` and `lse` over other keys, in the shapes of the results; without one, any two f32
    /// tensors, which are not read.
    pub previous: [TensorBinding; 2],
    /// Whether `previous` is one.
    pub has_previous: bool,
    /// Dense f32 `[batch, heads, num_rows, head_dim]`, written.
    pub out: TensorBinding,
    /// Dense f32 `[batch, heads, num_rows, 1]`, written.
    pub lse: TensorBinding,
}

/// Computes `out` and `lse` of `problem`. `address_type` must reach the last element of every tensor.
///
/// Rows of the operands must be [aligned](Blueprint::needs_aligned_rows) where the blueprint needs it.
///
/// # Panics
/// If the tensors do not have the shapes of `problem`.
pub fn launch(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: Blueprint,
    tensors: ForwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    let AttentionProblem { batch, heads, num_rows, .. } = *problem;
    problem.assert_shapes(&[&tensors.query, &tensors.out], &[&tensors.key, &tensors.value]);
    if batch * heads * num_rows == 0 {
        return;
    }
    match blueprint {
        #[cfg(feature = "cuda")]
        Blueprint::Hopper(tiles) => hopper::launch_forward(client, problem, tiles, tensors, scale, address_type),
        Blueprint::Matrix(tiles) => matrix::launch_forward(client, problem, tiles, tensors, scale, address_type),
        Blueprint::Units(tiles) => units::launch_forward(client, problem, tiles, tensors, scale, address_type),
    }
}
