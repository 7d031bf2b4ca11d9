//! What the kernels are made of: staging by asynchronous copies, and the two products.
//!
//! A `Rows` operand lies in shared memory as rows of chunks. Fragments are arrays of pairs of elements: four
//! pairs make a 16×16 left operand, two a 16×8 right one, and two pairs of f32, `N` columns apart in rows
//! `g` and `g + 8`, the sums of a product; `g` is the lane's number divided by four.

use super::shape::{K, M, N, Tile};
use crate::walk::head_offset;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::{Barrier, copy_async};
use cubecl::prelude::*;

/// One row's 16 bytes.
pub(super) type Chunk<E> = Vector<E, Const<8>>;
/// Two neighbours of a row.
pub(super) type Pair<E> = Vector<E, Const<2>>;

/// Where the rows of one head lie in global memory, in chunks.
#[derive(CubeType)]
pub(super) struct Head {
    /// First row.
    pub base: usize,
    /// From one row to the next.
    pub stride: usize,
    /// Number of rows.
    pub len: usize,
}

#[cube]
pub(super) fn head<E: Float>(of: &Tensor<Chunk<E>>, batch: usize, head: usize) -> Head {
    Head { base: (head_offset(of, batch, head)) / 8, stride: of.stride(2) / 8, len: of.shape(2) }
}

/// Starts to copy `count` rows from `first` on to `to`, `at` its first chunk. Beyond the last row, it is the
/// last row again: finite, and hidden by the mask.
#[cube]
pub(super) fn copy_rows<E: Float>(
    from: &Tensor<Chunk<E>>,
    head: &Head,
    first: usize,
    to: &mut Shared<[Chunk<E>]>,
    at: usize,
    #[comptime] count: usize,
    #[comptime] tile: Tile,
) {
    let chunks = comptime!(tile.chunks());
    let total = comptime!(count * tile.chunks());
    #[unroll]
    for round in 0..comptime!(total.div_ceil(tile.num_units())) {
        let index = UNIT_POS as usize + comptime!(round * tile.num_units());
        if comptime!((round + 1) * tile.num_units() <= total) || index < total {
            let (row, chunk) = (index / chunks, index % chunks);
            let source = head.base + min(first + row, head.len - 1) * head.stride + chunk;
            let target = at + row * comptime!(tile.stride()) + chunk;
            copy_async(&from[source..source + 1], &mut to[target..target + 1], 8u32);
        }
    }
}

/// Fills the chunk that a head of 8 columns modulo 16 lacks, of `count` rows.
#[cube]
pub(super) fn pad_rows<E: Float>(to: &mut Shared<[Chunk<E>]>, #[comptime] count: usize, #[comptime] tile: Tile) {
    if comptime!(tile.chunks() < 2 * tile.steps()) {
        let mut row = UNIT_POS as usize;
        while row < count {
            to[row * comptime!(tile.stride()) + comptime!(tile.chunks())] = Chunk::<E>::zeroed();
            row += comptime!(tile.num_units());
        }
    }
}

/// Announces on `barrier` that this unit has started all its copies of one phase.
#[cube]
pub(super) fn announce(barrier: &Barrier) {
    barrier.commit_copy_async();
    barrier.arrive();
}

/// The product of a left and a right operand, added to the sums at `to[at..at + 2]`.
#[cube]
fn multiply<E: Float>(
    left: &Array<Pair<E>>,
    right: &Array<Pair<E>>,
    #[comptime] right_at: usize,
    to: &mut Array<Pair<f32>>,
    #[comptime] at: usize,
) {
    let product = MmaDefinition::<E, E, f32>::new(M, N, K);
    let mut operand = Array::<Pair<E>>::new(2usize);
    let mut sums = Array::<Pair<f32>>::new(2usize);
    #[unroll]
    for i in 0..2 {
        operand[i] = right[right_at + i];
        sums[i] = to[at + i];
    }
    let sums = product.execute(left, &operand, &sums);
    #[unroll]
    for i in 0..2 {
        to[at + i] = sums[i];
    }
}

/// A left operand: rows `row..row + 16`, columns `16 · step..` of rows that begin at chunk `at`.
#[cube]
fn load_left<E: Float>(
    from: &Shared<[Chunk<E>]>,
    at: usize,
    row: usize,
    #[comptime] step: usize,
    #[comptime] tile: Tile,
) -> Array<Pair<E>> {
    let product = MmaDefinition::<E, E, f32>::new(M, N, K);
    let lane = UNIT_POS_X as usize;
    let chunk = at + (row + lane % 16) * comptime!(tile.stride()) + lane / 16 + comptime!(2 * step);
    product.load_matrix::<Chunk<E>, Const<2>>(&from[chunk..chunk + 1], MatrixIdent::A, 4usize, false)
}

/// Adds `outer · innerᵀ` to `scores`: this plane's rows of the outer side, which begin at `row`, by all
/// staged rows of the inner side, which begin at chunk `inner_at`.
#[cube]
pub(super) fn add_scores<E: Float>(
    outer: &Shared<[Chunk<E>]>,
    row: usize,
    inner: &Shared<[Chunk<E>]>,
    inner_at: usize,
    scores: &mut Array<Pair<f32>>,
    #[comptime] tile: Tile,
) {
    let product = MmaDefinition::<E, E, f32>::new(M, N, K);
    let lane = UNIT_POS_X as usize;
    let own = (lane % 8 + (lane / 16) * 8) * comptime!(tile.stride()) + (lane / 8) % 2 + inner_at;
    #[unroll]
    for step in 0..comptime!(tile.steps()) {
        let mut left = Sequence::<Array<Pair<E>>>::new();
        #[unroll]
        for block in 0..comptime!(tile.blocks) {
            left.push(load_left(outer, 0usize, row + comptime!(block * M), step, tile));
        }
        #[unroll]
        for pair in 0..comptime!(tile.score_tiles() / 2) {
            let chunk = own + comptime!(2 * N * pair * tile.stride() + 2 * step);
            let right =
                product.load_matrix::<Chunk<E>, Const<2>>(&inner[chunk..chunk + 1], MatrixIdent::B, 4usize, false);
            #[unroll]
            for block in 0..comptime!(tile.blocks) {
                let at = comptime!(2 * (block * tile.score_tiles() + 2 * pair));
                multiply(left.index(block), &right, 0usize, scores, at);
                multiply(left.index(block), &right, 2usize, scores, at + 2);
            }
        }
    }
}

/// Scores as left operands, rounded to 16 bits: half the registers, from here on. First by step of 16 rows of
/// the walked side, then by block.
#[cube]
pub(super) fn round<E: Float>(scores: &Array<Pair<f32>>, #[comptime] tile: Tile) -> Sequence<Array<Pair<E>>> {
    let mut left = Sequence::<Array<Pair<E>>>::new();
    #[unroll]
    for step in 0..comptime!(tile.inner / K) {
        #[unroll]
        for block in 0..comptime!(tile.blocks) {
            let mut fragment = Array::<Pair<E>>::new(4usize);
            #[unroll]
            for i in 0..4 {
                let at = comptime!(2 * (block * tile.score_tiles() + 2 * step));
                fragment[i] = Pair::<E>::cast_from(scores[at + i]);
            }
            left.push(fragment);
        }
    }
    left
}

/// Adds `weights · inner` to `results`, of which a plane holds `blocks` of 16 rows by the cube's share of
/// columns, which begins at `first_step`.
#[cube]
pub(super) fn accumulate<E: Float>(
    weights: &Sequence<Array<Pair<E>>>,
    inner: &Shared<[Chunk<E>]>,
    inner_at: usize,
    results: &mut Array<Pair<f32>>,
    first_step: usize,
    #[comptime] tile: Tile,
) {
    let product = MmaDefinition::<E, E, f32>::new(M, N, K);
    let lane = UNIT_POS_X as usize;
    let own = (lane % 16) * comptime!(tile.stride()) + lane / 16 + inner_at + 2 * first_step;
    #[unroll]
    for step in 0..comptime!(tile.inner / K) {
        #[unroll]
        for column in 0..comptime!(tile.result_steps()) {
            let chunk = own + comptime!(K * step * tile.stride() + 2 * column);
            let right =
                product.load_matrix::<Chunk<E>, Const<2>>(&inner[chunk..chunk + 1], MatrixIdent::B, 4usize, true);
            #[unroll]
            for block in 0..comptime!(tile.blocks) {
                let at = comptime!(4 * (block * tile.result_steps() + column));
                let left = weights.index(comptime!(step * tile.blocks + block));
                multiply(left, &right, 0usize, results, at);
                multiply(left, &right, 2usize, results, at + 2);
            }
        }
    }
}

/// Writes this plane's results, times a factor a row, to rows `first..` of a dense tensor whose head starts
/// at pair `base`.
#[cube]
pub(super) fn write_rows(
    results: &Array<Pair<f32>>,
    factors: &Array<f32>,
    to: &mut Tensor<Pair<f32>>,
    base: usize,
    first: usize,
    num_rows: usize,
    first_step: usize,
    #[comptime] tile: Tile,
) {
    let lane = UNIT_POS_X as usize;
    let pairs = comptime!(tile.head_dim / 2);
    #[unroll]
    for half in 0..comptime!(2 * tile.blocks) {
        let row = first + lane / 4 + comptime!(N * half);
        let factor = factors[half];
        if row < num_rows {
            #[unroll]
            for n in 0..comptime!(2 * tile.result_steps()) {
                let column = first_step * 8 + comptime!(4 * n) + lane % 4;
                if comptime!(tile.splits == 1 && N * (n + 1) <= tile.head_dim) || column < pairs {
                    let at = comptime!(2 * (half / 2 * 2 * tile.result_steps() + n) + half % 2);
                    to[base + row * pairs + column] = results[at] * Pair::<f32>::new(factor);
                }
            }
        }
    }
}

/// The maximum or sum of a row's four lanes.
#[cube]
pub(super) fn across_lanes(value: f32, #[comptime] is_max: bool) -> f32 {
    let mut total = value;
    #[unroll]
    for bit in 0..2u32 {
        let other = plane_shuffle_xor(total, comptime!(1 << bit));
        if comptime!(is_max) {
            total = max(total, other);
        } else {
            total += other;
        }
    }
    total
}

#[cube]
pub(super) fn zeros(#[comptime] len: usize) -> Array<Pair<f32>> {
    let mut array = Array::<Pair<f32>>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = Pair::<f32>::new(0.0f32);
    }
    array
}
