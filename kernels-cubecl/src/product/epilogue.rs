//! From sums in registers to C: box by box through shared memory, and on by copies that nobody waits for. What lies
//! outside C the copying unit leaves alone.

use super::problem::Store;
use super::shape::{BOX_BYTES, ProductTiles, TILE};
use crate::hopper::ptx::{
    add_matrix_box, publish_shared, store_matrix_box, stores_commit, stores_wait_read, turn_take, value,
};
use cubecl::prelude::*;
use std::fmt::Write;

impl ProductTiles {
    /// Text that puts box `part` of the sums into shared memory. Registers: 128 sums, then the address that this
    /// unit writes to. A row of a box has eight groups of 16 bytes; row `r` keeps group `g` at `g xor r % 8`.
    fn stage_text(&self, part: u32) -> String {
        let first = part * self.box_columns() / 8;
        match self.store {
            Store::Half => self.stage_half_text(first),
            Store::F32 | Store::AddF32 => stage_f32_text(first),
        }
    }

    /// Eight blocks of eight columns from block `first` on, two at a time.
    fn stage_half_text(&self, first: u32) -> String {
        let name = self.half.name();
        let mut text = String::from(".reg .b32 at, r0, r1, r2, r3;\n");
        for pair in 0..4 {
            let sum = 4 * (first + 2 * pair);
            for i in 0..4 {
                let (low, high) = (sum + 2 * i, sum + 2 * i + 1);
                writeln!(text, "cvt.rn.{name}x2.f32 r{i}, %{high}, %{low};").expect("a string");
            }
            writeln!(text, "xor.b32 at, %128, {};", 32 * pair).expect("a string");
            text += "stmatrix.sync.aligned.m8n8.x4.shared.b16 [at], {r0, r1, r2, r3};\n";
        }
        text
    }
}

/// Four blocks of eight columns from block `first` on, each of the unit's two rows.
fn stage_f32_text(first: u32) -> String {
    let mut text = String::from(".reg .b32 at;\n");
    for block in 0..4 {
        let sum = 4 * (first + block);
        writeln!(text, "xor.b32 at, %128, {};", 32 * block).expect("a string");
        writeln!(text, "st.shared.v2.f32 [at], {{%{sum}, %{}}};", sum + 1).expect("a string");
        writeln!(text, "st.shared.v2.f32 [at+1024], {{%{}, %{}}};", sum + 2, sum + 3).expect("a string");
    }
    text
}

#[cube]
fn stage(sums: Vector<f32, Const<128>>, address: u32, #[comptime] part: u32, #[comptime] tiles: ProductTiles) {
    gpu_asm!(
        "{{", "{text}", "// {s} {a}", "}}",
        text = const tiles.stage_text(part), s = in(_) value::<Vector<f32, Const<128>>>(sums),
        a = in(_) value::<u32>(address)
    );
}

/// Where in a box this unit writes the first of its sums: for `stmatrix` one row of the warp's 16 and one of two
/// blocks of columns, for f32 its own row and columns.
#[cube]
pub(super) fn own_place(warp: u32, lane: u32, #[comptime] tiles: ProductTiles) -> u32 {
    let first = warp % 4 * 16;
    if comptime!(tiles.store == Store::Half) {
        (first + lane % 16) * 128 + (((lane / 16) ^ (lane % 8)) << 4u32)
    } else {
        (first + lane / 4) * 128 + (((lane % 4 / 2) ^ (lane / 4)) << 4u32) + lane % 2 * 8
    }
}

/// Starts to store a warpgroup's 64 rows and 256 columns of C at `row` and `column`, or to add them. `boxes` is the
/// address of the warpgroup's two boxes in shared memory, which are filled in turn: one is copied while the other is
/// written. `place` is [`own_place`].
#[cube]
pub(super) fn store_sums(
    sums: Vector<f32, Const<128>>,
    c: u64,
    boxes: u32,
    place: u32,
    row: u32,
    column: u32,
    warpgroup: u32,
    #[comptime] tiles: ProductTiles,
) {
    let leads = UNIT_POS_X % 128 == 0;
    #[unroll]
    for part in 0..comptime!(TILE / tiles.box_columns()) {
        let from = boxes + comptime!(part % 2 * BOX_BYTES);
        if leads {
            stores_wait_read(1u32);
        }
        turn_take(1 + warpgroup, 128u32);
        stage(sums, from + place, part, tiles);
        publish_shared();
        turn_take(1 + warpgroup, 128u32);
        if leads {
            let at = column + comptime!(part * tiles.box_columns());
            if comptime!(tiles.store == Store::AddF32) {
                add_matrix_box(from, c, at, row);
            } else {
                store_matrix_box(from, c, at, row);
            }
            stores_commit();
        }
    }
}
