//! Sharded attention against the f64 truth: every strategy, mask and world.

use burn::tensor::{DType, Device};
use burn_distflash::{Kernel, Mask, Sequence};
use distflash_kernels::reference::Dims;
use distflash_tests::{Masks, Problem, assert_within_bound, device, flash, naive, sharded, strategies, takes, worlds};
use rstest::rstest;

const DIMS: Dims = Dims { batch: 2, heads: 4, kv_heads: 2, num_rows: 0, num_keys: 0, head_dim: 8 };

fn problem(dims: Dims, len: usize, mask: Mask, dtype: DType) -> Problem {
    Problem::draw(Dims { num_rows: len, num_keys: len, ..dims }, mask, dtype)
}

fn check(problem: &Problem, worlds: &[usize]) {
    let (truth, naive) = (problem.truth(), naive(problem));
    for &world_size in worlds {
        for strategy in strategies(world_size) {
            let case = format!("{strategy} over {world_size}, {:?} {:?}", problem.dims, problem.options.mask);
            let results = sharded(problem, strategy, world_size, &device());
            assert_within_bound(&case, &results, &naive, &truth);
        }
    }
}

/// 61 divides by nothing, 5 is shorter than 8 ranks, 1 leaves all but one rank empty.
#[rstest]
fn every_mask_world_and_length_is_exact(#[values(1, 5, 61)] len: usize) {
    for mask in Masks::ALL {
        check(&problem(DIMS, len, mask.build(len), DType::F32), worlds(&[1, 2, 3, 4, 5, 6, 7, 8], &[1, 2, 3, 4, 5, 8]));
    }
}

#[rstest]
fn every_grouping_of_heads_is_exact(#[values((1, 1), (9, 3), (28, 7), (33, 33))] (heads, kv_heads): (usize, usize)) {
    check(&problem(Dims { heads, kv_heads, ..DIMS }, 45, Mask::causal(), DType::F32), worlds(&[2, 3, 4, 5], &[2, 3]));
}

#[rstest]
fn every_dtype_is_exact(#[values(DType::F64, DType::F16, DType::BF16)] dtype: DType) {
    for mask in [Masks::Causal, Masks::Full, Masks::Documents].into_iter().filter(|_| takes(dtype)) {
        check(&problem(DIMS, 61, mask.build(61), dtype), &[1, 3, 4]);
    }
}

/// Partials are merged in the kernel, in each of them.
#[rstest]
fn every_kernel_merges_what_was_seen_before(#[values(64, 80, 128)] head_dim: usize) {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 1, head_dim, ..DIMS };
    for mask in [Masks::Causal, Masks::Documents, Masks::Gaps].into_iter().filter(|_| takes(DType::BF16)) {
        check(&problem(dims, 300, mask.build(300), DType::BF16), &[2, 3]);
    }
}

/// Documents at both ends of a rank's shard see both ends of another's, with keys between that nobody sees: two pairs.
#[test]
fn keys_that_nobody_needs_are_left_out_between_documents() {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 1, ..DIMS };
    let mask = Mask::full().with_documents(&[0, 400, 1100, 1500]).unwrap();
    let sharded = Sequence::Zigzag.shard(&mask, 1500, 2).unwrap();
    assert_eq!(sharded.pairs(0, 1).len(), 2);
    check(&problem(dims, 1500, mask, DType::F32), &[2, 3]);
}

#[test]
fn shards_longer_than_a_tile_are_exact() {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 1, ..DIMS };
    check(&problem(dims, 1100, Mask::causal(), DType::F32), &[2, 3]);
}

/// Partials must travel and accumulate in f32: with 16-bit ones the error would grow with the world.
#[rstest]
fn the_error_of_16_bit_operands_does_not_grow_with_the_world(#[values(DType::F16, DType::BF16)] dtype: DType) {
    if !takes(dtype) {
        return;
    }
    let mut problem = problem(DIMS, 256, Mask::causal(), dtype);
    if device() != Device::flex() {
        // Kernels for matrix units round weights, too, relative to each partial's own maximum.
        problem.options.kernel = Kernel::Units;
    }
    let truth = problem.truth();
    let off = |results: &[f64]| results.iter().zip(&truth.results.out).map(|(a, t)| (a - t).abs()).sum::<f64>();
    let alone = off(&flash(&problem, &device()).out);
    for strategy in strategies(8) {
        let split = off(&sharded(&problem, strategy, 8, &device()).out);
        // The only rounding to 16 bits is the last; the mean error must not notice the sharding.
        assert!(split <= 1.001 * alone, "{strategy}: {split:e} sharded, {alone:e} alone");
    }
}

#[test]
fn the_same_inputs_give_the_same_bits_in_every_run() {
    let problem = problem(DIMS, 61, Mask::causal(), DType::F32);
    for strategy in strategies(4) {
        let run = || sharded(&problem, strategy, 4, &device());
        assert_eq!(run(), run(), "{strategy}");
    }
}

#[test]
fn one_rank_gives_the_bits_of_the_unsharded_op() {
    let problem = problem(DIMS, 61, Mask::causal(), DType::F32);
    assert_eq!(sharded(&problem, Sequence::Balanced.into(), 1, &device()), flash(&problem, &device()));
}
