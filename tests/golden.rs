//! The f64 oracle itself, against PyTorch's f64 attention (`golden/attention.json`, made by
//! `golden/make.py`).

use burn::tensor::DType;
use burn_distflash::Mask;
use distflash_kernels::reference::Dims;
use distflash_tests::{Draw, Problem};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    mask: String,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    len: usize,
    head_dim: usize,
    seed: u64,
    out: Vec<f64>,
    lse: Vec<f64>,
    d_query: Vec<f64>,
    d_key: Vec<f64>,
    d_value: Vec<f64>,
}

impl Case {
    fn mask(&self) -> Mask {
        match self.mask.as_str() {
            "causal" => Mask::causal(),
            "full" => Mask::full(),
            "window" => Mask::causal().with_window(4, 0).unwrap(),
            "documents" => {
                let cut = [0, self.len / 3, self.len / 2 + 1, self.len];
                Mask::causal().with_documents(&cut).unwrap()
            }
            other => panic!("unknown mask {other}"),
        }
    }

    fn problem(&self) -> Problem {
        let Self { batch, heads, kv_heads, len, head_dim, seed, .. } = *self;
        let dims = Dims { batch, heads, kv_heads, num_rows: len, num_keys: len, head_dim };
        let mut problem = Problem::draw(dims, self.mask(), DType::F32);
        let mut draw = Draw::new(seed);
        problem.inputs = problem.inputs.each_ref().map(|input| draw.uniform(input.len(), 2.));
        problem
    }
}

#[test]
fn the_oracle_is_pytorchs_attention() {
    let golden: Golden = serde_json::from_str(include_str!("golden/attention.json")).unwrap();
    assert_eq!(golden.cases.len(), 4);
    for case in golden.cases {
        let truth = case.problem().truth();
        let results = truth.results;
        let pairs = [
            ("out", results.out, &case.out),
            ("lse", results.lse, &case.lse),
            ("d_query", results.d_query, &case.d_query),
            ("d_key", results.d_key, &case.d_key),
            ("d_value", results.d_value, &case.d_value),
        ];
        for ((name, ours, theirs), magnitude) in pairs.into_iter().zip(truth.magnitudes) {
            assert_eq!(ours.len(), theirs.len(), "{} {name}", case.mask);
            // Both round in f64, each sum of about len · head_dim terms of at most this size.
            let bound = f64::EPSILON * magnitude * (case.len * case.head_dim) as f64;
            for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
                assert!((a - b).abs() <= bound, "{} {name}[{i}]: {a} {b}, bound {bound:e}", case.mask);
            }
        }
    }
}
