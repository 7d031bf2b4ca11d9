//! The kernel of `d_query`.

use super::shape::UnitTiles;
use super::tile::{accumulate, add_scores, fill, share_scores, stage, write_rows};
use crate::walk::{head_offset, row_offset, seen_keys};
use cubecl::prelude::*;

/// `dQ = dS · K` with `P = exp(S − lse)`, `dP = dO · Vᵀ` and `dS = scale · P ∘ (dP − delta)`, for one
/// tile of queries of one head over the keys it sees.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn attention_backward_dq<E: Float>(
    query: &Tensor<E>,
    key: &Tensor<E>,
    value: &Tensor<E>,
    d_out: &Tensor<E>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    bounds: &Tensor<u32>,
    d_query: &mut Tensor<f32>,
    scale: f32,
    #[comptime] tiles: UnitTiles,
    #[define(E)] _dtype: ElemType,
) {
    let (heads, num_rows, num_keys) = (query.shape(1), query.shape(2), key.shape(2));
    let num_tiles = num_rows.div_ceil(comptime!(tiles.outer()));
    if CUBE_POS >= num_tiles * query.shape(0) * heads {
        terminate!();
    }
    let plane = CUBE_POS / num_tiles;
    let first_row = (num_tiles - 1 - CUBE_POS % num_tiles) * comptime!(tiles.outer());
    let (batch, head) = (plane / heads, plane % heads);
    let kv_head = head / (heads / key.shape(1));
    let query_base = head_offset(query, batch, head);
    let key_base = head_offset(key, batch, kv_head);
    let value_base = head_offset(value, batch, kv_head);
    let d_out_base = head_offset(d_out, batch, head);

    let mut outer = Shared::<[f32]>::new_slice(comptime!(tiles.outer() * tiles.chunk_stride()));
    let mut inner = Shared::<[f32]>::new_slice(comptime!(tiles.inner() * tiles.chunk_stride()));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(tiles.outer() * tiles.weights_stride()));

    let own_row = UNIT_POS_Y as usize * comptime!(tiles.outer_per_unit);
    let mut lo = Array::<u32>::new(comptime!(tiles.outer_per_unit));
    let mut hi = Array::<u32>::new(comptime!(tiles.outer_per_unit));
    let mut row_lse = Array::<f32>::new(comptime!(tiles.outer_per_unit));
    let mut row_delta = Array::<f32>::new(comptime!(tiles.outer_per_unit));
    let mut ones = Array::<f32>::new(comptime!(tiles.outer_per_unit));
    let mut d_q = Array::<f32>::new(comptime!(tiles.accumulators_per_unit()));
    #[unroll(tiles.unroll())]
    for r in 0..comptime!(tiles.outer_per_unit) {
        let row = first_row + own_row + r;
        lo[r] = 0u32;
        hi[r] = 0u32;
        row_lse[r] = 0.0f32;
        row_delta[r] = 0.0f32;
        ones[r] = 1.0f32;
        if row < num_rows {
            lo[r] = bounds[row];
            hi[r] = bounds[num_rows + row];
            row_lse[r] = lse[row_offset(lse, batch, head, row)];
            row_delta[r] = delta[row_offset(delta, batch, head, row)];
        }
    }
    fill(&mut d_q, 0.0f32, comptime!(tiles.accumulators_per_unit()), tiles);

    let last_row = min(first_row + comptime!(tiles.outer()), num_rows) - 1;
    let seen_keys = seen_keys(bounds, num_rows, first_row, last_row);
    let mut first_key = seen_keys.start;
    while first_key < seen_keys.end {
        let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
        let mut d_p = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
        fill(&mut s, 0.0f32, comptime!(tiles.scores_per_unit()), tiles);
        fill(&mut d_p, 0.0f32, comptime!(tiles.scores_per_unit()), tiles);
        #[unroll]
        for chunk in 0..comptime!(tiles.num_chunks()) {
            let column = comptime!(chunk * tiles.chunk);
            sync_cube();
            stage(query, query_base, first_row, num_rows, column, &mut outer, comptime!(tiles.outer()), tiles);
            stage(key, key_base, first_key, num_keys, column, &mut inner, comptime!(tiles.inner()), tiles);
            sync_cube();
            add_scores(&outer, &inner, &mut s, tiles);
            sync_cube();
            stage(d_out, d_out_base, first_row, num_rows, column, &mut outer, comptime!(tiles.outer()), tiles);
            stage(value, value_base, first_key, num_keys, column, &mut inner, comptime!(tiles.inner()), tiles);
            sync_cube();
            add_scores(&outer, &inner, &mut d_p, tiles);
        }
        #[unroll(tiles.unroll())]
        for r in 0..comptime!(tiles.outer_per_unit) {
            #[unroll(tiles.unroll())]
            for c in 0..comptime!(tiles.inner_per_unit) {
                let at = comptime!(tiles.inner_per_unit) * r + c;
                let key_at = (first_key + UNIT_POS_X as usize + c * comptime!(tiles.units_x)) as u32;
                let seen = key_at >= lo[r] && key_at < hi[r];
                let p = select(seen, (s[at] * scale - row_lse[r]).exp(), 0.0f32);
                s[at] = select(seen, p * (d_p[at] - row_delta[r]) * scale, 0.0f32);
            }
        }
        share_scores(&s, &mut weights, tiles);
        #[unroll]
        for chunk in 0..comptime!(tiles.num_chunks()) {
            let column = comptime!(chunk * tiles.chunk);
            sync_cube();
            stage(key, key_base, first_key, num_keys, column, &mut inner, comptime!(tiles.inner()), tiles);
            sync_cube();
            accumulate(&weights, &inner, &mut d_q, chunk, tiles);
        }
        first_key += comptime!(tiles.inner());
    }
    let base = plane * num_rows * comptime!(tiles.head_dim);
    write_rows(&d_q, &ones, d_query, base, first_row, num_rows, tiles);
}
