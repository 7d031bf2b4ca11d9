//! Grids of the kernels for matrix units.

use super::shape::MatrixTiles;
use super::{dkdv, dq, forward};
use crate::backward::BackwardTensors;
use crate::forward::ForwardTensors;
use crate::problem::AttentionProblem;
use cubecl::client::Client;
use cubecl::prelude::{AddressType, TensorArg, TensorBinding};
use cubecl::server::CubeCountSelection;

/// As [`forward::launch`](crate::forward::launch).
pub(crate) fn launch_forward(
    client: &Client,
    problem: &AttentionProblem,
    tiles: MatrixTiles,
    tensors: ForwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    let AttentionProblem { batch, heads, num_rows, dtype, .. } = *problem;
    let tile = tiles.forward;
    let cubes = CubeCountSelection::new(client, (num_rows.div_ceil(tile.outer()) * batch * heads) as u32);
    let [previous_out, previous_lse] = tensors.previous;
    // SAFETY: every index is of a row below the tensor's number of rows and a column below head_dim, and the
    // tensors have the problem's shapes.
    unsafe {
        forward::attention_forward::launch_unchecked(
            client,
            cubes.cube_count(),
            tile.cube_dim(),
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
            tile,
            dtype,
        );
    }
}

/// As [`backward::launch`](crate::backward::launch).
pub(crate) fn launch_backward(
    client: &Client,
    problem: &AttentionProblem,
    tiles: MatrixTiles,
    tensors: BackwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    let AttentionProblem { batch, heads, kv_heads, num_rows, num_keys, dtype, .. } = *problem;
    let BackwardTensors { query, key, value, d_out, lse, delta, bounds, d_query, d_key_value } = tensors;
    let arg = |tensor: &TensorBinding| -> TensorArg { tensor.clone().into_tensor_arg() };
    if num_rows > 0 {
        let tile = tiles.d_query;
        let cubes = CubeCountSelection::new(client, (num_rows.div_ceil(tile.outer()) * batch * heads) as u32);
        // SAFETY: every index is of a row below the tensor's number of rows and a column below head_dim, and the
        // tensors have the problem's shapes.
        unsafe {
            dq::attention_backward_dq::launch_unchecked(
                client,
                cubes.cube_count(),
                tile.cube_dim(),
                address_type,
                arg(&query),
                arg(&key),
                arg(&value),
                arg(&d_out),
                arg(&lse),
                arg(&delta),
                arg(&bounds),
                d_query.into_tensor_arg(),
                scale,
                tile,
                dtype,
            );
        }
    }
    if num_keys > 0 {
        let tile = tiles.d_key_value;
        let num_tiles = num_keys.div_ceil(tile.outer()) * tile.splits;
        let cubes = CubeCountSelection::new(client, (num_tiles * batch * kv_heads) as u32);
        // SAFETY: every index is of a row below the tensor's number of rows and a column below head_dim, and the
        // tensors have the problem's shapes.
        unsafe {
            dkdv::attention_backward_dkdv::launch_unchecked(
                client,
                cubes.cube_count(),
                tile.cube_dim(),
                address_type,
                arg(&query),
                arg(&key),
                arg(&value),
                arg(&d_out),
                arg(&lse),
                arg(&delta),
                arg(&bounds),
                d_key_value.into_tensor_arg(),
                scale,
                tile,
                dtype,
            );
        }
    }
}
