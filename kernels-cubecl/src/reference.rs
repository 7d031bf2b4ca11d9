//! Attention on the host in f64, one row at a time, as the formulas are written: the truth that every
//! implementation is tested against. Slow, and meant to be read.

use crate::RowIntervals;

/// Sizes of one attention problem; tensors are dense `[batch, heads, len, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; must divide `heads`. Query head `h` reads key/value head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Query rows.
    pub num_rows: usize,
    /// Keys.
    pub num_keys: usize,
    /// Elements of one head's vector.
    pub head_dim: usize,
}

/// `(out, lse)` of [`forward`].
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// `[batch, heads, num_rows, head_dim]`; zero in a row that sees no key.
    pub out: Vec<f64>,
    /// `[batch, heads, num_rows]`, in nats; `-inf` in a row that sees no key.
    pub lse: Vec<f64>,
}

/// Gradients by [`backward`], each in the shape of its operand.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// Gradient of the queries.
    pub query: Vec<f64>,
    /// Gradient of the keys, summed over the query heads that read them.
    pub key: Vec<f64>,
    /// Gradient of the values, summed likewise.
    pub value: Vec<f64>,
}

impl Dims {
    fn query_row(&self, plane: usize, row: usize) -> usize {
        (plane * self.num_rows + row) * self.head_dim
    }

    /// Offset of key `key` of the key/value head that query plane `plane` (batch × head) reads.
    fn key_row(&self, plane: usize, key: usize) -> usize {
        let (batch, head) = (plane / self.heads, plane % self.heads);
        let kv_head = head / (self.heads / self.kv_heads);
        ((batch * self.kv_heads + kv_head) * self.num_keys + key) * self.head_dim
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// `out = softmax(scale · query · keyᵀ) · value` over the keys each row sees, and the natural
/// logarithm of the softmax's denominator.
///
/// # Panics
/// If a slice does not have the length `dims` says, or `mask` another number of rows or keys.
#[must_use]
pub fn forward(dims: Dims, query: &[f64], key: &[f64], value: &[f64], mask: &RowIntervals, scale: f64) -> Output {
    assert_eq!((mask.num_rows(), mask.num_keys()), (dims.num_rows, dims.num_keys));
    let (d, planes) = (dims.head_dim, dims.batch * dims.heads);
    let mut out = vec![0.; planes * dims.num_rows * d];
    let mut lse = vec![f64::NEG_INFINITY; planes * dims.num_rows];
    for plane in 0..planes {
        for row in 0..dims.num_rows {
            let at = dims.query_row(plane, row);
            let score = |j| scale * dot(&query[at..at + d], &key[dims.key_row(plane, j)..][..d]);
            let scores: Vec<f64> = mask.row(row).map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if max == f64::NEG_INFINITY {
                continue;
            }
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for (j, s) in mask.row(row).zip(&scores) {
                let weight = (s - max).exp() / sum;
                add_scaled(&mut out[at..at + d], weight, &value[dims.key_row(plane, j)..][..d]);
            }
            lse[plane * dims.num_rows + row] = max + sum.ln();
        }
    }
    Output { out, lse }
}

/// Gradients of `Σ out · d_out` with respect to query, key and value.
///
/// # Panics
/// As [`forward`].
#[must_use]
pub fn backward(
    dims: Dims,
    query: &[f64],
    key: &[f64],
    value: &[f64],
    d_out: &[f64],
    mask: &RowIntervals,
    scale: f64,
) -> Gradients {
    sum_gradients(dims, [query, key, value, d_out], mask, scale, |x| x, |weight, _| weight)
}

/// What [`backward`] adds up, with every term replaced by its size: sums of absolute values, each
/// softmax weight enlarged by the size of its logit, whose rounding the exponential passes on.
///
/// Rounding errors, in any precision, are in proportion to these and not to the gradients, which may
/// cancel: with a single key the gradient of the query is exactly 0, however large its terms.
///
/// # Panics
/// As [`forward`].
#[must_use]
pub fn backward_magnitudes(
    dims: Dims,
    query: &[f64],
    key: &[f64],
    value: &[f64],
    d_out: &[f64],
    mask: &RowIntervals,
    scale: f64,
) -> Gradients {
    let enlarge = |weight: f64, logit: f64| weight * (1. + logit.abs());
    sum_gradients(dims, [query, key, value, d_out], mask, scale, f64::abs, enlarge)
}

fn sum_gradients(
    dims: Dims,
    [query, key, value, d_out]: [&[f64]; 4],
    mask: &RowIntervals,
    scale: f64,
    size: impl Fn(f64) -> f64,
    weigh: impl Fn(f64, f64) -> f64,
) -> Gradients {
    let Output { out, lse } = forward(dims, query, key, value, mask, scale);
    let d = dims.head_dim;
    let mut grads = Gradients { query: vec![0.; query.len()], key: vec![0.; key.len()], value: vec![0.; value.len()] };
    let add = |to: &mut [f64], factor: f64, from: &[f64]| {
        for (to, &from) in to.iter_mut().zip(from) {
            *to += factor * size(from);
        }
    };
    for plane in 0..dims.batch * dims.heads {
        for row in 0..dims.num_rows {
            let at = dims.query_row(plane, row);
            let (q, g) = (&query[at..at + d], &d_out[at..at + d]);
            let delta = dot(&out[at..at + d], g);
            for j in mask.row(row) {
                let kv = dims.key_row(plane, j);
                let (k, v) = (&key[kv..kv + d], &value[kv..kv + d]);
                let logit = scale * dot(q, k);
                let p = weigh((logit - lse[plane * dims.num_rows + row]).exp(), logit);
                let ds = scale * p * (size(dot(g, v)) + size(-delta));
                add(&mut grads.query[at..at + d], ds, k);
                add(&mut grads.key[kv..kv + d], ds, q);
                add(&mut grads.value[kv..kv + d], p, g);
            }
        }
    }
    grads
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: Dims = Dims { batch: 2, heads: 4, kv_heads: 2, num_rows: 5, num_keys: 6, head_dim: 3 };

    fn wave(len: usize, phase: f64) -> Vec<f64> {
        (0..len).map(|i| (1.7 * i as f64 + phase).sin()).collect()
    }

    fn inputs() -> [Vec<f64>; 4] {
        let (q, kv) = (2 * 4 * 5 * 3, 2 * 2 * 6 * 3);
        [wave(q, 0.1), wave(kv, 0.2), wave(kv, 0.3), wave(q, 0.4)]
    }

    /// Row 2 sees nothing.
    fn mask() -> RowIntervals {
        RowIntervals::new(vec![0, 0, 2, 2, 3], vec![1, 2, 2, 5, 6], 6).unwrap()
    }

    #[test]
    fn backward_is_the_slope_of_forward() {
        let [q, k, v, g] = inputs();
        let loss = |q: &[f64], k: &[f64], v: &[f64]| dot(&forward(DIMS, q, k, v, &mask(), 0.7).out, &g);
        let grads = backward(DIMS, &q, &k, &v, &g, &mask(), 0.7);
        let step = 1e-5;
        for (operand, grad) in [(0, &grads.query), (1, &grads.key), (2, &grads.value)] {
            for (i, analytic) in grad.iter().enumerate() {
                let at = |by: f64| {
                    let mut x = [q.clone(), k.clone(), v.clone()];
                    x[operand][i] += by;
                    loss(&x[0], &x[1], &x[2])
                };
                let slope = (at(step) - at(-step)) / (2. * step);
                // Central differences: O(step²) truncation plus cancellation, both below 1e-9 here.
                assert!((slope - analytic).abs() < 1e-8, "operand {operand}[{i}]: {slope} {analytic}");
            }
        }
    }

    #[test]
    fn a_row_that_sees_nothing_is_zero_and_not_a_number_never() {
        let [q, k, v, g] = inputs();
        let output = forward(DIMS, &q, &k, &v, &mask(), 0.7);
        let grads = backward(DIMS, &q, &k, &v, &g, &mask(), 0.7);
        for plane in 0..8 {
            let at = DIMS.query_row(plane, 2);
            assert_eq!(output.out[at..at + 3], [0.; 3]);
            assert_eq!(output.lse[plane * 5 + 2], f64::NEG_INFINITY);
            assert_eq!(grads.query[at..at + 3], [0.; 3]);
        }
        assert!(grads.key.iter().chain(&grads.value).all(|g| g.is_finite()));
    }

    #[test]
    fn lse_is_the_logarithm_of_the_sum_of_exponentials() {
        let dims = Dims { batch: 1, heads: 1, kv_heads: 1, num_rows: 1, num_keys: 2, head_dim: 1 };
        let lse = forward(dims, &[2.], &[1., 3.], &[0., 0.], &RowIntervals::full(1, 2), 0.5).lse[0];
        assert!((lse - (1f64.exp() + 3f64.exp()).ln()).abs() < 1e-15);
    }
}
