//! RMSNorm, SwiGLU and rotary embedding against their formulas in f64, outputs and all gradients.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_distflash::{rms_norm, rotate, swiglu};
use distflash_tests::{Compared, Draw, assert_close, device, host, takes};
use rstest::rstest;

const EPSILON: f64 = 1e-5;

/// Values of a dtype, and as the host computes with them.
struct Values {
    dtype: DType,
    given: Vec<f64>,
}

impl Values {
    /// As `dtype` has them.
    fn draw(seed: u64, len: usize, dtype: DType) -> Self {
        let drawn = TensorData::new(Draw::new(seed).uniform(len, 2.), [len]).convert_dtype(dtype);
        Self { dtype, given: drawn.iter::<f64>().collect() }
    }

    fn tensor<const D: usize>(&self, dims: [usize; D], device: &Device) -> Tensor<D> {
        let data = TensorData::new(self.given.clone(), dims).convert_dtype(self.dtype);
        Tensor::from_data(data, (device, self.dtype))
    }
}

/// Arithmetic in f64, or in f32 as a naive run has it.
trait Number:
    Copy
    + std::iter::Sum
    + std::ops::Mul<Output = Self>
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Div<Output = Self>
{
    fn of(value: f64) -> Self;
    fn exp(self) -> Self;
    fn sqrt(self) -> Self;
    fn f64(self) -> f64;
}

macro_rules! number {
    ($type:ty) => {
        impl Number for $type {
            fn of(value: f64) -> Self {
                value as $type
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            fn f64(self) -> f64 {
                self.into()
            }
        }
    };
}
number!(f32);
number!(f64);

/// Results by formula.
type Formula = Vec<Vec<f64>>;

/// Output, and gradients of `x` and `weight`.
fn norm_formula<T: Number>([x, weight, d_out]: [&[f64]; 3]) -> Formula {
    let width = weight.len();
    let of = |values: &[f64]| values.iter().map(|&value| T::of(value)).collect::<Vec<T>>();
    let weight = of(weight);
    let mut results = [Vec::new(), Vec::new(), vec![T::of(0.); width]];
    for (x, d_out) in x.chunks(width).zip(d_out.chunks(width)) {
        let (x, d_out) = (of(x), of(d_out));
        let mean = |values: Vec<T>| values.into_iter().sum::<T>() / T::of(width as f64);
        let scale = T::of(1.) / (mean(x.iter().map(|&x| x * x).collect()) + T::of(EPSILON)).sqrt();
        // y_j = γ_j s x_j and ∂s/∂x_i = −s³ x_i / width.
        let through = mean((0..width).map(|j| d_out[j] * weight[j] * x[j]).collect());
        for i in 0..width {
            results[0].push(x[i] * scale * weight[i]);
            results[1].push(scale * d_out[i] * weight[i] - scale * scale * scale * x[i] * through);
            results[2][i] = results[2][i] + d_out[i] * x[i] * scale;
        }
    }
    results.map(|result| result.into_iter().map(T::f64).collect()).to_vec()
}

/// Output, and gradients of gate and up.
fn gate_formula<T: Number>([gate, up, d_out]: [&[f64]; 3]) -> Formula {
    let mut results = vec![Vec::new(); 3];
    for ((&gate, &up), &d_out) in gate.iter().zip(up).zip(d_out) {
        let (g, u, d) = (T::of(gate), T::of(up), T::of(d_out));
        let one = T::of(1.);
        let sigmoid = one / (one + (T::of(0.) - g).exp());
        let slope = sigmoid + g * sigmoid * (one - sigmoid);
        for (result, value) in results.iter_mut().zip([g * sigmoid * u, d * u * slope, d * g * sigmoid]) {
            result.push(value.f64());
        }
    }
    results
}

/// Output, and the gradient of `x`, of `heads` heads a token.
fn turn_formula<T: Number>([x, angles, d_out]: [&[f64]; 3], heads: usize, half: usize) -> Formula {
    let tokens = angles.len() / half;
    let turned = |x: &[f64], sign: f64| -> Vec<f64> {
        let mut out = x.to_vec();
        for (at, pair) in out.chunks_mut(2 * half).enumerate() {
            let angles = &angles[at / heads % tokens * half..][..half];
            for i in 0..half {
                let (cos, sin) = (T::of(angles[i].cos()), T::of(sign * angles[i].sin()));
                let (a, b) = (T::of(pair[i]), T::of(pair[i + half]));
                (pair[i], pair[i + half]) = ((a * cos - b * sin).f64(), (b * cos + a * sin).f64());
            }
        }
        out
    };
    vec![turned(x, 1.), turned(d_out, -1.)]
}

/// Asserts that gradients by formula are those of the output by formula: central differences of `Σ out · d_out`.
fn assert_gradients(formula: impl Fn([&[f64]; 3]) -> Formula, values: [Vec<f64>; 3], inputs: usize) {
    let [a, b, d_out] = values;
    let results = formula([&a, &b, &d_out]);
    let loss = |a: &[f64], b: &[f64]| formula([a, b, &d_out])[0].iter().zip(&d_out).map(|(y, d)| y * d).sum::<f64>();
    let step = 1e-5;
    for (input, expected) in results[1..=inputs].iter().enumerate() {
        for (at, expected) in expected.iter().enumerate() {
            let moved = |by: f64| {
                let mut both = [a.clone(), b.clone()];
                both[input][at] += by;
                loss(&both[0], &both[1])
            };
            let difference = (moved(step) - moved(-step)) / (2. * step);
            assert!((difference - expected).abs() < 1e-8, "input {input}, element {at}: {difference}, {expected}");
        }
    }
}

#[test]
fn formulas_of_gradients_are_the_slopes_of_the_outputs() {
    let draw = |seed, len| Draw::new(seed).uniform(len, 2.).into_iter().map(f64::from).collect::<Vec<f64>>();
    assert_gradients(norm_formula::<f64>, [draw(1, 21), draw(2, 7), draw(3, 21)], 2);
    assert_gradients(gate_formula::<f64>, [draw(1, 9), draw(2, 9), draw(3, 9)], 2);
    assert_gradients(|values| turn_formula::<f64>(values, 2, 3), [draw(1, 24), draw(2, 6), draw(3, 24)], 1);
}

/// Rounded to `dtype`, as a naive run stores them.
fn stored(values: &[f64], dtype: DType) -> Vec<f64> {
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    data.iter::<f64>().collect()
}

/// `terms`: of how many terms an element is the sum, by result.
fn assert_all(
    case: &str,
    dtype: DType,
    actual: [Option<Vec<f64>>; 3],
    [naive, truth]: [Formula; 2],
    terms: [usize; 3],
) {
    let names = ["out", "first gradient", "second gradient"];
    for ((((name, actual), naive), truth), terms) in names.iter().zip(actual).zip(&naive).zip(&truth).zip(terms) {
        let naive = stored(naive, dtype);
        let largest = truth.iter().fold(0f64, |most, x| most.max(x.abs()));
        // What cancels in a sum of `terms` is at most about its square root larger than what is left.
        let magnitude = largest * (terms as f64).sqrt();
        let actual = actual.expect("a gradient of what is tracked");
        assert_close(case, name, dtype, Compared { actual: &actual, naive: &naive, truth, magnitude });
    }
}

/// Widths that fill vectors and not, and several for each unit of a cube; more rows than cubes; and no rows.
#[rstest]
fn norms_are_exact(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values(([2, 3], 64), ([1, 1], 1), ([1, 5], 7), ([1, 2], 4100), ([1, 1], 16_384), ([3, 400], 12), ([2, 0], 8))]
    ([batch, len], width): ([usize; 2], usize),
) {
    if !takes(dtype) {
        return;
    }
    let device = device().autodiff();
    let rows = batch * len;
    let [x, weight, d_out] =
        [(1, rows * width), (2, width), (3, rows * width)].map(|(seed, len)| Values::draw(seed, len, dtype));
    let leaf = x.tensor([batch, len, width], &device).require_grad();
    let gamma = weight.tensor([width], &device).require_grad();
    let out = rms_norm(leaf.clone(), gamma.clone(), EPSILON);
    assert_eq!((out.dims(), out.dtype()), ([batch, len, width], dtype));
    let grads = (out.clone() * d_out.tensor([batch, len, width], &device)).sum().backward();
    let given = [&x.given[..], &weight.given, &d_out.given];
    let actual = [Some(host(out.inner())), leaf.grad(&grads).map(host), gamma.grad(&grads).map(host)];
    let formulas = [norm_formula::<f32>(given), norm_formula::<f64>(given)];
    assert_all(&format!("norm of {rows} by {width}, {dtype:?}"), dtype, actual, formulas, [width, width, rows.max(1)]);
}

#[rstest]
fn gates_are_exact(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values([2, 3, 16], [1, 1, 1], [1, 5, 7], [2, 130, 24], [1, 0, 8])] dims: [usize; 3],
    #[values(false, true)] turned: bool,
) {
    if !takes(dtype) {
        return;
    }
    let device = device().autodiff();
    let len = dims.iter().product();
    let [gate, up, d_out] = [1, 2, 3].map(|seed| Values::draw(seed, len, dtype));
    let leaves = [&gate, &up].map(|values| values.tensor(dims, &device).require_grad());
    // Operands that lie otherwise in memory.
    let turn = |tensor: Tensor<3>| if turned { tensor.swap_dims(1, 2) } else { tensor };
    let out = turn(swiglu(turn(leaves[0].clone()), turn(leaves[1].clone())));
    assert_eq!((out.dims(), out.dtype()), (dims, dtype));
    let grads = (out.clone() * d_out.tensor(dims, &device)).sum().backward();
    let given = [&gate.given[..], &up.given, &d_out.given];
    let actual = [Some(host(out.inner())), leaves[0].grad(&grads).map(host), leaves[1].grad(&grads).map(host)];
    let formulas = [gate_formula::<f32>(given), gate_formula::<f64>(given)];
    assert_all(&format!("gate of {dims:?}, {dtype:?}"), dtype, actual, formulas, [1; 3]);
}

#[rstest]
fn turns_are_exact(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values(([2, 3], 1, 16), ([1, 1], 33, 2), ([2, 7], 3, 10), ([1, 130], 28, 64), ([2, 0], 2, 8))]
    ([batch, len], heads, head_dim): ([usize; 2], usize, usize),
) {
    if !takes(dtype) {
        return;
    }
    let device = device().autodiff();
    let (half, dims) = (head_dim / 2, [batch, len, heads * head_dim]);
    let [x, d_out] = [1, 3].map(|seed| Values::draw(seed, dims.iter().product(), dtype));
    let angles: Vec<f64> = Draw::new(2).uniform(len * half, 3.).into_iter().map(f64::from).collect();
    let table = |of: fn(f64) -> f64| {
        let values = Values { dtype: DType::F32, given: angles.iter().map(|&angle| of(angle)).collect() };
        values.tensor([len, half], &device)
    };
    let leaf = x.tensor(dims, &device).require_grad();
    let out = rotate(leaf.clone(), [table(f64::cos), table(f64::sin)]);
    assert_eq!((out.dims(), out.dtype()), (dims, dtype));
    let grads = (out.clone() * d_out.tensor(dims, &device)).sum().backward();
    let given = [&x.given[..], &angles, &d_out.given];
    let mut formulas = [turn_formula::<f32>(given, heads, half), turn_formula::<f64>(given, heads, half)];
    formulas.iter_mut().for_each(|formula| formula.push(Vec::new()));
    let actual = [Some(host(out.inner())), leaf.grad(&grads).map(host), Some(Vec::new())];
    assert_all(&format!("turn of {dims:?} in heads of {head_dim}, {dtype:?}"), dtype, actual, formulas, [1; 3]);
}

#[test]
fn what_is_frozen_gets_no_gradient() {
    let device = device().autodiff();
    let [x, weight] = [Values::draw(1, 16, DType::F32), Values::draw(2, 8, DType::F32)];
    let (x, weight) = (x.tensor([2, 8], &device), weight.tensor([8], &device));
    let tracked = x.clone().require_grad();
    let grads = rms_norm(tracked.clone(), weight.clone(), EPSILON).sum().backward();
    assert!(tracked.grad(&grads).is_some() && weight.grad(&grads).is_none());
    let tracked = x.clone().require_grad();
    let grads = swiglu(x.clone(), tracked.clone()).sum().backward();
    assert!(tracked.grad(&grads).is_some() && x.grad(&grads).is_none());
    assert_eq!(
        host(rms_norm(x.clone().inner(), weight.clone().inner(), EPSILON)),
        host(rms_norm(x, weight, EPSILON).inner())
    );
}

#[test]
#[should_panic(expected = "width of x [2, 3] and of a weight of 4")]
fn widths_that_differ_are_named() {
    let _ = rms_norm(Tensor::<2>::zeros([2, 3], &device()), Tensor::zeros([4], &device()), EPSILON);
}

#[test]
#[should_panic(expected = "tokens of x and of the tables")]
fn tables_of_other_tokens_are_refused() {
    let table = || Tensor::<2>::zeros([2, 2], &device());
    let _ = rotate(Tensor::zeros([1, 3, 4], &device()), [table(), table()]);
}
