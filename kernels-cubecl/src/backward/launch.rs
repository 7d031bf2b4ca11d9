//! Grids and checks of the backward kernels.

use super::dkdv::attention_backward_dkdv;
use super::dq::attention_backward_dq;
use crate::blueprint::Blueprint;
use crate::problem::AttentionProblem;
use cubecl::client::Client;
use cubecl::prelude::{AddressType, TensorBinding};
use cubecl::server::CubeCountSelection;

/// Operands and results of [`launch`].
#[derive(Debug)]
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
pub fn launch(
    client: &Client,
    problem: &AttentionProblem,
    blueprint: Blueprint,
    tensors: BackwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    let grid =
        |len: usize, planes: usize| CubeCountSelection::new(client, (len.div_ceil(blueprint.outer()) * planes) as u32);
    let BackwardTensors { query, key, value, d_out, lse, delta, bounds, d_query, d_key_value } = tensors;
    if problem.num_rows * problem.batch * problem.heads > 0 {
        attention_backward_dq::launch(
            client,
            grid(problem.num_rows, problem.batch * problem.heads).cube_count(),
            blueprint.cube_dim(),
            address_type,
            query.clone().into_tensor_arg(),
            key.clone().into_tensor_arg(),
            value.clone().into_tensor_arg(),
            d_out.clone().into_tensor_arg(),
            lse.clone().into_tensor_arg(),
            delta.clone().into_tensor_arg(),
            bounds.clone().into_tensor_arg(),
            d_query.into_tensor_arg(),
            scale,
            blueprint,
            problem.dtype,
        );
    }
    if problem.num_keys * problem.batch * problem.kv_heads > 0 {
        attention_backward_dkdv::launch(
            client,
            grid(problem.num_keys, problem.batch * problem.kv_heads).cube_count(),
            blueprint.cube_dim(),
            address_type,
            query.into_tensor_arg(),
            key.into_tensor_arg(),
            value.into_tensor_arg(),
            d_out.into_tensor_arg(),
            lse.into_tensor_arg(),
            delta.into_tensor_arg(),
            bounds.into_tensor_arg(),
            d_key_value.into_tensor_arg(),
            scale,
            blueprint,
            problem.dtype,
        );
    }
}
