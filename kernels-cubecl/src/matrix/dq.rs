//! The kernel of `d_query`.

use super::shape::{M, N, Tile};
use super::tile::{Chunk, Pair, accumulate, add_scores, announce, copy_rows, head, pad_rows, round, write_rows, zeros};
use crate::walk::{SeenKeys, row_offset, seen_keys};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// `dQ = dS · K` with `P = exp(S − lse)`, `dP = dO · Vᵀ` and `dS = scale · P ∘ (dP − delta)`, for one
/// tile of queries of one head over the keys it sees.
#[cube(launch_unchecked, address_type = "dynamic", fast_math = FastMath::ReducedPrecision | FastMath::AllowContraction)]
pub(crate) fn attention_backward_dq<E: Float>(
    query: &Tensor<Chunk<E>>,
    key: &Tensor<Chunk<E>>,
    value: &Tensor<Chunk<E>>,
    d_out: &Tensor<Chunk<E>>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    bounds: &Tensor<u32>,
    d_query: &mut Tensor<Pair<f32>>,
    scale: f32,
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
    let d_outs = head(d_out, batch, head_index);
    let keys = head(key, batch, kv_head);
    let values = head(value, batch, kv_head);

    // Two chunks more than the rows take: the last columns of a padded head are read across the end.
    let stays = comptime!(tile.outer() * tile.stride() + 2);
    let staged = comptime!(2 * tile.inner * tile.stride() + 2);
    let mut staged_query = Shared::<[Chunk<E>]>::new_aligned_slice(stays, 16usize);
    let mut staged_d_out = Shared::<[Chunk<E>]>::new_aligned_slice(stays, 16usize);
    let mut staged_key = Shared::<[Chunk<E>]>::new_aligned_slice(staged, 16usize);
    let mut staged_value = Shared::<[Chunk<E>]>::new_aligned_slice(staged, 16usize);
    let here = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
    pad_rows(&mut staged_query, comptime!(tile.outer()), tile);
    pad_rows(&mut staged_d_out, comptime!(tile.outer()), tile);
    pad_rows(&mut staged_key, comptime!(2 * tile.inner), tile);
    pad_rows(&mut staged_value, comptime!(2 * tile.inner), tile);
    sync_cube();

    let last_row = min(first_row + comptime!(tile.outer()), num_rows) - 1;
    let SeenKeys { start, end, full_from, full_to } = seen_keys(bounds, num_rows, first_row, last_row);
    let half_staged = comptime!(tile.inner * tile.stride());
    if start < end {
        copy_rows(query, &queries, first_row, &mut staged_query, 0usize, comptime!(tile.outer()), tile);
        copy_rows(d_out, &d_outs, first_row, &mut staged_d_out, 0usize, comptime!(tile.outer()), tile);
        copy_rows(key, &keys, start, &mut staged_key, 0usize, comptime!(tile.inner), tile);
        copy_rows(value, &values, start, &mut staged_value, 0usize, comptime!(tile.inner), tile);
        announce(&here);
    }

    let lane = UNIT_POS_X as usize;
    let own_row = UNIT_POS_Y as usize * comptime!(tile.blocks * M);
    let halves = comptime!(2 * tile.blocks);
    let mut lo = Array::<u32>::new(halves);
    let mut hi = Array::<u32>::new(halves);
    let mut row_lse = Array::<f32>::new(halves);
    let mut row_delta = Array::<f32>::new(halves);
    let mut factors = Array::<f32>::new(halves);
    let mut d_q = zeros(comptime!(4 * tile.blocks * tile.result_steps()));
    #[unroll]
    for half in 0..halves {
        let row = min(first_row + own_row + lane / 4 + comptime!(N * half), num_rows - 1);
        lo[half] = bounds[row];
        hi[half] = bounds[num_rows + row];
        row_lse[half] = lse[row_offset(lse, batch, head_index, row)];
        row_delta[half] = delta[row_offset(delta, batch, head_index, row)];
        factors[half] = scale;
    }

    let mut first_key = start;
    let mut parity = 0u32;
    while first_key < end {
        let current = parity as usize * half_staged;
        here.wait_parity(parity);
        // All planes are done with the tile before: what comes next may overwrite it.
        sync_cube();
        if first_key + comptime!(tile.inner) < end {
            let next = (1 - parity) as usize * half_staged;
            let from = first_key + comptime!(tile.inner);
            copy_rows(key, &keys, from, &mut staged_key, next, comptime!(tile.inner), tile);
            copy_rows(value, &values, from, &mut staged_value, next, comptime!(tile.inner), tile);
            announce(&here);
        }
        let mut s = zeros(comptime!(2 * tile.blocks * tile.score_tiles()));
        let mut d_p = zeros(comptime!(2 * tile.blocks * tile.score_tiles()));
        add_scores(&staged_query, own_row, &staged_key, current, &mut s, tile);
        add_scores(&staged_d_out, own_row, &staged_value, current, &mut d_p, tile);

        let is_full = first_key >= full_from && first_key + comptime!(tile.inner) <= full_to;
        #[unroll]
        for half in 0..halves {
            #[unroll]
            for n in 0..comptime!(tile.score_tiles()) {
                let at = comptime!(2 * (half / 2 * tile.score_tiles() + n) + half % 2);
                let mut p = (s[at] * Pair::<f32>::new(scale) - Pair::<f32>::new(row_lse[half])).exp();
                if !is_full {
                    let key_at = (first_key + lane % 4 * 2 + comptime!(N * n)) as u32;
                    #[unroll]
                    for i in 0..2usize {
                        let own = key_at + comptime!(i as u32);
                        let seen = own >= lo[half] && own < hi[half];
                        p.insert(i, select(seen, p.extract(i), 0.0f32));
                    }
                }
                s[at] = p * (d_p[at] - Pair::<f32>::new(row_delta[half]));
            }
        }
        accumulate(&round::<E>(&s, tile), &staged_key, current, &mut d_q, 0usize, tile);
        first_key += comptime!(tile.inner);
        parity = 1 - parity;
    }
    let base = plane * num_rows * comptime!(tile.head_dim / 2);
    write_rows(&d_q, &factors, d_query, base, first_row + own_row, num_rows, 0usize, tile);
}
