//! The forward kernel.

use super::ptx::{
    barrier_arrive, barrier_expect, barrier_init, barrier_init_fence, barrier_wait, copy_box, exp2, registers_release,
    registers_take, shared_address, turn_give, turn_take, vector, warp,
};
use super::shape::ForwardTiles;
use super::wgmma::{BOX, accumulate, descriptor, finish, round, scores, scores_and_accumulate};
use crate::walk::{head_offset, row_offset};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Stands for the score of a hidden key; times any scale it is below every real score.
const HIDDEN: f32 = -1e38;
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// What a unit knows of its two rows: `m`, the running maximum of their scores, and `l`, its own share of the
/// running sum of exponentials.
#[derive(CubeType)]
struct Rows {
    m: Array<f32>,
    l: Array<f32>,
    lo: Array<u32>,
    hi: Array<u32>,
}

/// One tile's weights, and what shrinks the result so far.
#[derive(CubeType)]
struct Weights {
    p: Vector<f32, Const<64>>,
    shrink: Array<f32>,
}

/// `p = exp(c · s − c · m)` with the new maximum `m`; updates `rows`. `first_key` is that of the unit's first
/// column.
#[cube]
fn softmax(s: Vector<f32, Const<64>>, rows: &mut Rows, c: f32, is_full: bool, first_key: u32) -> Weights {
    let mut x = Array::<f32>::new(64usize);
    #[unroll]
    for i in 0..64usize {
        x[i] = s.extract(i);
    }
    if !is_full {
        #[unroll]
        for i in 0..64usize {
            let half = comptime!(i / 2 % 2);
            let key = first_key + comptime!((i / 4 * 8 + i % 2) as u32);
            x[i] = select(key >= rows.lo[half] && key < rows.hi[half], x[i], HIDDEN);
        }
    }
    let mut shrink = Array::<f32>::new(2usize);
    let mut origin = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let mut largest = rows.m[half];
        #[unroll]
        for i in 0..16usize {
            let at = comptime!(4 * i + 2 * half);
            largest = max(largest, max(x[at], x[at + 1]));
        }
        largest = max(largest, plane_shuffle_xor(largest, 1u32));
        largest = max(largest, plane_shuffle_xor(largest, 2u32));
        shrink[half] = exp2((rows.m[half] - largest) * c);
        // Relative to 0 while nothing was seen, so that hidden keys weigh 2^HIDDEN = 0 and not 2^0.
        origin[half] = select(largest == HIDDEN, 0.0f32, largest * c);
        rows.m[half] = largest;
        rows.l[half] *= shrink[half];
    }
    let mut parts = Sequence::<f32>::new();
    #[unroll]
    for i in 0..64usize {
        let half = comptime!(i / 2 % 2);
        let p = exp2(x[i] * c - origin[half]);
        rows.l[half] += p;
        parts.push(p);
    }
    Weights { p: vector::<f32, Const<64>>(&parts), shrink }
}

#[cube]
fn rescale<O: Size>(o: Vector<f32, O>, shrink: &Array<f32>, #[comptime] len: usize) -> Vector<f32, O> {
    let mut parts = Sequence::<f32>::new();
    #[unroll]
    for i in 0..len {
        parts.push(o.extract(i) * shrink[comptime!(i / 2 % 2)]);
    }
    vector::<f32, O>(&parts)
}

/// FlashAttention's recurrence (Dao, arXiv 2307.08691; Shah et al., arXiv 2407.08608) for one tile of queries
/// of one head, by two kinds of warpgroups: the last one copies, the others compute 64 rows each.
///
/// While a warpgroup computes the softmax of one tile, another one's products run: they take turns to issue
/// them. Within a warpgroup, the product of one tile's weights with its values runs beside the next tile's
/// scores and softmax. Keys are walked from the last to the first, so that under a causal mask the tiles on the
/// diagonal, which need the mask, come first; cubes with most keys come first, too.
///
/// `negative` scales have their sign in the products: `scale` is above 0.
#[cube(launch_unchecked, address_type = "dynamic", fast_math = FastMath::ReducedPrecision | FastMath::AllowContraction)]
pub(crate) fn attention_forward<E: Float, O: Size>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    bounds: &Tensor<u32>,
    previous_out: &Tensor<f32>,
    previous_lse: &Tensor<f32>,
    out: &mut Tensor<Vector<f32, Const<2>>>,
    lse: &mut Tensor<f32>,
    group: u32,
    scale: f32,
    nothing: f32,
    #[comptime] has_previous: bool,
    #[comptime] tiles: ForwardTiles,
    #[define(E)] _dtype: ElemType,
) {
    let (heads, num_rows) = (out.shape(1), out.shape(2));
    let num_tiles = num_rows.div_ceil(comptime!(tiles.queries()));
    if CUBE_POS >= num_tiles * out.shape(0) * heads {
        terminate!();
    }
    let plane = CUBE_POS / num_tiles;
    let first_row = (num_tiles - 1 - CUBE_POS % num_tiles) * comptime!(tiles.queries());
    let (batch, head) = (plane / heads, plane % heads);

    // Queries, then the stages of keys, then those of values, then barriers.
    let memory: Shared<[u32]> = Shared::new_aligned_slice(comptime!(tiles.shared_bytes() / 4), 1024usize);
    let queries_at = shared_address::<u32>(memory.as_ptr());
    let stage = comptime!(tiles.stage_bytes() as u32);
    let keys_at = queries_at + comptime!(tiles.query_bytes() as u32);
    let values_at = keys_at + comptime!((tiles.stages * tiles.stage_bytes()) as u32);
    let queries_here = values_at + comptime!((tiles.stages * tiles.stage_bytes()) as u32);
    let eight_stages = comptime!(8 * tiles.stages as u32);
    let keys_here = queries_here + 8;
    let keys_done = keys_here + eight_stages;
    let values_here = keys_done + eight_stages;
    let values_done = values_here + eight_stages;
    let warp = warp();
    let lane = UNIT_POS_X % 32;
    if UNIT_POS_X == 0 {
        barrier_init(queries_here, 1u32);
        #[unroll]
        for i in 0..comptime!(tiles.stages as u32) {
            barrier_init(keys_here + 8 * i, 1u32);
            barrier_init(values_here + 8 * i, 1u32);
            barrier_init(keys_done + 8 * i, comptime!(4 * tiles.warpgroups as u32));
            barrier_init(values_done + 8 * i, comptime!(4 * tiles.warpgroups as u32));
        }
        barrier_init_fence();
    }
    sync_cube();

    // Bounds never decrease: the tile's keys are those from its first row's first to its last row's last.
    let last_row = min(first_row + comptime!(tiles.queries()), num_rows) - 1;
    let start = bounds[first_row];
    let end = bounds[num_rows + last_row];
    let mut count = 0u32;
    if start < end {
        count = (end - start).div_ceil(comptime!(tiles.keys() as u32));
    }

    if warp >= comptime!(4 * tiles.warpgroups as u32) {
        registers_release(comptime!(tiles.copy_registers()));
        if UNIT_POS_X == comptime!(128 * tiles.warpgroups as u32) && count > 0 {
            let (query, key, value) = (tensor_map_address(query), tensor_map_address(key), tensor_map_address(value));
            let (head, batch) = (head as u32, batch as u32);
            let kv_head = head / group;
            barrier_expect(queries_here, comptime!(tiles.query_bytes() as u32));
            #[unroll]
            for part in 0..comptime!((tiles.head_dim / BOX) as u32) {
                #[unroll]
                for rows in 0..comptime!(tiles.warpgroups as u32) {
                    let to = queries_at + comptime!(part * (tiles.queries() * 128) as u32 + rows * 8192);
                    let row = first_row as u32 + comptime!(64 * rows);
                    copy_box(to, query, comptime!(part * BOX as u32), row, head, batch, queries_here);
                }
            }
            let mut at = 0u32;
            let mut parity = 1u32;
            for turn in 0..count {
                let row = start + (count - 1 - turn) * comptime!(tiles.keys() as u32);
                barrier_wait(keys_done + 8 * at, parity);
                barrier_expect(keys_here + 8 * at, stage);
                #[unroll]
                for part in 0..comptime!((tiles.head_dim / BOX) as u32) {
                    let to = keys_at + at * stage + comptime!(part * (tiles.keys() * 128) as u32);
                    copy_box(to, key, comptime!(part * BOX as u32), row, kv_head, batch, keys_here + 8 * at);
                }
                barrier_wait(values_done + 8 * at, parity);
                barrier_expect(values_here + 8 * at, stage);
                #[unroll]
                for part in 0..comptime!((tiles.head_dim / BOX) as u32) {
                    let to = values_at + at * stage + comptime!(part * (tiles.keys() * 128) as u32);
                    copy_box(to, value, comptime!(part * BOX as u32), row, kv_head, batch, values_here + 8 * at);
                }
                at += 1;
                if at == comptime!(tiles.stages as u32) {
                    at = 0u32;
                    parity ^= 1u32;
                }
            }
        }
    } else {
        registers_take(comptime!(tiles.compute_registers()));
        let warpgroup = warp / 4;
        let products = comptime!(tiles.products());
        let len = comptime!(tiles.head_dim / 2);
        let c = scale * LOG2_E;
        let first_own = first_row + (warpgroup * 64) as usize;
        let own_row = first_own + (warp % 4 * 16 + lane / 4) as usize;
        let own_key = lane % 4 * 2;
        let mut rows =
            Rows { m: Array::new(2usize), l: Array::new(2usize), lo: Array::new(2usize), hi: Array::new(2usize) };
        let mut initial = Sequence::<f32>::new();
        #[unroll]
        for half in 0..2usize {
            let row = min(own_row + 8 * half, num_rows - 1);
            rows.lo[half] = bounds[row];
            rows.hi[half] = bounds[num_rows + row];
            rows.m[half] = HIDDEN;
            rows.l[half] = 0.0f32;
            if comptime!(has_previous) {
                let before = previous_lse[row_offset(previous_lse, batch, head, row)];
                if before > HIDDEN {
                    rows.m[half] = before / scale;
                    // Sums are added up over a row's four lanes at the end, so one lane alone has the 1.
                    rows.l[half] = select(lane % 4 == 0, 1.0f32, 0.0f32);
                }
            }
        }
        #[unroll]
        for i in 0..len {
            if comptime!(has_previous) {
                let row = min(own_row + comptime!(i / 2 % 2 * 8), num_rows - 1);
                let column = own_key as usize + comptime!(i / 4 * 8 + i % 2);
                let base = head_offset(previous_out, batch, head);
                initial.push(previous_out[base + row * previous_out.stride(2) + column * previous_out.stride(3)]);
            } else {
                initial.push(0.0f32.runtime());
            }
        }
        let mut o = vector::<f32, O>(&initial);

        // The warpgroup's own rows see all of a tile's keys from `full_from` to `full_to`.
        let last_own = min(first_own + 63, num_rows - 1);
        let (full_from, full_to) = (bounds[last_own], bounds[num_rows + min(first_own, num_rows - 1)]);
        let query = descriptor(queries_at + warpgroup * 8192, 16u32);
        let keys = descriptor(keys_at, 16u32);
        let values = descriptor(values_at, comptime!((tiles.keys() * 128) as u32));
        let step = comptime!(tiles.stage_bytes() as u32 >> 4);
        let own_turn = 1 + warpgroup;
        let next_turn = 1 + (warpgroup + 1) % comptime!(tiles.warpgroups as u32);

        if count > 0 {
            barrier_wait(queries_here, 0u32);
            barrier_wait(keys_here, 0u32);
            let s = scores(query, keys, products);
            if lane == 0 {
                barrier_arrive(keys_done);
            }
            let mut first_key = start + (count - 1) * comptime!(tiles.keys() as u32);
            let is_full = first_key >= full_from && first_key + comptime!(tiles.keys() as u32) <= full_to;
            let weights = softmax(s, &mut rows, c, is_full, first_key + own_key);
            o = rescale::<O>(o, &weights.shrink, len);
            let mut p = round(weights.p, comptime!(tiles.half));
            if warpgroup == comptime!(tiles.warpgroups as u32 - 1) {
                turn_give(1u32, 256u32);
            }
            let mut at = 0u32;
            let mut parity = 0u32;
            let mut keys_at = 1u32;
            let mut keys_parity = 0u32;
            for _turn in 1..count {
                barrier_wait(keys_here + 8 * keys_at, keys_parity);
                barrier_wait(values_here + 8 * at, parity);
                turn_take(own_turn, 256u32);
                let both = scores_and_accumulate::<O>(
                    o,
                    p,
                    query,
                    keys + keys_at * step,
                    values + at * step,
                    next_turn,
                    products,
                );
                if lane == 0 {
                    barrier_arrive(keys_done + 8 * keys_at);
                }
                let mut lower = Sequence::<f32>::new();
                let mut upper = Sequence::<f32>::new();
                #[unroll]
                for i in 0..64usize {
                    lower.push(both.extract(i));
                }
                #[unroll]
                for i in 0..len {
                    upper.push(both.extract(64 + i));
                }
                first_key -= comptime!(tiles.keys() as u32);
                let is_full = first_key >= full_from && first_key + comptime!(tiles.keys() as u32) <= full_to;
                let weights = softmax(vector::<f32, Const<64>>(&lower), &mut rows, c, is_full, first_key + own_key);
                let done = finish::<O>(vector::<f32, O>(&upper), products);
                if lane == 0 {
                    barrier_arrive(values_done + 8 * at);
                }
                o = rescale::<O>(done, &weights.shrink, len);
                p = round(weights.p, comptime!(tiles.half));
                at += 1;
                if at == comptime!(tiles.stages as u32) {
                    at = 0u32;
                    parity ^= 1u32;
                }
                keys_at += 1;
                if keys_at == comptime!(tiles.stages as u32) {
                    keys_at = 0u32;
                    keys_parity ^= 1u32;
                }
            }
            barrier_wait(values_here + 8 * at, parity);
            o = accumulate::<O>(o, p, values + at * step, products);
        }

        let pairs = comptime!(tiles.head_dim / 2);
        #[unroll]
        for half in 0..2usize {
            let mut sum = rows.l[half];
            sum += plane_shuffle_xor(sum, 1u32);
            sum += plane_shuffle_xor(sum, 2u32);
            let row = own_row + 8 * half;
            let is_empty = sum == 0.0f32;
            let divisor = select(is_empty, 1.0f32, sum);
            let factor = select(is_empty, 0.0f32, 1.0f32 / divisor);
            if row < num_rows {
                if lane % 4 == 0 {
                    lse[plane * num_rows + row] = select(is_empty, nothing, rows.m[half] * scale + divisor.ln());
                }
                let base = (plane * num_rows + row) * pairs + lane as usize % 4;
                #[unroll]
                for i in 0..comptime!(tiles.head_dim / 8) {
                    let mut pair = Sequence::<f32>::new();
                    pair.push(o.extract(4 * i + 2 * half) * factor);
                    pair.push(o.extract(4 * i + 2 * half + 1) * factor);
                    out[base + 4 * i] = vector::<f32, Const<2>>(&pair);
                }
            }
        }
    }
}
