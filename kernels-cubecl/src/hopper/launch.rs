//! Grids, tensor maps and scales of the Hopper kernels.

use super::shape::{BackwardTiles, ForwardTiles, HopperTiles, Side};
use super::wgmma::BOX;
use super::{backward, forward};
use crate::backward::BackwardTensors;
use crate::forward::ForwardTensors;
use crate::problem::AttentionProblem;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::CubeCountSelection;

/// A tensor seen by the copying unit in boxes of `rows` rows by 64 columns.
fn map(tensor: TensorBinding, rows: usize, dtype: ElemType) -> TensorMapArg<Tiled> {
    let boxes = TiledArgs::new([1, 1, rows, BOX].into());
    TensorMapArg::new(boxes, tensor.into_tensor_arg(), dtype).with_swizzle(TensorMapSwizzle::B128)
}

/// The kernels keep maxima of unscaled scores, which a scale of 0 would make useless: this one differs from it by
/// less than any rounding.
fn magnitude(scale: f32) -> f32 {
    scale.abs().max(1e-30)
}

/// As [`forward::launch`](crate::forward::launch).
pub(crate) fn launch_forward(
    client: &Client,
    problem: &AttentionProblem,
    tiles: HopperTiles,
    tensors: ForwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    let AttentionProblem { batch, heads, kv_heads, num_rows, head_dim, dtype, .. } = *problem;
    let tiles = ForwardTiles { negative: scale < 0., ..tiles.forward };
    let cubes = CubeCountSelection::new(client, (num_rows.div_ceil(tiles.queries()) * batch * heads) as u32);
    let [previous_out, previous_lse] = tensors.previous;
    // SAFETY: copies of rows or columns that are not there give zeros; every other index is of a row below
    // the tensor's number of rows.
    unsafe {
        forward::attention_forward::launch_unchecked(
            client,
            cubes.cube_count(),
            tiles.cube_dim(),
            address_type,
            head_dim / 2,
            map(tensors.query, 64, dtype),
            map(tensors.key, tiles.keys(), dtype),
            map(tensors.value, tiles.keys(), dtype),
            tensors.bounds.into_tensor_arg(),
            previous_out.into_tensor_arg(),
            previous_lse.into_tensor_arg(),
            tensors.out.into_tensor_arg(),
            tensors.lse.into_tensor_arg(),
            (heads / kv_heads) as u32,
            magnitude(scale),
            f32::NEG_INFINITY,
            tensors.has_previous,
            tiles,
            dtype,
        );
    }
}

/// As [`backward::launch`](crate::backward::launch).
pub(crate) fn launch_backward(
    client: &Client,
    problem: &AttentionProblem,
    tiles: HopperTiles,
    tensors: BackwardTensors,
    scale: f32,
    address_type: AddressType,
) {
    let AttentionProblem { batch, heads, kv_heads, num_rows, num_keys, head_dim, dtype } = *problem;
    let BackwardTensors { query, key, value, d_out, lse, delta, bounds, d_query, d_key_value } = tensors;
    let launch = |tiles: BackwardTiles, len: usize, planes: usize, gradient: TensorBinding| {
        let tiles = BackwardTiles { negative: scale < 0., ..tiles };
        let cubes = CubeCountSelection::new(client, (len.div_ceil(tiles.outer()) * planes) as u32);
        let operand = |tensor: &TensorBinding| map(tensor.clone(), 64, dtype);
        // SAFETY: as in the forward pass.
        unsafe {
            backward::attention_backward::launch_unchecked(
                client,
                cubes.cube_count(),
                tiles.cube_dim(),
                address_type,
                head_dim / 2,
                operand(&query),
                operand(&key),
                operand(&value),
                operand(&d_out),
                lse.clone().into_tensor_arg(),
                delta.clone().into_tensor_arg(),
                bounds.clone().into_tensor_arg(),
                gradient.into_tensor_arg(),
                heads / kv_heads,
                num_keys,
                magnitude(scale),
                scale,
                tiles,
                dtype,
            );
        }
    };
    debug_assert_eq!((tiles.d_query.side, tiles.d_key_value.side), (Side::Queries, Side::Keys));
    launch(tiles.d_query, num_rows, batch * heads, d_query);
    launch(tiles.d_key_value, num_keys, batch * kv_heads, d_key_value);
}
