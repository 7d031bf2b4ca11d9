//! Rotary embedding of queries or keys.

use super::{UNITS, cubes, vector_size};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// One unit turns a vector of a head's first half with the one of its second that it is paired with.
#[cube(launch, address_type = "dynamic")]
fn turn_pairs<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    cos: &Tensor<Vector<f32, N>>,
    sin: &Tensor<Vector<f32, N>>,
    out: &mut Tensor<Vector<E, N>>,
    heads: usize,
    half: usize,
    sign: f32,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= out.len() / 2 {
        terminate!();
    }
    let column = ABSOLUTE_POS % half;
    let head = ABSOLUTE_POS / half;
    let token = head / heads;
    let angle = token * half % cos.len() + column;
    let first = 2 * head * half + column;
    let second = first + half;
    let a = Vector::<f32, N>::cast_from(x[first]);
    let b = Vector::<f32, N>::cast_from(x[second]);
    let c = cos[angle];
    let s = sin[angle] * Vector::new(sign);
    out[first] = Vector::cast_from(a * c - b * s);
    out[second] = Vector::cast_from(b * c + a * s);
}

/// Turns pairs of elements: `out[i] = x[i] · cos − x[i + half] · sin`, `out[i + half] = x[i + half] · cos + x[i] · sin`
/// with `half = head_dim / 2`. Backward turns them back.
///
/// # Shapes
/// - `x`, `out`: `[batch, len, heads · head_dim]`; `out` is written
/// - `cos`, `sin`: `[len, half]`, f32
pub fn rotate(
    client: &Client,
    x: TensorBinding,
    [cos, sin]: [TensorBinding; 2],
    out: TensorBinding,
    backward: bool,
    dtype: ElemType,
    address_type: AddressType,
) {
    let len: usize = out.shape.iter().product();
    if len == 0 {
        return;
    }
    let half = cos.shape[1];
    // As many of the table's f32 as of x: 16 bytes of those.
    let vector = vector_size(dtype, &[half]).min(4);
    let heads = out.shape[2] / (2 * half);
    turn_pairs::launch(
        client,
        cubes(client, len / 2 / vector),
        CubeDim::new_1d(UNITS),
        address_type,
        vector,
        x.into_tensor_arg(),
        cos.into_tensor_arg(),
        sin.into_tensor_arg(),
        out.into_tensor_arg(),
        heads,
        half / vector,
        if backward { -1. } else { 1. },
        dtype,
    );
}
