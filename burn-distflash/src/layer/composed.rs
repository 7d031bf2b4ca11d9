//! By a backend's own operations, in the accumulator's dtype.

use crate::attention::ops::{self, accumulator};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Slice;

type Float<B> = FloatTensor<B>;

fn wide<B: Backend>(tensor: Float<B>) -> Float<B> {
    let dtype = accumulator(tensor.dtype());
    ops::cast::<B>(tensor, dtype)
}

/// `[width]` as `[1, width]`, `[rows]` as `[rows, 1]`.
fn shaped<B: Backend>(tensor: Float<B>, dims: [usize; 2]) -> Float<B> {
    B::float_reshape(tensor, dims.into())
}

pub fn rms_norm<B: Backend>(x: Float<B>, weight: Float<B>, epsilon: f64) -> (Float<B>, Float<B>) {
    let ([rows, width], dtype) = (x.shape().dims(), x.dtype());
    let x = wide::<B>(x);
    let squares = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), 1);
    let scale = B::float_recip(B::float_sqrt(B::float_add_scalar(squares, epsilon.into())));
    let normed = B::float_mul(B::float_mul(x, scale.clone()), shaped::<B>(wide::<B>(weight), [1, width]));
    (ops::cast::<B>(normed, dtype), B::float_reshape(scale, [rows].into()))
}

pub fn rms_norm_backward<B: Backend>(
    x: Float<B>,
    weight: Float<B>,
    scale: Float<B>,
    d_out: Float<B>,
) -> (Float<B>, Float<B>) {
    let ([rows, width], dtype) = (x.shape().dims(), x.dtype());
    let scale = shaped::<B>(scale, [rows, 1]);
    let (normed, d_out) = (B::float_mul(wide::<B>(x), scale.clone()), wide::<B>(d_out));
    let d_weight = B::float_sum_dim(B::float_mul(d_out.clone(), normed.clone()), 0);
    let grad = B::float_mul(d_out, shaped::<B>(wide::<B>(weight), [1, width]));
    let mean = B::float_mean_dim(B::float_mul(grad.clone(), normed.clone()), 1);
    let d_x = B::float_mul(B::float_sub(grad, B::float_mul(normed, mean)), scale);
    let d_weight = B::float_reshape(d_weight, [width].into());
    (ops::cast::<B>(d_x, dtype), ops::cast::<B>(d_weight, dtype))
}

pub fn swiglu<B: Backend>(gate: Float<B>, up: Float<B>) -> Float<B> {
    let dtype = gate.dtype();
    let gate = wide::<B>(gate);
    let share = B::sigmoid(gate.clone());
    ops::cast::<B>(B::float_mul(B::float_mul(gate, share), wide::<B>(up)), dtype)
}

pub fn swiglu_backward<B: Backend>(gate: Float<B>, up: Float<B>, d_out: Float<B>) -> (Float<B>, Float<B>) {
    let dtype = gate.dtype();
    let (gate, d_out) = (wide::<B>(gate), wide::<B>(d_out));
    let share = B::sigmoid(gate.clone());
    let silu = B::float_mul(gate, share.clone());
    // σ · (1 + gate · (1 − σ)) = σ + silu · (1 − σ)
    let rest = B::float_add_scalar(B::float_neg(share.clone()), 1f64.into());
    let slope = B::float_add(share, B::float_mul(silu.clone(), rest));
    let d_gate = B::float_mul(B::float_mul(d_out.clone(), wide::<B>(up)), slope);
    (ops::cast::<B>(d_gate, dtype), ops::cast::<B>(B::float_mul(d_out, silu), dtype))
}

pub fn rotate<B: Backend>(x: Float<B>, cos: Float<B>, sin: Float<B>, back: bool) -> Float<B> {
    let ([batch, len, width], [_, half]) = (x.shape().dims(), cos.shape().dims());
    let (dtype, heads) = (x.dtype(), width / half / 2);
    let x = B::float_reshape(wide::<B>(x), [batch, len, heads, 2 * half].into());
    let part = |from: usize| {
        let ranges = [0..batch, 0..len, 0..heads, from..from + half].map(Slice::from);
        B::float_slice(x.clone(), &ranges)
    };
    let (a, b) = (part(0), part(half));
    let [cos, sin] = [cos, sin].map(|table| B::float_reshape(table, [1, len, 1, half].into()));
    let sin = if back { B::float_neg(sin) } else { sin };
    let first = B::float_sub(B::float_mul(a.clone(), cos.clone()), B::float_mul(b.clone(), sin.clone()));
    let second = B::float_add(B::float_mul(b, cos), B::float_mul(a, sin));
    let turned = B::float_reshape(B::float_cat(vec![first, second], 3), [batch, len, width].into());
    ops::cast::<B>(turned, dtype)
}
