//! The loop along k of one tile, as one block of asm: the sums never leave the products' hands, so that the assembler
//! has nothing to move or to serialise.

use super::shape::{BLOCK, ProductTiles, STAGE_BYTES};
use crate::hopper::ptx::value;
use crate::hopper::wgmma::{DESCRIPTOR_HIGH, registers};
use cubecl::prelude::*;
use std::fmt::Write;

/// Columns, or rows, of an operand that one product takes along k.
const STEP: u32 = 16;

impl ProductTiles {
    /// The products of one block. In descriptors, which count in 16 bytes, one step along k is 32 bytes of a row
    /// where rows run along k, and 16 rows where they do not.
    fn products_text(&self) -> String {
        let (half, sums) = (self.half.name(), registers(0, 128));
        let advance = |along_k| if along_k { STEP * 2 / 16 } else { STEP * 128 / 16 };
        let [a, b] = [self.a_along_k, self.b_along_k].map(advance);
        let [a_turned, b_turned] = [self.a_along_k, self.b_along_k].map(|along_k| u8::from(!along_k));
        let mut text = String::new();
        for step in 0..BLOCK / STEP {
            let keep = if step == 0 { "keep" } else { "yes" };
            let (a, b) = (a * step, b * step);
            write!(
                text,
                "add.u32 low, left, {a};
                mov.b64 a, {{low, {DESCRIPTOR_HIGH}}};
                add.u32 low, right, {b};
                mov.b64 b, {{low, {DESCRIPTOR_HIGH}}};
                wgmma.mma_async.sync.aligned.m64n256k16.f32.{half}.{half} {sums}, a, b, {keep}, 1, 1, {a_turned}, {b_turned};
                "
            )
            .expect("a string");
        }
        text
    }

    /// Registers: 128 sums, then the inputs of [`walk_blocks`] in order.
    ///
    /// A block's products run beside those of the block before: only when those are complete is their stage given
    /// back, to both cubes, as the other one copies to it, too. Lane 0 of every warp tells one cube, lane 1 the other.
    /// The arrival releases nothing that was written, so it takes no `.release.cluster`, which would put a fence of
    /// the whole GPU into the loop.
    fn loop_text(&self) -> String {
        let (stages, barriers, stage_step) = (self.stages, 8 * self.stages, STAGE_BYTES / 16);
        let products = self.products_text();
        let [left, right, filled, stage, parity, count, lane] =
            [128, 129, 130, 131, 132, 133, 134].map(|i| format!("%{i}"));
        format!(
            ".reg .pred yes, keep, more, tells, tell;
            .reg .b32 low, block, stage, parity, filled, free, before, left, right;
            .reg .b64 a, b;
            setp.eq.u32 yes, 0, 0;
            mov.u32 block, 0;
            mov.u32 stage, {stage};
            mov.u32 parity, {parity};
            mov.u32 before, 0;
            add.u32 free, {filled}, {barriers};
            setp.lt.u32 tells, {lane}, 2;
            and.b32 low, {lane}, 1;
            mapa.shared::cluster.u32 free, free, low;
            NEXT:
            shl.b32 low, stage, 3;
            add.u32 filled, {filled}, low;
            AGAIN:
            mbarrier.try_wait.parity.shared::cta.b64 more, [filled], parity;
            @!more bra AGAIN;
            mad.lo.u32 left, stage, {stage_step}, {left};
            mad.lo.u32 right, stage, {stage_step}, {right};
            setp.ne.u32 keep, block, 0;
            wgmma.fence.sync.aligned;
            {products}
            wgmma.commit_group.sync.aligned;
            wgmma.wait_group.sync.aligned 1;
            setp.ne.and.u32 tell, block, 0, tells;
            @tell mbarrier.arrive.shared::cluster.b64 _, [before];
            shl.b32 low, stage, 3;
            add.u32 before, free, low;
            add.u32 stage, stage, 1;
            setp.eq.u32 more, stage, {stages};
            @more mov.u32 stage, 0;
            @more xor.b32 parity, parity, 1;
            add.u32 block, block, 1;
            setp.lt.u32 more, block, {count};
            @more bra NEXT;
            wgmma.wait_group.sync.aligned 0;
            @tells mbarrier.arrive.shared::cluster.b64 _, [before];
            "
        )
    }
}

/// A warpgroup's 64 rows and 256 columns of `A · B`, over `count` blocks along k, of which the first is in `stage` and
/// its barrier in phase `parity`. `left` and `right` are the operands' descriptors in the first stage, `filled` the
/// first of the barriers that say a stage is; those that say it is free follow.
#[cube]
pub(super) fn walk_blocks(
    left: u32,
    right: u32,
    filled: u32,
    stage: u32,
    parity: u32,
    count: u32,
    lane: u32,
    #[comptime] tiles: ProductTiles,
) -> Vector<f32, Const<128>> {
    let sums: Vector<f32, Const<128>>;
    gpu_asm!(
        "{{", "{text}", "// {o} {a} {b} {f} {s} {p} {c} {l}", "}}",
        text = const tiles.loop_text(), o = out(_) sums, a = in(_) value::<u32>(left), b = in(_) value::<u32>(right),
        f = in(_) value::<u32>(filled), s = in(_) value::<u32>(stage), p = in(_) value::<u32>(parity),
        c = in(_) value::<u32>(count), l = in(_) value::<u32>(lane)
    );
    sums
}
