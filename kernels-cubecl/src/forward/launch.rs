//! Grid and checks of the forward kernel.

use super::kernel::attention_forward;
use crate::blueprint::Blueprint;
use crate::problem::AttentionProblem;
use cubecl::client::Client;
use cubecl::prelude::{AddressType, TensorBinding};
use cubecl::server::CubeCountSelection;

/// Operands and results of [`launch`].
#[derive(Debug)]
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
pub fn launch(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: Blueprint,
    tensors: ForwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    let tiles = problem.num_rows.div_ceil(blueprint.outer()) * problem.batch * problem.heads;
    if tiles == 0 {
        return;
    }
    let [previous_out, previous_lse] = tensors.previous;
    attention_forward::launch(
        client,
        CubeCountSelection::new(client, tiles as u32).cube_count(),
        blueprint.cube_dim(),
        address_type,
        tensors.query.into_tensor_arg(),
        tensors.key.into_tensor_arg(),
        tensors.value.into_tensor_arg(),
        tensors.bounds.into_tensor_arg(),
        previous_out.into_tensor_arg(),
        previous_lse.into_tensor_arg(),
        tensors.out.into_tensor_arg(),
        tensors.lse.into_tensor_arg(),
        scale,
        f32::NEG_INFINITY,
        tensors.has_previous,
        blueprint,
        problem.dtype,
    );
}
