//! What is done to partials between blocks: merging two of them, and the sums that the backward pass
//! starts from.

use crate::walk::row_offset;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::CubeCountSelection;

const UNITS: u32 = 64;

fn cubes(client: &Client, elements: usize) -> CubeCount {
    CubeCountSelection::new(client, (elements as u64).div_ceil(u64::from(UNITS)) as u32).cube_count()
}

/// One unit a row: `delta = Σ out · d_out`.
#[cube(launch, address_type = "dynamic")]
fn row_products<E: Float>(out: &Tensor<E>, d_out: &Tensor<E>, delta: &mut Tensor<f32>, #[define(E)] _dtype: ElemType) {
    if ABSOLUTE_POS >= delta.len() {
        terminate!();
    }
    let (heads, num_rows) = (out.shape(1), out.shape(2));
    let row = ABSOLUTE_POS % num_rows;
    let head = ABSOLUTE_POS / num_rows % heads;
    let batch = ABSOLUTE_POS / num_rows / heads;
    let base = row_offset(out, batch, head, row);
    let d_base = row_offset(d_out, batch, head, row);
    let mut sum = 0.0f32;
    for column in 0..out.shape(3) {
        let d = f32::cast_from(d_out[d_base + column * d_out.stride(3)]);
        sum += f32::cast_from(out[base + column * out.stride(3)]) * d;
    }
    delta[ABSOLUTE_POS] = sum;
}

/// One unit an element: `out = Σ wᵢ · outᵢ`, `wᵢ = exp(lseᵢ − lse)`, `lse = ln Σ exp lseᵢ`.
#[cube(launch, address_type = "dynamic")]
fn merge_partials(
    out_a: &Tensor<f32>,
    lse_a: &Tensor<f32>,
    out_b: &Tensor<f32>,
    lse_b: &Tensor<f32>,
    out: &mut Tensor<f32>,
    lse: &mut Tensor<f32>,
    nothing: f32,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let (heads, num_rows, head_dim) = (out_a.shape(1), out_a.shape(2), out_a.shape(3));
    let column = ABSOLUTE_POS % head_dim;
    let row = ABSOLUTE_POS / head_dim % num_rows;
    let head = ABSOLUTE_POS / head_dim / num_rows % heads;
    let batch = ABSOLUTE_POS / head_dim / num_rows / heads;
    let a = lse_a[row_offset(lse_a, batch, head, row)];
    let b = lse_b[row_offset(lse_b, batch, head, row)];
    // Finite even where neither saw anything, so that no -inf is subtracted from itself.
    let m = max(max(a, b), f32::MIN);
    let (weight_a, weight_b) = ((a - m).exp(), (b - m).exp());
    let sum = weight_a + weight_b;
    let divisor = select(sum == 0.0f32, 1.0f32, sum);
    let at_a = row_offset(out_a, batch, head, row) + column * out_a.stride(3);
    let at_b = row_offset(out_b, batch, head, row) + column * out_b.stride(3);
    out[ABSOLUTE_POS] = (weight_a * out_a[at_a] + weight_b * out_b[at_b]) / divisor;
    if column == 0 {
        lse[ABSOLUTE_POS / head_dim] = select(sum == 0.0f32, nothing, m + divisor.ln());
    }
}

/// `delta = Σ out · d_out` of each row, in f32.
///
/// # Shapes
/// `out`, `d_out`: `[batch, heads, num_rows, head_dim]`, any strides; `delta`: dense
/// `[batch, heads, num_rows, 1]`, written.
pub fn delta(
    client: &Client,
    out: TensorBinding,
    d_out: TensorBinding,
    delta: TensorBinding,
    dtype: ElemType,
    address_type: AddressType,
) {
    let rows = delta.shape.iter().product();
    if rows == 0 {
        return;
    }
    row_products::launch(
        client,
        cubes(client, rows),
        CubeDim::new_1d(UNITS),
        address_type,
        out.into_tensor_arg(),
        d_out.into_tensor_arg(),
        delta.into_tensor_arg(),
        dtype,
    );
}

/// The partial over the keys of both `a` and `b`: attention is a mean of values with weights, and so is the
/// mean of two such means.
///
/// # Shapes
/// Each is `(out, lse)` in f32, `[batch, heads, num_rows, head_dim]` and `[batch, heads, num_rows, 1]`; the
/// result is dense, written.
pub fn merge(
    client: &Client,
    a: [TensorBinding; 2],
    b: [TensorBinding; 2],
    result: [TensorBinding; 2],
    address_type: AddressType,
) {
    let elements = result[0].shape.iter().product();
    if elements == 0 {
        return;
    }
    let [out_a, lse_a] = a.map(TensorBinding::into_tensor_arg);
    let [out_b, lse_b] = b.map(TensorBinding::into_tensor_arg);
    let [out, lse] = result.map(TensorBinding::into_tensor_arg);
    merge_partials::launch(
        client,
        cubes(client, elements),
        CubeDim::new_1d(UNITS),
        address_type,
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        f32::NEG_INFINITY,
    );
}
