//! Attention as written in a textbook, in the operands' own precision, differentiated by Burn: what
//! bounds are derived from.

use crate::bound::{Results, host};
use crate::problem::Problem;
use burn::tensor::{DType, Device, Tensor, TensorData};

/// Runs `problem` with the whole score matrix at once.
///
/// # Panics
/// If Burn's autodiff gives no gradient.
#[must_use]
pub fn naive(problem: &Problem) -> Results {
    let device = Device::flex().autodiff();
    let dims = problem.dims;
    let group = dims.heads / dims.kv_heads;
    let leaf = |index| problem.tensor(index, &device).require_grad();
    let (query, key, value) = (leaf(0), leaf(1), leaf(2));
    let repeated = |x: Tensor<4>| {
        let [b, h, n, d] = x.dims();
        x.reshape([b, h, 1, n * d]).repeat_dim(2, group).reshape([b, h * group, n, d])
    };
    // A finite floor keeps rows that see nothing from becoming NaN; `sees_any` then makes them zero.
    let floor = if problem.dtype == DType::F16 { -3e4 } else { -1e30 };
    let (mut bias, mut sees_any) = (Vec::new(), Vec::new());
    let mask = problem.intervals();
    for row in 0..dims.num_rows {
        let seen = mask.row(row);
        bias.extend((0..dims.num_keys).map(|key| if seen.contains(&key) { 0. } else { floor }));
        sees_any.push(if seen.is_empty() { 0f32 } else { 1. });
    }
    let constant = |values: Vec<f32>, shape: [usize; 4]| {
        Tensor::<4>::from_data(TensorData::new(values, shape).convert_dtype(problem.dtype), (&device, problem.dtype))
    };
    let bias = constant(bias, [1, 1, dims.num_rows, dims.num_keys]);
    let sees_any = constant(sees_any, [1, 1, dims.num_rows, 1]);

    let scores = query.clone().matmul(repeated(key.clone()).transpose()).mul_scalar(problem.scale()) + bias;
    let max = scores.clone().detach().max_dim(3);
    let exp = (scores - max.clone()).exp();
    let sum = exp.clone().sum_dim(3);
    let out = (exp / sum.clone()).matmul(repeated(value.clone())) * sees_any.clone();
    let lse = (max + sum.log()).inner();
    let grads = (out.clone() * problem.tensor(3, &device)).sum().backward();
    let grad = |x: &Tensor<4>| host(x.grad(&grads).expect("every operand is used"));

    let visible: Vec<f64> = host(sees_any.inner());
    let lse = host(lse).into_iter().enumerate().map(|(i, lse)| {
        let is_visible = visible[i % dims.num_rows] == 1.;
        if is_visible { lse } else { f64::NEG_INFINITY }
    });
    Results {
        out: host(out.inner()),
        lse: lse.collect(),
        d_query: grad(&query),
        d_key: grad(&key),
        d_value: grad(&value),
    }
}
