//! The backward kernel, for either side.

use super::ptx::{
    barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait, copy_box, exp2, load_pair,
    products_wait, registers_release, registers_take, shared_address, vector, warp,
};
use super::shape::{BackwardTiles, Side};
use super::wgmma::{BOX, descriptor, round_half, start_accumulate, two_scores, wait};
use crate::walk::{end_of_seers, first_seer, row_offset};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Copies 64 rows of one head, from `row` on, to `to`; its boxes of 64 columns lie `rows` rows apart.
#[cube]
fn copy_rows(
    to: u32,
    map: u64,
    row: u32,
    head: u32,
    batch: u32,
    barrier: u32,
    #[comptime] rows: usize,
    #[comptime] head_dim: usize,
) {
    #[unroll]
    for part in 0..comptime!((head_dim / BOX) as u32) {
        let at = to + comptime!(part * (rows * 128) as u32);
        copy_box(at, map, comptime!(part * BOX as u32), row, head, batch, barrier);
    }
}

/// Where queries are walked: what is known of the two of them in a unit's columns of block `block`.
#[cube]
fn of_columns(address: u32, #[comptime] block: usize, #[comptime] tiles: BackwardTiles) -> Vector<f32, Const<2>> {
    if comptime!(tiles.side == Side::Keys) {
        load_pair(address + comptime!(32 * block as u32))
    } else {
        Vector::<f32, Const<2>>::new(0.0f32)
    }
}

/// Gradients of one tile of rows of one head: of keys and values over the queries that see them, of all heads
/// that read them (`Side::Keys`), or of queries over the keys they see (`Side::Queries`).
///
/// With `P = exp(S − lse)`, `dP = dO · Vᵀ` and `dS = scale · P ∘ (dP − delta)`, these are `dV = Pᵀ · dO`,
/// `dK = dSᵀ · Q` and `dQ = dS · K`. Both sides are the same walk with the operands exchanged: two of them
/// stay, `S` and `dP` come from the two that are walked, and what is computed from them is, still in
/// registers, the left operand of the products that add up. So no sum has two writers, and every run gives
/// the same bits.
///
/// Of three warpgroups, the last one copies, the others compute 64 rows each. `scale` is above 0; `factor` has
/// its sign.
#[cube(launch_unchecked, address_type = "dynamic", fast_math = FastMath::ReducedPrecision | FastMath::AllowContraction)]
pub(crate) fn attention_backward<E: Float, O: Size>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    d_out: &TensorMap<E, Tiled>,
    lse: &Tensor<f32>,
    delta: &Tensor<f32>,
    bounds: &Tensor<u32>,
    gradient: &mut Tensor<Vector<f32, Const<2>>>,
    group: usize,
    num_keys: usize,
    scale: f32,
    factor: f32,
    #[comptime] tiles: BackwardTiles,
    #[define(E)] _dtype: ElemType,
) {
    let of_keys = comptime!(tiles.side == Side::Keys);
    let (heads, num_rows) = (lse.shape(1), lse.shape(2));
    let stay_len = if of_keys { num_keys } else { num_rows };
    let stay_heads = if of_keys { heads / group } else { heads };
    let num_tiles = stay_len.div_ceil(128);
    let planes = lse.shape(0) * stay_heads;
    if CUBE_POS >= num_tiles * planes {
        terminate!();
    }
    let plane = CUBE_POS / num_tiles;
    let tile = CUBE_POS % num_tiles;
    // Tiles that see most under a causal mask come first.
    let first = if of_keys { tile * 128 } else { (num_tiles - 1 - tile) * 128 };
    let (batch, stay_head) = (plane / stay_heads, plane % stay_heads);

    let memory: Shared<[u32]> = Shared::new_aligned_slice(comptime!(tiles.shared_bytes() / 4), 1024usize);
    let mut rows_lse = Shared::<[f32]>::new_slice(128usize);
    let mut rows_delta = Shared::<[f32]>::new_slice(128usize);
    let mut rows_lo = Shared::<[u32]>::new_slice(128usize);
    let mut rows_hi = Shared::<[u32]>::new_slice(128usize);
    let stay_bytes = comptime!(tiles.stay_bytes() as u32);
    let walk_bytes = comptime!(tiles.walk_bytes() as u32);
    let stay_at = shared_address::<u32>(memory.as_ptr());
    let other_stay_at = stay_at + stay_bytes;
    let walk_at = other_stay_at + stay_bytes;
    let other_walk_at = walk_at + comptime!(2 * tiles.walk_bytes() as u32);
    let stay_here = other_walk_at + comptime!(2 * tiles.walk_bytes() as u32);
    let here = stay_here + 8;
    let done = here + 16;
    let warp = warp();
    let lane = UNIT_POS_X % 32;
    if UNIT_POS_X == 0 {
        barrier_init(stay_here, 1u32);
        #[unroll]
        for i in 0..2u32 {
            // What is copied, and for keys what is known of the rows.
            barrier_init(here + 8 * i, comptime!(if tiles.side == Side::Keys { 2u32 } else { 1u32 }));
            barrier_init(done + 8 * i, 8u32);
        }
        barrier_init_fence();
    }
    sync_cube();

    let last = min(first + 128, stay_len) - 1;
    let start = if of_keys { first_seer(bounds, num_rows, first) } else { bounds[first] as usize };
    let end = if of_keys { end_of_seers(bounds, num_rows, last) } else { bounds[num_rows + last] as usize };
    let mut a_head = 0u32;
    if start < end {
        a_head = (end - start).div_ceil(64) as u32;
    }
    let mut count = a_head;
    if of_keys {
        count *= group as u32;
    }

    if warp >= 8 {
        if comptime!(tiles.moves_registers()) {
            registers_release(40u32);
        }
        if UNIT_POS_X == 256 && count > 0 {
            let (query, key) = (tensor_map_address(query), tensor_map_address(key));
            let (value, d_out) = (tensor_map_address(value), tensor_map_address(d_out));
            let batch = batch as u32;
            let (stay, other_stay) = if of_keys { (key, value) } else { (query, d_out) };
            let (walk, other_walk) = if of_keys { (query, d_out) } else { (key, value) };
            barrier_expect(stay_here, comptime!(2 * tiles.stay_bytes() as u32));
            #[unroll]
            for rows in 0..2u32 {
                let row = first as u32 + comptime!(64 * rows);
                let at = comptime!(8192 * rows);
                copy_rows(
                    stay_at + at,
                    stay,
                    row,
                    stay_head as u32,
                    batch,
                    stay_here,
                    128usize,
                    comptime!(tiles.head_dim),
                );
                copy_rows(
                    other_stay_at + at,
                    other_stay,
                    row,
                    stay_head as u32,
                    batch,
                    stay_here,
                    128usize,
                    comptime!(tiles.head_dim),
                );
            }
            for turn in 0..count {
                let at = turn % 2;
                let row = start as u32 + turn % a_head * 64;
                let walk_head = if of_keys {
                    stay_head as u32 * group as u32 + turn / a_head
                } else {
                    stay_head as u32 / group as u32
                };
                let barrier = here + 8 * at;
                barrier_wait(done + 8 * at, (turn / 2 % 2) ^ 1);
                barrier_expect(barrier, comptime!(2 * tiles.walk_bytes() as u32));
                copy_rows(
                    walk_at + at * walk_bytes,
                    walk,
                    row,
                    walk_head,
                    batch,
                    barrier,
                    64usize,
                    comptime!(tiles.head_dim),
                );
                copy_rows(
                    other_walk_at + at * walk_bytes,
                    other_walk,
                    row,
                    walk_head,
                    batch,
                    barrier,
                    64usize,
                    comptime!(tiles.head_dim),
                );
            }
        }
        if comptime!(tiles.side == Side::Keys) {
            if warp == 9 {
                for turn in 0..count {
                    let at = turn % 2;
                    let head = stay_head * group + (turn / a_head) as usize;
                    barrier_wait(done + 8 * at, (turn / 2 % 2) ^ 1);
                    #[unroll]
                    for part in 0..2u32 {
                        let own = lane + comptime!(32 * part);
                        let row = start + (turn % a_head * 64 + own) as usize;
                        let to = (at * 64 + own) as usize;
                        // Rows that are not there see nothing, and no tile with one of them is full.
                        let mut row_lse = 0.0f32;
                        let mut row_delta = 0.0f32;
                        let mut lo = u32::MAX.runtime();
                        let mut hi = 0u32;
                        if row < num_rows {
                            row_lse = lse[row_offset(lse, batch, head, row)] * LOG2_E;
                            row_delta = delta[row_offset(delta, batch, head, row)];
                            lo = bounds[row];
                            hi = bounds[num_rows + row];
                        }
                        rows_lse[to] = row_lse;
                        rows_delta[to] = row_delta;
                        rows_lo[to] = lo;
                        rows_hi[to] = hi;
                    }
                    sync_plane();
                    if lane == 0 {
                        barrier_arrive(here + 8 * at);
                    }
                }
            }
        }
    } else {
        if comptime!(tiles.moves_registers()) {
            registers_take(232u32);
        }
        let warpgroup = warp / 4;
        let products = comptime!(tiles.products());
        let len = comptime!(tiles.head_dim / 2);
        let c = scale * LOG2_E;
        let first_own = first + (warpgroup * 64) as usize;
        let own = first_own + (warp % 4 * 16 + lane / 4) as usize;
        let column = lane % 4 * 2;
        let mut zeros = Sequence::<f32>::new();
        #[unroll]
        for _i in 0..len {
            zeros.push(0.0f32.runtime());
        }
        let mut d_scores = vector::<f32, O>(&zeros);
        let mut d_weights = vector::<f32, O>(&zeros);

        // Of the unit's own two rows, where queries stay.
        let mut own_lse = Array::<f32>::new(2usize);
        let mut own_delta = Array::<f32>::new(2usize);
        let mut own_lo = Array::<u32>::new(2usize);
        let mut own_hi = Array::<u32>::new(2usize);
        // Where queries stay, the warpgroup's rows see all keys from `full_from` to `full_to`.
        let mut full_from = 0u32;
        let mut full_to = 0u32;
        if comptime!(tiles.side == Side::Queries) {
            #[unroll]
            for half in 0..2usize {
                let row = min(own + 8 * half, num_rows - 1);
                own_lse[half] = lse[row_offset(lse, batch, stay_head, row)] * LOG2_E;
                own_delta[half] = delta[row_offset(delta, batch, stay_head, row)];
                own_lo[half] = bounds[row];
                own_hi[half] = bounds[num_rows + row];
            }
            full_from = bounds[min(first_own + 63, num_rows - 1)];
            full_to = bounds[num_rows + min(first_own, num_rows - 1)];
        }
        let lse_at = shared_address::<f32>(rows_lse.as_ptr());
        let lo_at = shared_address::<u32>(rows_lo.as_ptr());
        let hi_at = shared_address::<u32>(rows_hi.as_ptr());
        let delta_at = shared_address::<f32>(rows_delta.as_ptr());
        let stay = descriptor(stay_at + warpgroup * 8192, 16u32);
        let other_stay = descriptor(other_stay_at + warpgroup * 8192, 16u32);
        let walk = descriptor(walk_at, 16u32);
        let other_walk = descriptor(other_walk_at, 16u32);
        let walk_columns = descriptor(walk_at, 8192u32);
        let other_walk_columns = descriptor(other_walk_at, 8192u32);
        let step = comptime!(tiles.walk_bytes() as u32 >> 4);
        if count > 0 {
            barrier_wait(stay_here, 0u32);
        }
        for turn in 0..count {
            let at = turn % 2;
            barrier_wait(here + 8 * at, turn / 2 % 2);
            let both = two_scores(stay, walk + at * step, other_stay, other_walk + at * step, products);

            let first_walked = start as u32 + turn * 64;
            let is_full = if comptime!(tiles.side == Side::Keys) {
                let (first, last) = ((at * 64) as usize, (at * 64 + 63) as usize);
                rows_lo[last] <= first_own as u32 && rows_hi[first] >= first_own as u32 + 64
            } else {
                first_walked >= full_from && first_walked + 64 <= full_to
            };
            let columns_at = (at * 64 + column) * 4;
            let mut p = Array::<f32>::new(32usize);
            #[unroll]
            for block in 0..8usize {
                let pair = of_columns(lse_at + columns_at, block, tiles);
                #[unroll]
                for i in 0..4usize {
                    let log_sum =
                        if comptime!(tiles.side == Side::Keys) { pair.extract(i % 2) } else { own_lse[i / 2] };
                    p[4 * block + i] = exp2(both.extract(4 * block + i) * c - log_sum);
                }
            }
            if !is_full {
                #[unroll]
                for block in 0..8usize {
                    let lo = of_columns(lo_at + columns_at, block, tiles);
                    let hi = of_columns(hi_at + columns_at, block, tiles);
                    #[unroll]
                    for i in 0..4usize {
                        let seen = if comptime!(tiles.side == Side::Keys) {
                            let key = own as u32 + comptime!(8 * (i / 2) as u32);
                            key >= u32::reinterpret(lo.extract(i % 2)) && key < u32::reinterpret(hi.extract(i % 2))
                        } else {
                            let key = first_walked + column + comptime!((8 * block + i % 2) as u32);
                            key >= own_lo[i / 2] && key < own_hi[i / 2]
                        };
                        p[4 * block + i] = select(seen, p[4 * block + i], 0.0f32);
                    }
                }
            }
            let mut weights = Sequence::<f32>::new();
            let mut upper = Sequence::<f32>::new();
            #[unroll]
            for i in 0..32usize {
                weights.push(p[i]);
                upper.push(both.extract(32 + i));
            }
            let d_p = wait(vector::<f32, Const<32>>(&upper));
            let mut d_s = Sequence::<f32>::new();
            #[unroll]
            for block in 0..8usize {
                let pair = of_columns(delta_at + columns_at, block, tiles);
                #[unroll]
                for i in 0..4usize {
                    let delta =
                        if comptime!(tiles.side == Side::Keys) { pair.extract(i % 2) } else { own_delta[i / 2] };
                    d_s.push(p[4 * block + i] * (d_p.extract(4 * block + i) - delta));
                }
            }
            // Rounded only now: one more set of registers would be one too many.
            if comptime!(tiles.side == Side::Keys) {
                let rounded = round_half(vector::<f32, Const<32>>(&weights), comptime!(tiles.half));
                d_weights = start_accumulate::<O>(d_weights, rounded, other_walk_columns + at * step, products);
            }
            let rounded = round_half(vector::<f32, Const<32>>(&d_s), comptime!(tiles.half));
            d_scores = start_accumulate::<O>(d_scores, rounded, walk_columns + at * step, products);
            products_wait();
            if lane == 0 {
                barrier_arrive(done + 8 * at);
            }
        }

        let pairs = comptime!(tiles.head_dim / 2);
        let other = planes * stay_len * pairs;
        #[unroll]
        for half in 0..2usize {
            let row = own + 8 * half;
            if row < stay_len {
                let base = (plane * stay_len + row) * pairs + lane as usize % 4;
                #[unroll]
                for i in 0..comptime!(tiles.head_dim / 8) {
                    let mut pair = Sequence::<f32>::new();
                    pair.push(d_scores.extract(4 * i + 2 * half) * factor);
                    pair.push(d_scores.extract(4 * i + 2 * half + 1) * factor);
                    gradient[base + 4 * i] = vector::<f32, Const<2>>(&pair);
                    if comptime!(tiles.side == Side::Keys) {
                        let mut pair = Sequence::<f32>::new();
                        pair.push(d_weights.extract(4 * i + 2 * half));
                        pair.push(d_weights.extract(4 * i + 2 * half + 1));
                        gradient[other + base + 4 * i] = vector::<f32, Const<2>>(&pair);
                    }
                }
            }
        }
    }
}
