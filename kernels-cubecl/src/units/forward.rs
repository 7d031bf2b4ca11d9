//! The forward kernel.

use super::shape::UnitTiles;
use super::tile::{accumulate, add_scores, fill, share_scores, stage, write_rows};
use crate::walk::{head_offset, seen_keys};
use cubecl::prelude::*;

/// Stands for the score of a hidden key and the maximum of no scores; below every real score.
const LOWEST: f32 = f32::MIN;

/// FlashAttention's recurrence (Dao, arXiv 2307.08691) for one tile of queries of one head: `m` is the
/// running maximum of each row's scores, `l` the running sum of exponentials and `o` the running product
/// with the values, both relative to `m`. A previous partial is a state of it: m = lse, l = 1, o = out.
///
/// A cube is one tile; tiles with the most keys under a causal mask come first. `bounds` holds all
/// lower bounds, then all upper ones. `nothing` is `-inf`, which not every shading language can write.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn attention_forward<E: Float>(
    query: &Tensor<E>,
    key: &Tensor<E>,
    value: &Tensor<E>,
    bounds: &Tensor<u32>,
    previous_out: &Tensor<f32>,
    previous_lse: &Tensor<f32>,
    out: &mut Tensor<f32>,
    lse: &mut Tensor<f32>,
    scale: f32,
    nothing: f32,
    #[comptime] has_previous: bool,
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

    let mut outer = Shared::<[f32]>::new_slice(comptime!(tiles.outer() * tiles.chunk_stride()));
    let mut inner = Shared::<[f32]>::new_slice(comptime!(tiles.inner() * tiles.chunk_stride()));
    let mut weights = Shared::<[f32]>::new_slice(comptime!(tiles.outer() * tiles.weights_stride()));
    let mut across = Shared::<[f32]>::new_slice(comptime!(tiles.outer() * tiles.units_x));

    let own_row = UNIT_POS_Y as usize * comptime!(tiles.outer_per_unit);
    let mut lo = Array::<u32>::new(comptime!(tiles.outer_per_unit));
    let mut hi = Array::<u32>::new(comptime!(tiles.outer_per_unit));
    let mut m = Array::<f32>::new(comptime!(tiles.outer_per_unit));
    let mut l = Array::<f32>::new(comptime!(tiles.outer_per_unit));
    let mut o = Array::<f32>::new(comptime!(tiles.accumulators_per_unit()));
    #[unroll(tiles.unroll())]
    for r in 0..comptime!(tiles.outer_per_unit) {
        let row = first_row + own_row + r;
        lo[r] = 0u32;
        hi[r] = 0u32;
        m[r] = LOWEST;
        l[r] = 0.0f32;
        if row < num_rows {
            lo[r] = bounds[row];
            hi[r] = bounds[num_rows + row];
        }
    }
    fill(&mut o, 0.0f32, comptime!(tiles.accumulators_per_unit()), tiles);
    if comptime!(has_previous) {
        let out_base = head_offset(previous_out, batch, head);
        let lse_base = head_offset(previous_lse, batch, head);
        let columns = comptime!(tiles.num_chunks() * tiles.columns_per_unit());
        #[unroll(tiles.unroll())]
        for r in 0..comptime!(tiles.outer_per_unit) {
            let row = first_row + own_row + r;
            if row < num_rows {
                let before = previous_lse[lse_base + row * previous_lse.stride(2)];
                m[r] = max(before, LOWEST);
                // Sums are added up over a row's units at the end, so one unit alone has the 1.
                if UNIT_POS_X == 0 && before > LOWEST {
                    l[r] = 1.0f32;
                }
                #[unroll(tiles.unroll())]
                for c in 0..columns {
                    let column = UNIT_POS_X as usize + c * comptime!(tiles.units_x);
                    if column < comptime!(tiles.head_dim) {
                        let at = out_base + row * previous_out.stride(2) + column * previous_out.stride(3);
                        o[r * columns + c] = previous_out[at];
                    }
                }
            }
        }
    }

    let last_row = min(first_row + comptime!(tiles.outer()), num_rows) - 1;
    let seen_keys = seen_keys(bounds, num_rows, first_row, last_row);
    let mut first_key = seen_keys.start;
    while first_key < seen_keys.end {
        let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
        fill(&mut s, 0.0f32, comptime!(tiles.scores_per_unit()), tiles);
        #[unroll]
        for chunk in 0..comptime!(tiles.num_chunks()) {
            let column = comptime!(chunk * tiles.chunk);
            sync_cube();
            stage(query, query_base, first_row, num_rows, column, &mut outer, comptime!(tiles.outer()), tiles);
            stage(key, key_base, first_key, num_keys, column, &mut inner, comptime!(tiles.inner()), tiles);
            sync_cube();
            add_scores(&outer, &inner, &mut s, tiles);
        }

        let is_full = first_key >= seen_keys.full_from && first_key + comptime!(tiles.inner()) <= seen_keys.full_to;
        #[unroll(tiles.unroll())]
        for r in 0..comptime!(tiles.outer_per_unit) {
            let mut largest = m[r];
            #[unroll(tiles.unroll())]
            for c in 0..comptime!(tiles.inner_per_unit) {
                let at = comptime!(tiles.inner_per_unit) * r + c;
                let key_at = (first_key + UNIT_POS_X as usize + c * comptime!(tiles.units_x)) as u32;
                let seen = is_full || (key_at >= lo[r] && key_at < hi[r]);
                s[at] = select(seen, s[at] * scale, LOWEST);
                largest = max(largest, s[at]);
            }
            across[(own_row + r) * comptime!(tiles.units_x) + UNIT_POS_X as usize] = largest;
        }
        sync_cube();
        #[unroll(tiles.unroll())]
        for r in 0..comptime!(tiles.outer_per_unit) {
            let mut m_new = m[r];
            for x in 0..comptime!(tiles.units_x) {
                m_new = max(m_new, across[(own_row + r) * comptime!(tiles.units_x) + x]);
            }
            let shrink = (m[r] - m_new).exp();
            m[r] = m_new;
            l[r] *= shrink;
            #[unroll(tiles.unroll())]
            for c in 0..comptime!(tiles.inner_per_unit) {
                let at = comptime!(tiles.inner_per_unit) * r + c;
                let p = select(s[at] > LOWEST, (s[at] - m_new).exp(), 0.0f32);
                s[at] = p;
                l[r] += p;
            }
            let columns = comptime!(tiles.num_chunks() * tiles.columns_per_unit());
            #[unroll(tiles.unroll())]
            for c in 0..columns {
                o[r * columns + c] *= shrink;
            }
        }
        share_scores(&s, &mut weights, tiles);
        #[unroll]
        for chunk in 0..comptime!(tiles.num_chunks()) {
            let column = comptime!(chunk * tiles.chunk);
            sync_cube();
            stage(value, value_base, first_key, num_keys, column, &mut inner, comptime!(tiles.inner()), tiles);
            sync_cube();
            accumulate(&weights, &inner, &mut o, chunk, tiles);
        }
        first_key += comptime!(tiles.inner());
    }

    sync_cube();
    #[unroll(tiles.unroll())]
    for r in 0..comptime!(tiles.outer_per_unit) {
        across[(own_row + r) * comptime!(tiles.units_x) + UNIT_POS_X as usize] = l[r];
    }
    sync_cube();
    #[unroll(tiles.unroll())]
    for r in 0..comptime!(tiles.outer_per_unit) {
        let mut sum = f32::new(0.0);
        for x in 0..comptime!(tiles.units_x) {
            sum += across[(own_row + r) * comptime!(tiles.units_x) + x];
        }
        let row = first_row + own_row + r;
        let is_empty = sum == 0.0f32;
        l[r] = select(is_empty, 0.0f32, 1.0f32 / select(is_empty, 1.0f32, sum));
        if row < num_rows && UNIT_POS_X == 0 {
            lse[plane * num_rows + row] = select(is_empty, nothing, m[r] + select(is_empty, 1.0f32, sum).ln());
        }
    }
    write_rows(&o, &l, out, plane * num_rows * comptime!(tiles.head_dim), first_row, num_rows, tiles);
}
