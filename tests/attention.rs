//! Attention on one device against the f64 truth.

use burn::tensor::{DType, Device, Tensor};
use burn_distflash::{AttentionError, AttentionOptions, Kernel, Mask, MaskError, flash_attention};
use distflash_kernels::reference::Dims;
use distflash_tests::{Masks, Problem, assert_within_bound, device, flash, may_cut_loops, naive, takes};
use rstest::rstest;

fn dims(heads: usize, kv_heads: usize, num_rows: usize, num_keys: usize, head_dim: usize) -> Dims {
    Dims { batch: 2, heads, kv_heads, num_rows, num_keys, head_dim }
}

fn check(problem: &Problem) {
    let case = format!("{:?} {:?}", problem.dims, problem.dtype);
    assert_within_bound(&case, &flash(problem, &device()), &naive(problem), &problem.truth());
}

#[rstest]
fn every_mask_and_dtype_is_exact(
    #[values(DType::F64, DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values(1, 37, 300)] len: usize,
) {
    for mask in Masks::ALL.into_iter().filter(|_| takes(dtype)) {
        check(&Problem::draw(dims(4, 2, len, len, 16), mask.build(len), dtype));
    }
}

#[rstest]
fn every_grouping_of_heads_is_exact(
    #[values((1, 1), (9, 3), (28, 7), (32, 8), (33, 33), (8, 1))] (heads, kv_heads): (usize, usize),
) {
    check(&Problem::draw(dims(heads, kv_heads, 67, 67, 8), Mask::causal(), DType::F32));
}

#[rstest]
fn every_head_dim_is_exact(
    #[values(1, 8, 24, 64, 80, 96, 112, 128, 136, 160, 256)] head_dim: usize,
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    if takes(dtype) {
        check(&Problem::draw(dims(2, 1, 70, 70, head_dim), Mask::causal(), dtype));
    }
}

/// Several tiles of every kernel, whose sizes divide none of these lengths.
#[rstest]
fn every_mask_is_exact_over_many_tiles(
    #[values(64, 128)] head_dim: usize,
    #[values(DType::F16, DType::BF16)] dtype: DType,
) {
    for mask in Masks::ALL.into_iter().filter(|_| takes(dtype)) {
        check(&Problem::draw(Dims { batch: 1, ..dims(2, 1, 300, 300, head_dim) }, mask.build(300), dtype));
    }
}

#[rstest]
fn any_scale_is_exact(#[values(0., -0.3, 1e-6, 3.)] scale: f64, #[values(DType::F32, DType::BF16)] dtype: DType) {
    if takes(dtype) {
        let mut problem = Problem::draw(dims(2, 1, 150, 150, 64), Mask::causal(), dtype);
        problem.options.scale = Some(scale);
        check(&problem);
    }
}

/// The grid of a GPU has 65,535 places in two of its directions.
#[test]
#[ignore = "minutes on a software driver; on a GPU: --include-ignored"]
fn more_heads_than_a_grid_has_places_are_exact() {
    same_in_all_heads(65_537, 3, 8, DType::F32);
}

#[test]
#[ignore = "needs a GPU with 80 GB: --ignored"]
fn offsets_beyond_two_billion_elements_are_exact() {
    same_in_all_heads(65_537, 257, 128, DType::BF16);
}

/// Asserts that `heads` heads with the same inputs get the bits that one head alone gets.
fn same_in_all_heads(heads: usize, len: usize, head_dim: usize, dtype: DType) {
    let problem = Problem::draw(Dims { batch: 1, ..dims(1, 1, len, len, head_dim) }, Mask::causal(), dtype);
    let device = device().autodiff();
    let run = |heads: usize| {
        let leaf = |index| problem.tensor(index, &device).repeat_dim(1, heads).require_grad();
        let (query, key, value, d_out) = (leaf(0), leaf(1), leaf(2), leaf(3).inner());
        let (out, _) = flash_attention(query.clone(), key.clone(), value.clone(), &problem.options).unwrap();
        let grads = (out.clone() * Tensor::from_inner(d_out)).sum().backward();
        let grad = |leaf: &Tensor<4>| leaf.grad(&grads).expect("tracked");
        [out.inner(), grad(&query), grad(&key), grad(&value)]
    };
    for (many, one) in run(heads).into_iter().zip(run(1)) {
        assert!(many.dims()[1] == heads && one.clone().abs().max().into_scalar::<f32>() > 0.);
        let off = (many - one).abs().max().into_scalar::<f32>();
        assert_eq!(off, 0.);
    }
}

#[rstest]
#[case::few_queries(5, 300)]
#[case::one_query(1, 300)]
#[case::more_queries_than_keys(300, 7)]
fn queries_and_keys_may_differ_in_number(#[case] num_rows: usize, #[case] num_keys: usize) {
    for mask in [Mask::causal(), Mask::full()] {
        check(&Problem::draw(dims(4, 2, num_rows, num_keys, 16), mask, DType::F32));
    }
}

#[rstest]
fn nothing_is_attention_too(#[values((0, 5), (5, 0), (0, 0))] (num_rows, num_keys): (usize, usize)) {
    let device = device().autodiff();
    let ones = |heads, len| Tensor::<4>::ones([1, heads, len, 8], &device).require_grad();
    let (query, key, value) = (ones(4, num_rows), ones(2, num_keys), ones(2, num_keys));
    let options = AttentionOptions::masked(Mask::full());
    let (out, lse) = flash_attention(query.clone(), key.clone(), value, &options).unwrap();
    let grads = out.clone().sum().backward();
    assert!(out.into_data().iter::<f32>().all(|x| x == 0.));
    assert!(lse.into_data().iter::<f32>().all(|x| x == f32::NEG_INFINITY));
    for (leaf, len) in [(query, 4 * num_rows), (key, 2 * num_keys)] {
        let grad = leaf.grad(&grads).unwrap().into_data();
        assert_eq!(grad.iter::<f32>().filter(|&x| x == 0.).count(), len * 8);
    }
}

#[test]
fn lengths_around_a_tile_are_exact() {
    for len in [255, 256, 257, 511, 513] {
        check(&Problem::draw(Dims { batch: 1, ..dims(2, 1, len, len, 8) }, Mask::causal(), DType::F32));
    }
}

#[test]
fn logits_of_ten_thousand_stay_finite_and_exact() {
    let mut problem = Problem::draw(dims(2, 1, 50, 50, 8), Mask::causal(), DType::F32);
    problem.options.scale = Some(1e4 / 8.);
    check(&problem);
}

#[test]
fn identical_values_average_to_exactly_themselves() {
    // q = 0, v = 1 in f16: unnormalised partials of 65,536 keys would overflow, normalised ones give exactly 1.
    let len = if may_cut_loops() { 16_384 } else { 65_536 };
    let (device, dtype) = (device(), if takes(DType::F16) { DType::F16 } else { DType::F32 });
    let full = |len, value| Tensor::<4>::full([1, 1, len, 8], value, (&device, dtype));
    let options = AttentionOptions::masked(Mask::full());
    let (out, lse) = flash_attention(full(2, 0.), full(len, 1.), full(len, 1.), &options).unwrap();
    assert!(out.into_data_as::<f32>().iter::<f32>().all(|x| x == 1.));
    let ln = (len as f32).ln();
    assert!(lse.into_data().iter::<f32>().all(|x| (x - ln).abs() <= f32::EPSILON * ln));
}

#[test]
fn a_row_that_sees_nothing_is_zero_with_zero_gradients() {
    let problem = Problem::draw(dims(2, 1, 40, 40, 8), Masks::Gaps.build(40), DType::F32);
    let results = flash(&problem, &device());
    let mask = problem.intervals();
    let empty: Vec<usize> = (0..40).filter(|&row| mask.row(row).is_empty()).collect();
    assert!(!empty.is_empty(), "the mask has empty rows");
    for plane in 0..4 {
        for &row in &empty {
            let at = (plane * 40 + row) * 8;
            assert_eq!(results.out[at..at + 8], [0.; 8]);
            assert_eq!(results.d_query[at..at + 8], [0.; 8]);
            assert_eq!(results.lse[plane * 40 + row], f64::NEG_INFINITY);
        }
    }
    assert!(results.d_key.iter().chain(&results.d_value).all(|x| x.is_finite()));
}

#[test]
fn the_same_inputs_give_the_same_bits() {
    let problem = Problem::draw(dims(4, 2, 300, 300, 16), Mask::causal(), DType::F32);
    assert_eq!(flash(&problem, &device()), flash(&problem, &device()));
}

#[test]
fn strided_operands_are_read_as_they_are() {
    let problem = Problem::draw(dims(4, 2, 60, 60, 16), Mask::causal(), DType::F32);
    let device = device();
    let dense = |index| problem.tensor(index, &device);
    // [b, n, h, d] in memory, seen as [b, h, n, d].
    let strided = |index| {
        let [b, h, n, d] = dense(index).dims();
        let rows = dense(index).swap_dims(1, 2).reshape([b, n, h * d]);
        rows.reshape([b, n, h, d]).swap_dims(1, 2)
    };
    let run = |of: &dyn Fn(usize) -> Tensor<4>| flash_attention(of(0), of(1), of(2), &problem.options).unwrap().0;
    assert_eq!(run(&strided).into_data(), run(&dense).into_data());
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let device = Device::flex();
    let tensor = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &device);
    let refuse =
        |q, k, v, options: &AttentionOptions| flash_attention(tensor(q), tensor(k), tensor(v), options).unwrap_err();
    let options = AttentionOptions::default();
    let uneven = refuse([1, 4, 5, 8], [1, 3, 5, 8], [1, 3, 5, 8], &options);
    assert_eq!(uneven, AttentionError::UnevenGroups { rank: 0, heads: 4, kv_heads: 3 });
    let no_heads = refuse([1, 4, 5, 8], [1, 0, 5, 8], [1, 0, 5, 8], &options);
    assert_eq!(no_heads, AttentionError::UnevenGroups { rank: 0, heads: 4, kv_heads: 0 });
    for (k, v, what) in [
        ([2, 2, 5, 8], [1, 2, 5, 8], "batch size of key is 2; expected 1"),
        ([1, 2, 5, 4], [1, 2, 5, 8], "head_dim of key is 4; expected 8"),
        ([1, 2, 5, 8], [1, 2, 6, 8], "length of value is 6; expected 5"),
        ([1, 2, 5, 8], [1, 4, 5, 8], "heads of value is 4; expected 2"),
    ] {
        let error = refuse([1, 4, 5, 8], k, v, &options).to_string();
        assert!(error.contains(what), "{error}");
    }
    let packed = AttentionOptions::masked(Mask::causal().with_documents(&[0, 4]).unwrap());
    let misfit = refuse([1, 4, 5, 8], [1, 2, 5, 8], [1, 2, 5, 8], &packed);
    assert_eq!(misfit, AttentionError::Mask { rank: 0, source: MaskError::DocumentsEnd { last: 4, seq_len: 5 } });
    let nan = AttentionOptions { scale: Some(f64::NAN), ..AttentionOptions::default() };
    assert!(refuse([1, 4, 5, 8], [1, 2, 5, 8], [1, 2, 5, 8], &nan).to_string().contains("scale is NaN"));
    let forced = AttentionOptions { kernel: Kernel::Matrix, ..AttentionOptions::default() };
    let no_kernel = refuse([1, 4, 5, 8], [1, 2, 5, 8], [1, 2, 5, 8], &forced).to_string();
    assert!(no_kernel.contains("kernel matrix was asked for"), "{no_kernel}");
    let half = tensor([1, 2, 5, 8]).cast(DType::F16);
    let mixed = flash_attention(tensor([1, 4, 5, 8]), half, tensor([1, 2, 5, 8]), &options).unwrap_err();
    assert!(mixed.to_string().contains("key F16"), "{mixed}");
}
