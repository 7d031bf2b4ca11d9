//! Matrix products of a warpgroup, `wgmma.mma_async.m64nNk16`: their text, and the functions around it.
//!
//! A warpgroup is 128 units; a product gives it 64 rows by N columns of f32, of which unit `t` holds rows
//! `16 · (t / 32) + t % 32 / 4` and that plus 8, columns `8 i + 2 (t % 4)` and the next: element `4 i + 2 h + c`
//! of its vector is row half `h`, column `c` of block `i`. Rounded to 16 bits in pairs, the same registers are
//! the left operand of another product.
//!
//! Operands in shared memory lie in boxes of 64 columns, 128 bytes a row, swizzled by TMA. A descriptor's high
//! word is the same for all of them; the low word holds the address and, for transposed operands, the distance
//! of boxes.

use super::ptx::value;
use crate::problem::Refusal;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use std::fmt::Write;

/// What 16-bit float the operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE half precision.
    F16,
    /// Brain float.
    BF16,
}

impl Half {
    /// The one that `dtype` is.
    ///
    /// # Errors
    /// If it is neither.
    pub(crate) fn of(dtype: ElemType) -> Result<Self, Refusal> {
        match dtype {
            ElemType::Float(FloatKind::F16) => Ok(Half::F16),
            ElemType::Float(FloatKind::BF16) => Ok(Half::BF16),
            other => Err(Refusal::Hopper(format!("operands are {other:?}, neither f16 nor bf16"))),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Half::F16 => "f16",
            Half::BF16 => "bf16",
        }
    }
}

/// Elements of a row in one box.
pub(crate) const BOX: usize = 64;
/// Distance of groups of eight rows, 1024 bytes, and the 128-byte swizzle.
pub(crate) const DESCRIPTOR_HIGH: u32 = (1024 >> 4) | (1 << 30);

/// Low word of the descriptor of an operand at a shared address; `boxes` is the distance of its boxes in bytes.
#[cube]
pub(crate) fn descriptor(address: u32, #[comptime] boxes: u32) -> u32 {
    ((address & 0x3ffff_u32) >> 4u32) | comptime!((boxes >> 4) << 16)
}

/// Text of asm blocks. Registers are numbered, results first.
struct Text(String);

impl Text {
    /// Begins by moving `count` accumulators from register `from` on to the results, register `to` on: the
    /// assembler makes them one.
    fn begin(moves: &[(usize, usize, usize)]) -> Self {
        let mut text = Self(String::new());
        for &(to, from, count) in moves {
            for i in 0..count {
                text.line(format_args!("mov.b32 %{}, %{};", to + i, from + i));
            }
        }
        text.line(format_args!(".reg .pred yes, no;\n.reg .b32 low;\n.reg .b64 left, right;"));
        text.line(format_args!("setp.eq.u32 yes, 0, 0;\nsetp.ne.u32 no, 0, 0;\nwgmma.fence.sync.aligned;"));
        text
    }

    fn line(&mut self, line: std::fmt::Arguments) {
        writeln!(self.0, "{line}").expect("a string");
    }

    fn descriptor(&mut self, name: &str, low: usize, offset: usize) {
        self.line(format_args!("add.u32 low, %{low}, {offset};\nmov.b64 {name}, {{low, {DESCRIPTOR_HIGH}}};"));
    }

    /// `steps` products of two operands in shared memory along their rows, 16 columns a step; `negative` gives
    /// minus their sum.
    fn scores(&mut self, at: usize, n: usize, steps: usize, low: [usize; 2], rows: [usize; 2], kind: (Half, bool)) {
        let (half, sign) = (kind.0.name(), if kind.1 { -1 } else { 1 });
        for step in 0..steps {
            for (name, low, rows) in [("left", low[0], rows[0]), ("right", low[1], rows[1])] {
                self.descriptor(name, low, step / 4 * rows * 8 + step % 4 * 2);
            }
            let (sums, keep) = (registers(at, n / 2), if step == 0 { "no" } else { "yes" });
            self.line(format_args!(
                "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{half}.{half} {sums}, left, right, {keep}, {sign}, 1, 0, 0;"
            ));
        }
    }

    /// `steps` products of registers, four a step, by an operand in shared memory along its columns.
    fn accumulate(&mut self, at: usize, n: usize, steps: usize, left: usize, low: usize, half: Half) {
        let half = half.name();
        for step in 0..steps {
            self.descriptor("right", low, step * 128);
            let (sums, left) = (registers(at, n / 2), registers(left + 4 * step, 4));
            self.line(format_args!(
                "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{half}.{half} {sums}, {left}, right, yes, 1, 1, 1;"
            ));
        }
    }

    fn commit(&mut self) {
        self.line(format_args!("wgmma.commit_group.sync.aligned;"));
    }

    /// Waits until at most `left` groups are in flight.
    fn wait(&mut self, left: usize) {
        self.line(format_args!("wgmma.wait_group.sync.aligned {left};"));
    }
}

/// A list of consecutive ones.
pub(crate) fn registers(from: usize, count: usize) -> String {
    let names: Vec<String> = (from..from + count).map(|i| format!("%{i}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// Compile-time shape of the products of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Products {
    /// Elements of one head's vector.
    pub head_dim: usize,
    /// Queries in shared memory.
    pub queries: usize,
    /// Keys in shared memory, 128 for the size of the vectors below.
    pub keys: usize,
    /// Of the operands.
    pub half: Half,
    /// Whether scores are minus the products.
    pub negative: bool,
}

impl Products {
    /// Registers that a unit's part of the result takes.
    pub(super) fn results(&self) -> usize {
        self.head_dim / 2
    }

    fn scores_text(&self) -> String {
        let mut text = Text::begin(&[]);
        text.scores(0, self.keys, self.head_dim / 16, [64, 65], [self.queries, self.keys], (self.half, self.negative));
        text.commit();
        text.wait(0);
        text.0
    }

    fn accumulate_text(&self) -> String {
        let results = self.results();
        let mut text = Text::begin(&[(0, results, results)]);
        text.accumulate(0, self.head_dim, self.keys / 16, 2 * results, 2 * results + 32, self.half);
        text.commit();
        text.wait(0);
        text.0
    }

    fn both_text(&self) -> String {
        let results = self.results();
        // Inputs: results, 32 weights, query, key, value, turn.
        let (inputs, weights) = (128, 128 + results);
        let [query, key, value, turn] = [0, 1, 2, 3].map(|i| weights + 32 + i);
        let mut text = Text::begin(&[(64, inputs, results)]);
        let rows = [self.queries, self.keys];
        text.scores(0, self.keys, self.head_dim / 16, [query, key], rows, (self.half, self.negative));
        text.commit();
        text.accumulate(64, self.head_dim, self.keys / 16, weights, value, self.half);
        text.commit();
        text.line(format_args!("bar.arrive %{turn}, 256;"));
        text.wait(1);
        // Elements that a narrow head leaves over.
        for unused in 64 + results..128 {
            text.line(format_args!("mov.b32 %{unused}, 0;"));
        }
        text.0
    }
}

fn round_text(half: Half, count: usize) -> String {
    let name = half.name();
    (0..count).map(|i| format!("cvt.rn.{name}x2.f32 %{i}, %{}, %{};\n", count + 2 * i + 1, count + 2 * i)).collect()
}

/// Scores of 64 queries with 128 keys.
#[cube]
pub(super) fn scores(query: u32, key: u32, #[comptime] products: Products) -> Vector<f32, Const<64>> {
    let s: Vector<f32, Const<64>>;
    gpu_asm!(
        "{{", "{text}", "// {s} {q} {k}", "}}",
        text = const products.scores_text(), s = out(_) s, q = in(_) value::<u32>(query), k = in(_) value::<u32>(key)
    );
    s
}

/// `o + weights · value`.
#[cube]
pub(super) fn accumulate<O: Size>(
    o: Vector<f32, O>,
    weights: Vector<u32, Const<32>>,
    values: u32,
    #[comptime] products: Products,
) -> Vector<f32, O> {
    let sum: Vector<f32, O>;
    gpu_asm!(
        "{{", "{text}", "// {s} {o} {w} {v}", "}}",
        text = const products.accumulate_text(), s = out(_) sum, o = in(_) value::<Vector<f32, O>>(o),
        w = in(_) value::<Vector<u32, Const<32>>>(weights), v = in(_) value::<u32>(values)
    );
    sum
}

/// The next tile's scores, complete, in the lower half; in the upper half `o + weights · value`, still in
/// flight. Gives the turn to issue products to whoever waits at barrier `turn`.
#[cube]
pub(super) fn scores_and_accumulate<O: Size>(
    o: Vector<f32, O>,
    weights: Vector<u32, Const<32>>,
    query: u32,
    key: u32,
    values: u32,
    turn: u32,
    #[comptime] products: Products,
) -> Vector<f32, Const<128>> {
    let both: Vector<f32, Const<128>>;
    gpu_asm!(
        "{{", "{text}", "// {b} {o} {w} {q} {k} {v} {t}", "}}",
        text = const products.both_text(), b = out(_) both, o = in(_) value::<Vector<f32, O>>(o),
        w = in(_) value::<Vector<u32, Const<32>>>(weights), q = in(_) value::<u32>(query), k = in(_) value::<u32>(key),
        v = in(_) value::<u32>(values), t = in(_) value::<u32>(turn)
    );
    both
}

/// `o`, when it is no longer in flight.
#[cube]
pub(super) fn finish<O: Size>(o: Vector<f32, O>, #[comptime] products: Products) -> Vector<f32, O> {
    let done: Vector<f32, O>;
    gpu_asm!(
        "{{", "{text}", "// {d} {o}", "}}",
        text = const wait_text(products.results()), d = out(_) done, o = in(_) value::<Vector<f32, O>>(o)
    );
    done
}

/// Weights as the left operand of a product. One volatile block, so that it stays behind the wait for the
/// product that reads the weights before: ptxas would serialise all products otherwise (C7513).
#[cube]
pub(super) fn round(weights: Vector<f32, Const<64>>, #[comptime] half: Half) -> Vector<u32, Const<32>> {
    let rounded: Vector<u32, Const<32>>;
    gpu_asm!(
        "{{", "{text}", "// {r} {w}", "}}",
        text = const round_text(half, 32), r = out(_) rounded, w = in(_) value::<Vector<f32, Const<64>>>(weights), options(nomem)
    );
    rounded
}

/// Compile-time shape of the products of the backward pass: operands of `stay` rows that stay by operands of 64
/// rows that are walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientProducts {
    /// Elements of one head's vector.
    pub head_dim: usize,
    /// Rows that stay in shared memory.
    pub stay: usize,
    /// Of the operands.
    pub half: Half,
    /// Whether scores are minus the products.
    pub negative: bool,
}

impl GradientProducts {
    fn scores_text(&self) -> String {
        let mut text = Text::begin(&[]);
        let (steps, rows) = (self.head_dim / 16, [self.stay, 64]);
        text.scores(0, 64, steps, [64, 65], rows, (self.half, self.negative));
        text.commit();
        text.scores(32, 64, steps, [66, 67], rows, (self.half, false));
        text.commit();
        text.wait(1);
        text.0
    }

    fn accumulate_text(&self) -> String {
        let results = self.head_dim / 2;
        let mut text = Text::begin(&[(0, results, results)]);
        text.accumulate(0, self.head_dim, 4, 2 * results, 2 * results + 16, self.half);
        text.commit();
        text.0
    }
}

fn wait_text(count: usize) -> String {
    let mut text = String::from("wgmma.wait_group.sync.aligned 0;\n");
    for i in 0..count {
        writeln!(text, "mov.b32 %{i}, %{};", count + i).expect("a string");
    }
    text
}

/// Two products of 64×64 along rows: `stay · walked`, complete, in the lower half; in the upper half the other
/// pair's, still in flight.
#[cube]
pub(super) fn two_scores(
    stay: u32,
    walked: u32,
    other_stay: u32,
    other_walked: u32,
    #[comptime] products: GradientProducts,
) -> Vector<f32, Const<64>> {
    let both: Vector<f32, Const<64>>;
    gpu_asm!(
        "{{", "{text}", "// {r} {a} {b} {c} {d}", "}}",
        text = const products.scores_text(), r = out(_) both, a = in(_) value::<u32>(stay), b = in(_) value::<u32>(walked),
        c = in(_) value::<u32>(other_stay), d = in(_) value::<u32>(other_walked)
    );
    both
}

/// `sum + weights · walked`, in flight.
#[cube]
pub(super) fn start_accumulate<O: Size>(
    sum: Vector<f32, O>,
    weights: Vector<u32, Const<16>>,
    walked: u32,
    #[comptime] products: GradientProducts,
) -> Vector<f32, O> {
    let next: Vector<f32, O>;
    gpu_asm!(
        "{{", "{text}", "// {n} {s} {w} {b}", "}}",
        text = const products.accumulate_text(), n = out(_) next, s = in(_) value::<Vector<f32, O>>(sum),
        w = in(_) value::<Vector<u32, Const<16>>>(weights), b = in(_) value::<u32>(walked)
    );
    next
}

/// `x`, when no product is in flight.
#[cube]
pub(super) fn wait(x: Vector<f32, Const<32>>) -> Vector<f32, Const<32>> {
    let done: Vector<f32, Const<32>>;
    gpu_asm!(
        "{{", "{text}", "// {d} {x}", "}}",
        text = const wait_text(32), d = out(_) done, x = in(_) value::<Vector<f32, Const<32>>>(x)
    );
    done
}

/// As [`round`], half as many.
#[cube]
pub(super) fn round_half(weights: Vector<f32, Const<32>>, #[comptime] half: Half) -> Vector<u32, Const<16>> {
    let rounded: Vector<u32, Const<16>>;
    gpu_asm!(
        "{{", "{text}", "// {r} {w}", "}}",
        text = const round_text(half, 16), r = out(_) rounded, w = in(_) value::<Vector<f32, Const<32>>>(weights), options(nomem)
    );
    rounded
}
