//! Before anything is timed: do the subjects compute attention?

use crate::{Pass, Problem, Subject};
use burn::tensor::Tensor;
use distflash_kernels::RowIntervals;
use distflash_kernels::reference::{self, Dims};

/// Holds both subjects and passes against the f64 truth: ours may be off by twice what Burn is, plus one
/// rounding of the largest element. Returns a line that says how far off they are.
///
/// # Panics
/// If ours is further off, or Burn's is not attention at all.
#[must_use]
pub fn verify(problem: &Problem) -> String {
    let inputs = problem.inputs();
    let truth = truth(problem, &inputs.values);
    let mut worst_share: f64 = 0.;
    for pass in Pass::ALL {
        let tensors = Subject::tensors(pass, &inputs);
        let [ours, burn] = Subject::ALL.map(|subject| subject.run(pass, &tensors));
        for ((name, truth), (ours, burn)) in truth.iter().zip(ours.into_iter().zip(burn)) {
            let largest = truth.iter().fold(0., |most: f64, x| most.max(x.abs()));
            let (ours, burn) = (off(ours, truth), off(burn, truth));
            assert!(burn <= 1e-4 * largest, "{pass}, {name}: Burn's is off by {burn:e} of {largest:e}");
            let bound = 2. * burn + f64::from(f32::EPSILON) * largest;
            assert!(ours <= bound, "{pass}, {name}: ours is off by {ours:e}, bound {bound:e}");
            worst_share = worst_share.max(ours / bound);
        }
    }
    format!("verified against f64 at N = {}: at most {worst_share:.2} of the bound", problem.seq_len)
}

/// Largest difference; a NaN is infinitely far off.
fn off(actual: Tensor<4>, truth: &[f64]) -> f64 {
    let actual: Vec<f64> = actual.into_data_as::<f64>().try_into_vec().expect("asked for f64");
    assert_eq!(actual.len(), truth.len(), "sizes");
    let differences = actual.iter().zip(truth).map(|(a, t)| (a - t).abs());
    differences.fold(0., |most, off| if off.is_nan() { f64::INFINITY } else { most.max(off) })
}

/// Output and gradients, in the order of [`Subject::run`].
fn truth(problem: &Problem, inputs: &[Vec<f32>; 4]) -> [(&'static str, Vec<f64>); 4] {
    let Problem { heads, seq_len, head_dim } = *problem;
    let dims = Dims { batch: 1, heads, kv_heads: heads, num_rows: seq_len, num_keys: seq_len, head_dim };
    let [q, k, v, g] = inputs.each_ref().map(|x| x.iter().copied().map(f64::from).collect::<Vec<_>>());
    let (mask, scale) = (RowIntervals::causal(seq_len), 1. / (head_dim as f64).sqrt());
    let out = reference::forward(dims, &q, &k, &v, &mask, scale).out;
    let grads = reference::backward(dims, &q, &k, &v, &g, &mask, scale);
    [("out", out), ("d_query", grads.query), ("d_key", grads.key), ("d_value", grads.value)]
}
