//! What the kernels are made of: staging, the two products, and a reduction over a row's units.

use super::shape::UnitTiles;
use cubecl::prelude::*;

/// Copies `count` rows from `first` on, of the chunk of columns from `column` on, of the head that
/// starts at `base`, into shared memory as f32; zeros where there is no such row or column.
#[cube]
pub(crate) fn stage<E: Float>(
    from: &Tensor<E>,
    base: usize,
    first: usize,
    num_rows: usize,
    #[comptime] column: usize,
    to: &mut Shared<[f32]>,
    #[comptime] count: usize,
    #[comptime] tiles: UnitTiles,
) {
    let chunk = comptime!(tiles.chunk);
    let total = comptime!(count * tiles.chunk);
    let mut index = UNIT_POS as usize;
    while index < total {
        let row = index / chunk;
        let col = index % chunk;
        let mut value = f32::new(0.0);
        if first + row < num_rows && column + col < comptime!(tiles.head_dim) {
            value = f32::cast_from(from[base + (first + row) * from.stride(2) + (column + col) * from.stride(3)]);
        }
        to[row * comptime!(tiles.chunk_stride()) + col] = value;
        index += comptime!(tiles.num_units());
    }
}

/// Adds one chunk's share of `outer · innerᵀ` to a unit's scores.
#[cube]
pub(crate) fn add_scores(
    outer: &Shared<[f32]>,
    inner: &Shared<[f32]>,
    scores: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
) {
    let stride = comptime!(tiles.chunk_stride());
    let first = UNIT_POS_Y as usize * comptime!(tiles.outer_per_unit);
    let mut row = Array::<f32>::new(comptime!(tiles.outer_per_unit));
    for k in 0..comptime!(tiles.chunk) {
        #[unroll(tiles.unroll())]
        for r in 0..comptime!(tiles.outer_per_unit) {
            row[r] = outer[(first + r) * stride + k];
        }
        #[unroll(tiles.unroll())]
        for c in 0..comptime!(tiles.inner_per_unit) {
            let other = inner[(UNIT_POS_X as usize + c * comptime!(tiles.units_x)) * stride + k];
            #[unroll(tiles.unroll())]
            for r in 0..comptime!(tiles.outer_per_unit) {
                scores[r * comptime!(tiles.inner_per_unit) + c] += row[r] * other;
            }
        }
    }
}

/// Adds `weights · values` to a unit's part of an accumulator, for the chunk of columns that is staged.
#[cube]
pub(crate) fn accumulate(
    weights: &Shared<[f32]>,
    values: &Shared<[f32]>,
    to: &mut Array<f32>,
    #[comptime] chunk_index: usize,
    #[comptime] tiles: UnitTiles,
) {
    let columns = comptime!(tiles.columns_per_unit());
    let row_stride = comptime!(tiles.num_chunks() * tiles.columns_per_unit());
    let first = UNIT_POS_Y as usize * comptime!(tiles.outer_per_unit);
    for k in 0..comptime!(tiles.inner()) {
        #[unroll(tiles.unroll())]
        for c in 0..columns {
            let at = k * comptime!(tiles.chunk_stride()) + UNIT_POS_X as usize;
            let value = values[at + c * comptime!(tiles.units_x)];
            #[unroll(tiles.unroll())]
            for r in 0..comptime!(tiles.outer_per_unit) {
                let weight = weights[(first + r) * comptime!(tiles.weights_stride()) + k];
                to[r * row_stride + comptime!(chunk_index * tiles.columns_per_unit()) + c] += weight * value;
            }
        }
    }
}

/// Puts a unit's scores where all units can read them.
#[cube]
pub(crate) fn share_scores(scores: &Array<f32>, to: &mut Shared<[f32]>, #[comptime] tiles: UnitTiles) {
    let first = UNIT_POS_Y as usize * comptime!(tiles.outer_per_unit);
    #[unroll(tiles.unroll())]
    for r in 0..comptime!(tiles.outer_per_unit) {
        #[unroll(tiles.unroll())]
        for c in 0..comptime!(tiles.inner_per_unit) {
            let at = (first + r) * comptime!(tiles.weights_stride()) + UNIT_POS_X as usize;
            to[at + c * comptime!(tiles.units_x)] = scores[r * comptime!(tiles.inner_per_unit) + c];
        }
    }
}

/// Writes a unit's part of an accumulator, rows `first..` of the head that starts at `base`, `factor`s
/// given per row, to a dense tensor.
#[cube]
pub(crate) fn write_rows(
    from: &Array<f32>,
    factors: &Array<f32>,
    to: &mut Tensor<f32>,
    base: usize,
    first: usize,
    num_rows: usize,
    #[comptime] tiles: UnitTiles,
) {
    let head_dim = comptime!(tiles.head_dim);
    let columns = comptime!(tiles.num_chunks() * tiles.columns_per_unit());
    #[unroll(tiles.unroll())]
    for r in 0..comptime!(tiles.outer_per_unit) {
        let row = first + UNIT_POS_Y as usize * comptime!(tiles.outer_per_unit) + r;
        #[unroll(tiles.unroll())]
        for c in 0..columns {
            let column = UNIT_POS_X as usize + c * comptime!(tiles.units_x);
            if row < num_rows && column < head_dim {
                to[base + row * head_dim + column] = from[r * columns + c] * factors[r];
            }
        }
    }
}

#[cube]
pub(crate) fn fill(array: &mut Array<f32>, value: f32, #[comptime] len: usize, #[comptime] tiles: UnitTiles) {
    #[unroll(tiles.unroll())]
    for i in 0..len {
        array[i] = value;
    }
}
