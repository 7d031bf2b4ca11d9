//! The kernel of `d_key` and `d_value`.

use super::shape::{M, N, Tile};
use super::tile::{Chunk, Pair, accumulate, add_scores, announce, copy_rows, head, pad_rows, round, write_rows, zeros};
use crate::walk::{end_of_seers, first_seer, row_offset};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

/// `dV = Pᵀ · dO` and `dK = dSᵀ · Q` for one tile of keys of one key/value head, over the queries that
/// see it, of all query heads that read it. Scores are computed transposed: keys are the outer side.
///
/// Both gradients are written to one tensor, `d_key` first. Where the accumulators of a whole head would
/// not fit the registers, `splits` cubes compute a part of the columns each.
#[cube(launch_unchecked, address_type = "dynamic", fast_math = FastMath::ReducedPrecision | FastMath::AllowContraction)]
pub(crate) fn attention_backward_dkdv<E: Float>(
    query: &Tensor<Chunk<E>>,
    key: &Tensor<Chunk<E>>,
    value: &Tensor<Chunk<E>>,
    d_out: &Tensor<Chunk<E>>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    bounds: &Tensor<u32>,
    d_key_value: &mut Tensor<Pair<f32>>,
    scale: f32,
    #[comptime] tile: Tile,
    #[define(E)] _dtype: ElemType,
) {
    let (kv_heads, num_rows, num_keys) = (key.shape(1), query.shape(2), key.shape(2));
    let group = query.shape(1) / kv_heads;
    let num_tiles = num_keys.div_ceil(comptime!(tile.outer()));
    let planes = key.shape(0) * kv_heads;
    let splits = comptime!(tile.splits);
    if CUBE_POS >= num_tiles * planes * splits {
        terminate!();
    }
    let first_step = (CUBE_POS % splits) * comptime!(tile.result_steps());
    let plane = CUBE_POS / splits / num_tiles;
    let first_key = (CUBE_POS / splits % num_tiles) * comptime!(tile.outer());
    let (batch, kv_head) = (plane / kv_heads, plane % kv_heads);

    // Two chunks more than the rows take: the last columns of a padded head are read across the end.
    let stays = comptime!(tile.outer() * tile.stride() + 2);
    let staged = comptime!(2 * tile.inner * tile.stride() + 2);
    let mut staged_key = Shared::<[Chunk<E>]>::new_aligned_slice(stays, 16usize);
    let mut staged_value = Shared::<[Chunk<E>]>::new_aligned_slice(stays, 16usize);
    let mut staged_query = Shared::<[Chunk<E>]>::new_aligned_slice(staged, 16usize);
    let mut staged_d_out = Shared::<[Chunk<E>]>::new_aligned_slice(staged, 16usize);
    let mut staged_lse = Shared::<[f32]>::new_slice(comptime!(2 * tile.inner));
    let mut staged_delta = Shared::<[f32]>::new_slice(comptime!(2 * tile.inner));
    let here = Barrier::shared(CUBE_DIM, UNIT_POS == 0);
    pad_rows(&mut staged_key, comptime!(tile.outer()), tile);
    pad_rows(&mut staged_value, comptime!(tile.outer()), tile);
    pad_rows(&mut staged_query, comptime!(2 * tile.inner), tile);
    pad_rows(&mut staged_d_out, comptime!(2 * tile.inner), tile);
    sync_cube();

    let lane = UNIT_POS_X as usize;
    let own_key = UNIT_POS_Y as usize * comptime!(tile.blocks * M);
    let halves = comptime!(2 * tile.blocks);
    let mut d_k = zeros(comptime!(4 * tile.blocks * tile.result_steps()));
    let mut d_v = zeros(comptime!(4 * tile.blocks * tile.result_steps()));

    let last_key = min(first_key + comptime!(tile.outer()), num_keys) - 1;
    let start = first_seer(bounds, num_rows, first_key);
    let end = end_of_seers(bounds, num_rows, last_key);
    // Tiles of all heads of the group, one after the other.
    let mut tiles_a_head = 0usize;
    if start < end {
        tiles_a_head = (end - start).div_ceil(comptime!(tile.inner));
    }
    let count = tiles_a_head * group;
    if count > 0 {
        let (keys, values) = (head(key, batch, kv_head), head(value, batch, kv_head));
        copy_rows(key, &keys, first_key, &mut staged_key, 0usize, comptime!(tile.outer()), tile);
        copy_rows(value, &values, first_key, &mut staged_value, 0usize, comptime!(tile.outer()), tile);
    }
    let half_staged = comptime!(tile.inner * tile.stride());
    let mut parity = 0u32;
    // One turn more than there are tiles: a turn starts the copies of one and computes the one before.
    for turn in 0..count + 1 {
        if turn < count {
            let head_index = kv_head * group + turn / tiles_a_head;
            let first_row = start + turn % tiles_a_head * comptime!(tile.inner);
            let at = (turn % 2) * half_staged;
            copy_rows(
                query,
                &head(query, batch, head_index),
                first_row,
                &mut staged_query,
                at,
                comptime!(tile.inner),
                tile,
            );
            copy_rows(
                d_out,
                &head(d_out, batch, head_index),
                first_row,
                &mut staged_d_out,
                at,
                comptime!(tile.inner),
                tile,
            );
            if (UNIT_POS as usize) < comptime!(tile.inner) {
                let row = first_row + UNIT_POS as usize;
                let to = (turn % 2) * comptime!(tile.inner) + UNIT_POS as usize;
                // Rows that are not there weigh exp(s - MAX) = 0.
                let mut row_lse = f32::new(f32::MAX);
                let mut row_delta = 0.0f32;
                if row < num_rows {
                    row_lse = lse[row_offset(lse, batch, head_index, row)];
                    row_delta = delta[row_offset(delta, batch, head_index, row)];
                }
                staged_lse[to] = row_lse;
                staged_delta[to] = row_delta;
            }
        }
        if turn > 0 {
            let staged_at = ((turn - 1) % 2) * half_staged;
            let row_at = ((turn - 1) % 2) * comptime!(tile.inner);
            let first_row = start + (turn - 1) % tiles_a_head * comptime!(tile.inner);
            let mut s = zeros(comptime!(2 * tile.blocks * tile.score_tiles()));
            let mut d_p = zeros(comptime!(2 * tile.blocks * tile.score_tiles()));
            add_scores(&staged_key, own_key, &staged_query, staged_at, &mut s, tile);
            add_scores(&staged_value, own_key, &staged_d_out, staged_at, &mut d_p, tile);

            let last_row = first_row + comptime!(tile.inner) - 1;
            let mut is_full = false;
            if last_row < num_rows {
                is_full = bounds[last_row] as usize <= first_key && bounds[num_rows + first_row] as usize > last_key;
            }
            #[unroll]
            for n in 0..comptime!(tile.score_tiles()) {
                #[unroll]
                for i in 0..2usize {
                    let column = lane % 4 * 2 + comptime!(N * n + i);
                    let row_lse = staged_lse[row_at + column];
                    let row_delta = staged_delta[row_at + column];
                    let mut lo = 0u32;
                    let mut hi = u32::MAX.runtime();
                    if !is_full {
                        let row = min(first_row + column, num_rows - 1);
                        lo = bounds[row];
                        hi = bounds[num_rows + row];
                    }
                    #[unroll]
                    for half in 0..halves {
                        let at = comptime!(2 * (half / 2 * tile.score_tiles() + n) + half % 2);
                        let key_at = (first_key + own_key + lane / 4 + comptime!(N * half)) as u32;
                        let seen = is_full || (key_at >= lo && key_at < hi);
                        let p = select(seen, (s[at].extract(i) * scale - row_lse).exp(), 0.0f32);
                        let mut weights = s[at];
                        let mut d_weights = d_p[at];
                        weights.insert(i, p);
                        d_weights.insert(i, p * (d_p[at].extract(i) - row_delta));
                        s[at] = weights;
                        d_p[at] = d_weights;
                    }
                }
            }
            accumulate(&round::<E>(&s, tile), &staged_d_out, staged_at, &mut d_v, first_step, tile);
            accumulate(&round::<E>(&d_p, tile), &staged_query, staged_at, &mut d_k, first_step, tile);
        }
        if turn < count {
            announce(&here);
            here.wait_parity(parity);
            parity = 1 - parity;
        }
        sync_cube();
    }
    let mut ones = Array::<f32>::new(halves);
    let mut factors = Array::<f32>::new(halves);
    #[unroll]
    for half in 0..halves {
        ones[half] = 1.0f32;
        factors[half] = scale;
    }
    let pairs = comptime!(tile.head_dim / 2);
    let base = plane * num_keys * pairs;
    let half = planes * num_keys * pairs;
    let first = first_key + own_key;
    write_rows(&d_k, &factors, d_key_value, base, first, num_keys, first_step, tile);
    write_rows(&d_v, &ones, d_key_value, half + base, first, num_keys, first_step, tile);
}
