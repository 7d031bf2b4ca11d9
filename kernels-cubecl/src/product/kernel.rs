//! The kernel.

use super::blocks::walk_blocks;
use super::epilogue::{own_place, store_sums};
use super::order::place;
use super::shape::{BLOCK, BOX_BYTES, ProductTiles, RESULT_BYTES, SHARE, SHARE_BYTES, STAGE_BYTES, TILE};
use crate::hopper::ptx::{
    barrier_expect, barrier_init, barrier_init_fence, barrier_wait, cluster_barrier, copy_matrix_box,
    copy_matrix_box_to_both, registers_release, registers_take, shared_address, stores_wait, warp,
};
use crate::hopper::wgmma::{BOX, descriptor};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Addresses in a cube's shared memory.
#[derive(CubeType)]
struct Memory {
    /// Stages, each a share of A and two of B.
    operands: u32,
    /// Boxes on their way to C.
    results: u32,
    /// A barrier a stage: its copies are complete.
    filled: u32,
    /// A barrier a stage: both cubes have done with it.
    free: u32,
}

/// A cluster's tiles.
#[derive(CubeType)]
struct Walk {
    first: u32,
    step: u32,
    count: u32,
    /// Of tiles in C.
    rows: u32,
    columns: u32,
    /// Along k.
    blocks: u32,
}

/// What distinguishes the copies of A from those of B.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Copies {
    along_k: bool,
    /// Whether the other cube needs the same.
    to_both: bool,
}

/// Bytes between the boxes of 64 columns that an operand lies in, for its descriptor: where rows run along k a block
/// is one box wide.
fn box_distance(along_k: bool) -> u32 {
    if along_k { 16 } else { BOX_BYTES }
}

#[cube]
fn copy_box(to: u32, map: u64, column: u32, row: u32, barrier: u32, #[comptime] copies: Copies) {
    if comptime!(copies.to_both) {
        copy_matrix_box_to_both(to, map, column, row, barrier);
    } else {
        copy_matrix_box(to, map, column, row, barrier);
    }
}

/// Copies one block of a share, the rows of A or columns of B from `from` on, from `k` on.
#[cube]
fn copy_share(to: u32, map: u64, from: u32, k: u32, barrier: u32, #[comptime] copies: Copies) {
    if comptime!(copies.along_k) {
        copy_box(to, map, k, from, barrier, copies);
    } else {
        copy_box(to, map, from, k, barrier, copies);
        copy_box(to + BOX_BYTES, map, from + comptime!(BOX as u32), k, barrier, copies);
    }
}

/// What one unit does: all copies of cube `rank` of the cluster.
#[cube]
fn copy_operands(a: u64, b: u64, memory: &Memory, walk: &Walk, rank: u32, #[comptime] tiles: ProductTiles) {
    let mut stage = 0u32;
    let mut parity = 1u32;
    for turn in 0..walk.count {
        let place = place(walk.first + turn * walk.step, walk.rows, walk.columns, comptime!(tiles.band));
        let row = place.row * TILE + rank * SHARE;
        let column = place.column * TILE + rank * SHARE;
        for block in 0..walk.blocks {
            let k = block * BLOCK;
            let left = memory.operands + stage * STAGE_BYTES;
            let right = left + SHARE_BYTES + rank * SHARE_BYTES;
            let filled = memory.filled + 8 * stage;
            barrier_wait(memory.free + 8 * stage, parity);
            // The other cube's copies count here, too, and zeros for what lies outside a matrix.
            barrier_expect(filled, STAGE_BYTES);
            copy_share(left, a, row, k, filled, comptime!(Copies { along_k: tiles.a_along_k, to_both: false }));
            copy_share(right, b, column, k, filled, comptime!(Copies { along_k: tiles.b_along_k, to_both: true }));
            stage += 1;
            if stage == comptime!(tiles.stages) {
                stage = 0u32;
                parity ^= 1u32;
            }
        }
    }
}

/// What a warpgroup does: 64 rows of every tile.
#[cube]
fn multiply(c: u64, memory: &Memory, walk: &Walk, rank: u32, warp: u32, #[comptime] tiles: ProductTiles) {
    let lane = UNIT_POS_X % 32;
    let warpgroup = warp / 4;
    let left = descriptor(memory.operands + warpgroup * BOX_BYTES, comptime!(box_distance(tiles.a_along_k)));
    let right = descriptor(memory.operands + SHARE_BYTES, comptime!(box_distance(tiles.b_along_k)));
    let boxes = memory.results + warpgroup * comptime!(2 * BOX_BYTES);
    let own_place = own_place(warp, lane, tiles);
    let mut stage = 0u32;
    let mut parity = 0u32;
    for turn in 0..walk.count {
        let place = place(walk.first + turn * walk.step, walk.rows, walk.columns, comptime!(tiles.band));
        let row = place.row * TILE + rank * SHARE + warpgroup * comptime!(SHARE / 2);
        let column = place.column * TILE;
        let sums = walk_blocks(left, right, memory.filled, stage, parity, walk.blocks, lane, tiles);
        let next = stage + walk.blocks;
        parity ^= (next / comptime!(tiles.stages)) & 1u32;
        stage = next % comptime!(tiles.stages);
        store_sums(sums, c, boxes, own_place, row, column, warpgroup, tiles);
    }
    // What the last stores read must stay until they have.
    if UNIT_POS_X % 128 == 0 {
        stores_wait();
    }
}

/// `C = A · B` in clusters of two cubes, over `rows` by `columns` tiles of C and `blocks` blocks along k.
///
/// Any even number of cubes computes all tiles. Warpgroups 0 and 1 of a cube multiply, one unit of the third copies.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_1d(2))]
pub(crate) fn matrix_product<E: Float, S: Float>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    c: &TensorMap<S, Tiled>,
    rows: u32,
    columns: u32,
    blocks: u32,
    #[comptime] tiles: ProductTiles,
    #[define(E)] _operands: ElemType,
    #[define(S)] _results: ElemType,
) {
    let shared: Shared<[u32]> = Shared::new_aligned_slice(comptime!(tiles.shared_bytes() / 4), 1024usize);
    let operands = shared_address::<u32>(shared.as_ptr());
    let results = operands + comptime!(tiles.stages * STAGE_BYTES);
    let filled = results + RESULT_BYTES;
    let free = filled + comptime!(8 * tiles.stages);
    let memory = Memory { operands, results, filled, free };

    let warp = warp();
    let rank = CUBE_POS_X % 2;
    let (first, step) = (CUBE_POS_X / 2, CUBE_COUNT_X / 2);
    let count = (rows * columns + step - 1 - first) / step;
    let walk = Walk { first, step, count, rows, columns, blocks };

    if UNIT_POS_X == 0 {
        #[unroll]
        for stage in 0..comptime!(tiles.stages) {
            barrier_init(memory.filled + 8 * stage, 1u32);
            // The warps that multiply, of both cubes.
            barrier_init(memory.free + 8 * stage, 16u32);
        }
        barrier_init_fence();
    }
    sync_cube();
    cluster_barrier();

    if warp >= 8 {
        registers_release(40u32);
        if UNIT_POS_X == 256 {
            copy_operands(tensor_map_address(a), tensor_map_address(b), &memory, &walk, rank, tiles);
        }
    } else {
        registers_take(232u32);
        multiply(tensor_map_address(c), &memory, &walk, rank, warp, tiles);
    }
    // No cube leaves while the other one may still write to its shared memory or arrive at its barriers.
    cluster_barrier();
}
