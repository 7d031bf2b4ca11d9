//! When a result counts as right.

use burn::tensor::{DType, Tensor};

/// What one run of attention gives, on the host in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// Output.
    pub out: Vec<f64>,
    /// Logarithm of the softmax's denominator.
    pub lse: Vec<f64>,
    /// Gradient of the queries.
    pub d_query: Vec<f64>,
    /// Gradient of the keys.
    pub d_key: Vec<f64>,
    /// Gradient of the values.
    pub d_value: Vec<f64>,
}

impl Results {
    fn named(&self) -> [(&'static str, &Vec<f64>); 5] {
        let Self { out, lse, d_query, d_key, d_value } = self;
        [("out", out), ("lse", lse), ("d_query", d_query), ("d_key", d_key), ("d_value", d_value)]
    }
}

/// A tensor's elements on the host.
pub fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data_as::<f64>().try_into_vec::<f64>().expect("f64")
}

/// Largest difference; a NaN, or an infinity that the truth does not have, is infinitely far off.
fn worst(actual: &[f64], truth: &[f64]) -> f64 {
    assert_eq!(actual.len(), truth.len(), "sizes");
    let off = |(a, t): (&f64, &f64)| if a == t { 0. } else { (a - t).abs() };
    actual.iter().zip(truth).map(off).fold(0., |most, off| if off.is_nan() { f64::INFINITY } else { most.max(off) })
}

/// One result, by whoever computes it: on the host in f64.
#[derive(Clone, Copy, Debug)]
pub struct Compared<'a> {
    /// Of what is tested.
    pub actual: &'a [f64],
    /// Of a naive run in the same precision.
    pub naive: &'a [f64],
    /// In f64.
    pub truth: &'a [f64],
    /// The size of what an element is the sum of.
    pub magnitude: f64,
}

/// Asserts that a result is no further from the truth than twice what a naive run in the same precision
/// is, plus one rounding of the largest result to the operands' precision and one rounding of the
/// largest magnitude to the accumulator's.
///
/// # Panics
/// If it is further off.
pub fn assert_close(case: &str, name: &str, dtype: DType, result: Compared) {
    let Compared { actual, naive, truth, magnitude } = result;
    let largest = truth.iter().copied().filter(|x| x.is_finite()).fold(0., |most: f64, x| most.max(x.abs()));
    let rounding = dtype.finfo().expect("a float").epsilon;
    let accumulator = rounding.min(f64::from(f32::EPSILON));
    let bound = 2. * worst(naive, truth) + rounding * largest + accumulator * magnitude;
    let off = worst(actual, truth);
    assert!(bound.is_finite(), "{case}, {name}: the naive run itself is not finite");
    assert!(off <= bound, "{case}: {name} is off by {off:e}, bound {bound:e}");
}

/// [`assert_close`] of all results.
///
/// # Panics
/// If one is further off.
pub fn assert_within_bound(case: &str, actual: &Results, naive: &Results, truth: &Truth) {
    let named = actual.named().into_iter().zip(naive.named()).zip(truth.results.named()).zip(truth.magnitudes);
    for ((((name, actual), (_, naive)), (_, of)), magnitude) in named {
        assert_close(case, name, truth.dtype, Compared { actual, naive, truth: of, magnitude });
    }
}

/// The truth, with what bounds are derived from.
#[derive(Clone, Debug)]
pub struct Truth {
    /// In f64.
    pub results: Results,
    /// The size of what each result is the sum of, in the order of the results.
    pub magnitudes: [f64; 5],
    /// Precision of the operands.
    pub dtype: DType,
}
