//! SwiGLU between the products of an MLP.

use super::{UNITS, cubes, vector_size};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// `σ(x) = 1 / (1 + exp(−x))`.
#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    one / (one + (-x).exp())
}

#[cube(launch, address_type = "dynamic")]
fn gate_values<E: Float, N: Size>(
    gate: &Tensor<Vector<E, N>>,
    up: &Tensor<Vector<E, N>>,
    out: &mut Tensor<Vector<E, N>>,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= out.len() {
        terminate!();
    }
    let g = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
    let u = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
    out[ABSOLUTE_POS] = Vector::cast_from(g * sigmoid::<N>(g) * u);
}

#[cube(launch, address_type = "dynamic")]
fn gate_gradients<E: Float, N: Size>(
    gate: &Tensor<Vector<E, N>>,
    up: &Tensor<Vector<E, N>>,
    d_out: &Tensor<Vector<E, N>>,
    d_gate: &mut Tensor<Vector<E, N>>,
    d_up: &mut Tensor<Vector<E, N>>,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= d_gate.len() {
        terminate!();
    }
    let g = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
    let u = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
    let d = Vector::<f32, N>::cast_from(d_out[ABSOLUTE_POS]);
    let share = sigmoid::<N>(g);
    let one = Vector::<f32, N>::new(1.0f32);
    d_gate[ABSOLUTE_POS] = Vector::cast_from(d * u * share * (one + g * (one - share)));
    d_up[ABSOLUTE_POS] = Vector::cast_from(d * g * share);
}

/// `out = silu(gate) ∘ up`, element by element.
///
/// All three are of one size and `dtype`; `out` is written.
pub fn swiglu(
    client: &Client,
    [gate, up]: [TensorBinding; 2],
    out: TensorBinding,
    dtype: ElemType,
    address_type: AddressType,
) {
    let len: usize = out.shape.iter().product();
    if len == 0 {
        return;
    }
    let vector = vector_size(dtype, &[len]);
    gate_values::launch(
        client,
        cubes(client, len / vector),
        CubeDim::new_1d(UNITS),
        address_type,
        vector,
        gate.into_tensor_arg(),
        up.into_tensor_arg(),
        out.into_tensor_arg(),
        dtype,
    );
}

/// Gradients of [`swiglu`]: with `σ = σ(gate)`, `d_gate = d_out ∘ up ∘ σ ∘ (1 + gate ∘ (1 − σ))` and
/// `d_up = d_out ∘ gate ∘ σ`, both written.
pub fn swiglu_backward(
    client: &Client,
    [gate, up, d_out]: [TensorBinding; 3],
    [d_gate, d_up]: [TensorBinding; 2],
    dtype: ElemType,
    address_type: AddressType,
) {
    let len: usize = d_gate.shape.iter().product();
    if len == 0 {
        return;
    }
    let vector = vector_size(dtype, &[len]);
    gate_gradients::launch(
        client,
        cubes(client, len / vector),
        CubeDim::new_1d(UNITS),
        address_type,
        vector,
        gate.into_tensor_arg(),
        up.into_tensor_arg(),
        d_out.into_tensor_arg(),
        d_gate.into_tensor_arg(),
        d_up.into_tensor_arg(),
        dtype,
    );
}
