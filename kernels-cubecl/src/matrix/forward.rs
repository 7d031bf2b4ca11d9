//! The forward kernel.

use super::shape::{M, N, Tile};
use super::tile::{
    Chunk, Pair, accumulate, across_lanes, add_scores, announce, copy_rows, head, pad_rows, round, write_rows, zeros,
};
use crate::walk::{SeenKeys, row_offset, seen_keys};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// Stands for the score of a hidden key and the maximum of no scores; below every real score.
const LOWEST: f32 = f32::MIN;

/// FlashAttention's recurrence (Dao, arXiv 2307.08691) for one tile of queries of one head: `m` is the
/// running maximum of each row's scores, `l` the running sum of exponentials and `o` the running product
/// with the values, both relative to `m`. A previous partial is a state of it: m = lse, l = 1, o = out.
///
/// A cube is one tile; tiles with the most keys under a causal mask come first. `bounds` holds all
/// lower bounds, then all upper ones. Keys arrive while the tile before is computed.
#[cube(launch_unchecked, address_type = "dynamic", fast_math = FastMath::ReducedPrecision | FastMath::AllowContraction)]
pub(crate) fn attention_forward<E: Float>(
    query: &Tensor<Chunk<E>>,
    key: &Tensor<Chunk<E>>,
    value: &Tensor<Chunk<E>>,
    bounds: &Tensor<u32>,
    previous_out: &Tensor<f32>,
    previous_lse: &Tensor<f32>,
    out: &mut Tensor<Pair<f32>>,
    lse: &mut Tensor<f32>,
    scale: f32,
    nothing: f32,
    #[comptime] has_previous: bool,
    #[comptime] tile: Tile,
    #[define(E)] _dtype: ElemType,
) {
    let (heads, num_rows) = (query.shape(1), query.shape(2));
    let num_tiles = num_rows.div_ceil(comptime!(tile.outer()));
    if CUBE_POS >= num_tiles * query.shape(0) * heads {
        terminate!();
    }
    let plane = CUBE_POS / num_tiles;
    let first_row = (num_tiles - 1 - CUBE_POS % num_tiles) * comptime!(tile.outer());
    let (batch, head_index) = (plane / heads, plane % heads);
    let kv_head = head_index / (heads / key.shape(1));
    let queries = head(query, batch, head_index);
    let keys = head(key, batch, kv_head);
    let values = head(value, batch, kv_head);

    // Two chunks more than the rows take: the last columns of a padded head are read across the end.
    let staged = comptime!(2 * tile.inner * tile.stride() + 2);
    let mut staged_query =
        Shared::<[Chunk<E>]>::new_aligned_slice(comptime!(tile.outer() * tile.stride() + 2), 16usize);
    let mut staged_key = Shared::<[Chunk<E>]>::new_aligned_slice(staged, 16usize);
    let mut staged_value = Shared::<[Chunk<E>]>::new_aligned_slice(staged, 16usize);
    let keys_here = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
    let values_here = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
    pad_rows(&mut staged_query, comptime!(tile.outer()), tile);
    pad_rows(&mut staged_key, comptime!(2 * tile.inner), tile);
    sync_cube();

    let last_row = min(first_row + comptime!(tile.outer()), num_rows) - 1;
    let SeenKeys { start, end, full_from, full_to } = seen_keys(bounds, num_rows, first_row, last_row);
    let half_staged = comptime!(tile.inner * tile.stride());
    if start < end {
        copy_rows(query, &queries, first_row, &mut staged_query, 0usize, comptime!(tile.outer()), tile);
        copy_rows(key, &keys, start, &mut staged_key, 0usize, comptime!(tile.inner), tile);
        announce(&keys_here);
        copy_rows(value, &values, start, &mut staged_value, 0usize, comptime!(tile.inner), tile);
        announce(&values_here);
    }

    let lane = UNIT_POS_X as usize;
    let own_row = UNIT_POS_Y as usize * comptime!(tile.blocks * M);
    let halves = comptime!(2 * tile.blocks);
    let mut m = Array::<f32>::new(halves);
    let mut l = Array::<f32>::new(halves);
    let mut o = zeros(comptime!(4 * tile.blocks * tile.result_steps()));
    #[unroll]
    for half in 0..halves {
        let row = min(first_row + own_row + lane / 4 + comptime!(N * half), num_rows - 1);
        m[half] = LOWEST;
        l[half] = 0.0f32;
        if comptime!(has_previous) {
            let before = previous_lse[row_offset(previous_lse, batch, head_index, row)];
            m[half] = max(before, LOWEST);
            // Sums are added up over a row's four lanes at the end, so one lane alone has the 1.
            if lane % 4 == 0 && before > LOWEST {
                l[half] = 1.0f32;
            }
            let base = row_offset(previous_out, batch, head_index, row);
            #[unroll]
            for n in 0..comptime!(2 * tile.result_steps()) {
                let column = lane % 4 * 2 + comptime!(N * n);
                if comptime!(N * (n + 1) <= tile.head_dim) || column < comptime!(tile.head_dim) {
                    let mut pair = Pair::<f32>::empty();
                    pair.insert(0usize, previous_out[base + column * previous_out.stride(3)]);
                    pair.insert(1usize, previous_out[base + (column + 1) * previous_out.stride(3)]);
                    o[comptime!(2 * (half / 2 * 2 * tile.result_steps() + n) + half % 2)] = pair;
                }
            }
        }
    }

    let mut first_key = start;
    let mut parity = 0u32;
    while first_key < end {
        let current = parity as usize * half_staged;
        let next = (1 - parity) as usize * half_staged;
        let has_next = first_key + comptime!(tile.inner) < end;
        keys_here.wait_parity(parity);
        if has_next {
            copy_rows(
                key,
                &keys,
                first_key + comptime!(tile.inner),
                &mut staged_key,
                next,
                comptime!(tile.inner),
                tile,
            );
            announce(&keys_here);
        }
        let mut s = zeros(comptime!(2 * tile.blocks * tile.score_tiles()));
        add_scores(&staged_query, own_row, &staged_key, current, &mut s, tile);

        let is_full = first_key >= full_from && first_key + comptime!(tile.inner) <= full_to;
        #[unroll]
        for half in 0..halves {
            let mut largest = m[half];
            // Read where it is needed: held, it would be registers that are missing.
            let mut lo = 0u32;
            let mut hi = 0u32;
            if !is_full {
                let row = min(first_row + own_row + lane / 4 + comptime!(N * half), num_rows - 1);
                lo = bounds[row];
                hi = bounds[num_rows + row];
            }
            #[unroll]
            for n in 0..comptime!(tile.score_tiles()) {
                let at = comptime!(2 * (half / 2 * tile.score_tiles() + n) + half % 2);
                s[at] *= Pair::<f32>::new(scale);
                if !is_full {
                    let key_at = (first_key + lane % 4 * 2 + comptime!(N * n)) as u32;
                    let mut pair = s[at];
                    #[unroll]
                    for i in 0..2usize {
                        let own = key_at + comptime!(i as u32);
                        let seen = own >= lo && own < hi;
                        pair.insert(i, select(seen, s[at].extract(i), LOWEST));
                    }
                    s[at] = pair;
                }
                largest = max(largest, max(s[at].extract(0usize), s[at].extract(1usize)));
            }
            let m_new = across_lanes(largest, true);
            // Relative to 0 while nothing was seen, so that hidden keys weigh exp(LOWEST) = 0 and not exp(0).
            let origin = select(m_new == LOWEST, 0.0f32, m_new);
            let shrink = (m[half] - origin).exp();
            m[half] = m_new;
            l[half] *= shrink;
            #[unroll]
            for n in 0..comptime!(tile.score_tiles()) {
                let at = comptime!(2 * (half / 2 * tile.score_tiles() + n) + half % 2);
                let p = (s[at] - Pair::<f32>::new(origin)).exp();
                s[at] = p;
                l[half] += p.extract(0usize) + p.extract(1usize);
            }
            #[unroll]
            for n in 0..comptime!(2 * tile.result_steps()) {
                o[comptime!(2 * (half / 2 * 2 * tile.result_steps() + n) + half % 2)] *= Pair::<f32>::new(shrink);
            }
        }

        let p = round::<E>(&s, tile);
        values_here.wait_parity(parity);
        // All planes are done with the tile before: what comes next may overwrite it.
        sync_cube();
        if has_next {
            let from = first_key + comptime!(tile.inner);
            copy_rows(value, &values, from, &mut staged_value, next, comptime!(tile.inner), tile);
            announce(&values_here);
        }
        accumulate(&p, &staged_value, current, &mut o, 0usize, tile);
        first_key += comptime!(tile.inner);
        parity = 1 - parity;
    }

    #[unroll]
    for half in 0..halves {
        let sum = across_lanes(l[half], false);
        let row = first_row + own_row + lane / 4 + comptime!(N * half);
        let is_empty = sum == 0.0f32;
        let divisor = select(is_empty, 1.0f32, sum);
        l[half] = select(is_empty, 0.0f32, 1.0f32 / divisor);
        if row < num_rows && lane % 4 == 0 {
            lse[plane * num_rows + row] = select(is_empty, nothing, m[half] + divisor.ln());
        }
    }
    let base = plane * num_rows * comptime!(tile.head_dim / 2);
    write_rows(&o, &l, out, base, first_row + own_row, num_rows, 0usize, tile);
}
