//! The kernel of `d_key` and `d_value`.

use super::shape::UnitTiles;
use super::tile::{accumulate, add_scores, fill, share_scores, stage, write_rows};
use crate::walk::{end_of_seers, first_seer, head_offset, row_offset};
use cubecl::prelude::*;

/// `dV = Pᵀ · dO` and `dK = dSᵀ · Q` for one tile of keys of one key/value head, over the queries that
/// see it, of all query heads that read it. Scores are computed transposed: keys are the outer side.
///
/// Both gradients are written to one tensor, `d_key` first: WebGPU grants a kernel eight buffers.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn attention_backward_dkdv<E: Float>(
    query: &Tensor<E>,
    key: &Tensor<E>,
    value: &Tensor<E>,
    d_out: &Tensor<E>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    bounds: &Tensor<u32>,
    d_key_value: &mut Tensor<f32>,
    scale: f32,
    #[comptime] tiles: UnitTiles,
    #[define(E)] _dtype: ElemType,
) {
    let (kv_heads, num_rows, num_keys) = (key.shape(1), query.shape(2), key.shape(2));
    let group = query.shape(1) / kv_heads;
    let num_tiles = num_keys.div_ceil(comptime!(tiles.outer()));
    let planes = key.shape(0) * kv_heads;
    if CUBE_POS >= num_tiles * planes {
        terminate!();
    }
    let plane = CUBE_POS / num_tiles;
    let first_key = (CUBE_POS % num_tiles) * comptime!(tiles.outer());
    let (batch, kv_head) = (plane / kv_heads, plane % kv_heads);
    let key_base = head_offset(key, batch, kv_head);
    let value_base = head_offset(value, batch, kv_head);

    let mut outer = Shared::<[f32]>::new_slice(comptime!(tiles.outer() * tiles.chunk_stride()));
    let mut inner = Shared::<[f32]>::new_slice(comptime!(tiles.inner() * tiles.chunk_stride()));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(tiles.outer() * tiles.weights_stride()));
    let mut d_weights = Shared::<[f32]>::new_slice(comptime!(tiles.outer() * tiles.weights_stride()));

    let own_key = UNIT_POS_Y as usize * comptime!(tiles.outer_per_unit);
    let mut ones = Array::<f32>::new(comptime!(tiles.outer_per_unit));
    let mut d_k = Array::<f32>::new(comptime!(tiles.accumulators_per_unit()));
    let mut d_v = Array::<f32>::new(comptime!(tiles.accumulators_per_unit()));
    fill(&mut ones, 1.0f32, comptime!(tiles.outer_per_unit), tiles);
    fill(&mut d_k, 0.0f32, comptime!(tiles.accumulators_per_unit()), tiles);
    fill(&mut d_v, 0.0f32, comptime!(tiles.accumulators_per_unit()), tiles);

    let last_key = min(first_key + comptime!(tiles.outer()), num_keys) - 1;
    let start = first_seer(bounds, num_rows, first_key);
    let end = end_of_seers(bounds, num_rows, last_key);
    for member in 0..group {
        let head = kv_head * group + member;
        let query_base = head_offset(query, batch, head);
        let d_out_base = head_offset(d_out, batch, head);
        let mut first_row = start;
        while first_row < end {
            let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
            let mut d_p = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
            fill(&mut s, 0.0f32, comptime!(tiles.scores_per_unit()), tiles);
            fill(&mut d_p, 0.0f32, comptime!(tiles.scores_per_unit()), tiles);
            #[unroll]
            for chunk in 0..comptime!(tiles.num_chunks()) {
                let column = comptime!(chunk * tiles.chunk);
                sync_cube();
                stage(key, key_base, first_key, num_keys, column, &mut outer, comptime!(tiles.outer()), tiles);
                stage(query, query_base, first_row, num_rows, column, &mut inner, comptime!(tiles.inner()), tiles);
                sync_cube();
                add_scores(&outer, &inner, &mut s, tiles);
                sync_cube();
                stage(value, value_base, first_key, num_keys, column, &mut outer, comptime!(tiles.outer()), tiles);
                stage(d_out, d_out_base, first_row, num_rows, column, &mut inner, comptime!(tiles.inner()), tiles);
                sync_cube();
                add_scores(&outer, &inner, &mut d_p, tiles);
            }
            #[unroll(tiles.unroll())]
            for c in 0..comptime!(tiles.inner_per_unit) {
                let row = first_row + UNIT_POS_X as usize + c * comptime!(tiles.units_x);
                let mut lo = 0u32;
                let mut hi = 0u32;
                let mut row_lse = 0.0f32;
                let mut row_delta = 0.0f32;
                if row < num_rows {
                    lo = bounds[row];
                    hi = bounds[num_rows + row];
                    row_lse = lse[row_offset(lse, batch, head, row)];
                    row_delta = delta[row_offset(delta, batch, head, row)];
                }
                #[unroll(tiles.unroll())]
                for r in 0..comptime!(tiles.outer_per_unit) {
                    let at = comptime!(tiles.inner_per_unit) * r + c;
                    let key_at = (first_key + own_key + r) as u32;
                    let seen = key_at >= lo && key_at < hi;
                    let p = select(seen, (s[at] * scale - row_lse).exp(), 0.0f32);
                    s[at] = p;
                    d_p[at] = select(seen, p * (d_p[at] - row_delta) * scale, 0.0f32);
                }
            }
            share_scores(&s, &mut weights, tiles);
            share_scores(&d_p, &mut d_weights, tiles);
            #[unroll]
            for chunk in 0..comptime!(tiles.num_chunks()) {
                let column = comptime!(chunk * tiles.chunk);
                sync_cube();
                stage(d_out, d_out_base, first_row, num_rows, column, &mut inner, comptime!(tiles.inner()), tiles);
                sync_cube();
                accumulate(&weights, &inner, &mut d_v, chunk, tiles);
                sync_cube();
                stage(query, query_base, first_row, num_rows, column, &mut inner, comptime!(tiles.inner()), tiles);
                sync_cube();
                accumulate(&d_weights, &inner, &mut d_k, chunk, tiles);
            }
            first_row += comptime!(tiles.inner());
        }
    }
    let base = plane * num_keys * comptime!(tiles.head_dim);
    let half = planes * num_keys * comptime!(tiles.head_dim);
    write_rows(&d_k, &ones, d_key_value, base, first_key, num_keys, tiles);
    write_rows(&d_v, &ones, d_key_value, half + base, first_key, num_keys, tiles);
}
