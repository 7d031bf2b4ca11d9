//! The PTX that CubeCL has no words for: one function an instruction, and nothing else.
//!
//! `gpu_asm!` allows one result, which may be a `Vector` of any power of two; it takes a mutable variable for
//! its address, hence [`value`]. Every operand must be named in the text.

use cubecl::prelude::*;

/// What `x` holds now.
#[cube]
#[allow(unused_variables, reason = "the intrinsic reads it")]
pub(crate) fn value<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| x.read_value(scope).into())
}

/// A vector of the elements of `parts`.
#[cube]
#[allow(unused_variables, reason = "the intrinsic reads it")]
pub(crate) fn vector<T: Scalar, N: Size>(parts: &Sequence<T>) -> Vector<T, N> {
    intrinsic!(|scope| {
        use cubecl::ir::dialect::vector::CompositeConstructOp;
        let values: Vec<_> = parts.iter_cloned().map(|part| part.read_value(scope)).collect();
        let ty = Vector::<T, N>::__expand_as_type(scope);
        let op = CompositeConstructOp::new(scope.ctx_mut(), ty, values);
        scope.register_with_result(&op).into()
    })
}

/// Address in the window of shared memory.
#[cube]
pub(crate) fn shared_address<T: CubePrimitive>(pointer: *const T) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 wide; cvta.to.shared.u64 wide, {p}; cvt.u32.u64 {a}, wide; }}",
        a = out(_) address, p = in(_) pointer, options(pure, nomem)
    );
    address
}

/// Two neighbours in shared memory. Not before what is written ahead of it: registers would run out.
#[cube]
pub(crate) fn load_pair(address: u32) -> Vector<f32, Const<2>> {
    let pair: Vector<f32, Const<2>>;
    gpu_asm!("ld.shared.v2.f32 {p}, [{a}];", p = out(_) pair, a = in(_) value::<u32>(address));
    pair
}

/// `2ˣ`, 0 for the most negative numbers.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) value::<f32>(x), options(pure, nomem));
    y
}

/// The number of this unit's warp, known to be the same in all its lanes.
#[cube]
pub(crate) fn warp() -> u32 {
    let number: u32;
    let own = UNIT_POS_X / 32;
    gpu_asm!("shfl.sync.idx.b32 {n}, {o}, 0, 0x1f, 0xffffffff;", n = out(_) number, o = in(_) value::<u32>(own), options(nomem));
    number
}

/// Makes a barrier in shared memory that `count` arrivals complete.
#[cube]
pub(crate) fn barrier_init(barrier: u32, #[comptime] count: u32) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{b}], {n};", b = in(_) value::<u32>(barrier), n = const count);
}

/// Makes new barriers known to the units that copy.
#[cube]
pub(crate) fn barrier_init_fence() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Arrives, and adds `bytes` to what must have been copied before the phase is complete.
#[cube]
pub(crate) fn barrier_expect(barrier: u32, #[comptime] bytes: u32) {
    gpu_asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};", b = in(_) value::<u32>(barrier), n = const bytes);
}

#[cube]
pub(crate) fn barrier_arrive(barrier: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{b}];", b = in(_) value::<u32>(barrier));
}

/// Waits for the end of the phase of this parity.
#[cube]
pub(crate) fn barrier_wait(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{",
        ".reg .pred complete;",
        "AGAIN:",
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [{b}], {p};",
        "@complete bra DONE;",
        "bra AGAIN;",
        "DONE:",
        "}}",
        b = in(_) value::<u32>(barrier), p = in(_) value::<u32>(parity)
    );
}

/// Waits at hardware barrier `id` for `units` to come or have [arrived](turn_give).
#[cube]
pub(crate) fn turn_take(id: u32, #[comptime] units: u32) {
    gpu_asm!("bar.sync {i}, {n};", i = in(_) value::<u32>(id), n = const units);
}

/// Arrives at hardware barrier `id` without waiting.
#[cube]
pub(crate) fn turn_give(id: u32, #[comptime] units: u32) {
    gpu_asm!("bar.arrive {i}, {n};", i = in(_) value::<u32>(id), n = const units);
}

/// Takes registers that others of the cube have released.
#[cube]
pub(crate) fn registers_take(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {n};", n = const count);
}

#[cube]
pub(crate) fn registers_release(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {n};", n = const count);
}

/// Starts the copy of the box of a 4-D tensor whose first element is at `column`, `row` of a head, to shared
/// memory; its bytes count on `barrier`. Elements that are not there arrive as zeros.
#[cube]
pub(crate) fn copy_box(to: u32, map: u64, column: u32, row: u32, head: u32, batch: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [{t}], [{m}, {{{c}, {r}, {h}, {b}}}], [{s}];",
        t = in(_) value::<u32>(to), m = in(_) value::<u64>(map), c = in(_) value::<u32>(column),
        r = in(_) value::<u32>(row), h = in(_) value::<u32>(head), b = in(_) value::<u32>(batch),
        s = in(_) value::<u32>(barrier)
    );
}

/// Starts the copy of a box of a matrix, as [`copy_box`].
#[cube]
pub(crate) fn copy_matrix_box(to: u32, map: u64, column: u32, row: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{t}], [{m}, {{{c}, {r}}}], [{s}];",
        t = in(_) value::<u32>(to), m = in(_) value::<u64>(map), c = in(_) value::<u32>(column),
        r = in(_) value::<u32>(row), s = in(_) value::<u32>(barrier)
    );
}

/// As [`copy_matrix_box`], to the same place in both cubes of a cluster of two; its bytes count on the barriers of
/// both.
#[cube]
pub(crate) fn copy_matrix_box_to_both(to: u32, map: u64, column: u32, row: u32, barrier: u32) {
    gpu_asm!(
        "{{ .reg .b16 both; mov.b16 both, 3; cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{t}], [{m}, {{{c}, {r}}}], [{s}], both; }}",
        t = in(_) value::<u32>(to), m = in(_) value::<u64>(map), c = in(_) value::<u32>(column),
        r = in(_) value::<u32>(row), s = in(_) value::<u32>(barrier)
    );
}

/// Starts to copy a box from shared memory to a matrix. What lies outside the matrix is not written.
#[cube]
pub(crate) fn store_matrix_box(from: u32, map: u64, column: u32, row: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{m}, {{{c}, {r}}}], [{f}];",
        m = in(_) value::<u64>(map), c = in(_) value::<u32>(column), r = in(_) value::<u32>(row),
        f = in(_) value::<u32>(from)
    );
}

/// As [`store_matrix_box`], adding to what the matrix holds.
#[cube]
pub(crate) fn add_matrix_box(from: u32, map: u64, column: u32, row: u32) {
    gpu_asm!(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [{m}, {{{c}, {r}}}], [{f}];",
        m = in(_) value::<u64>(map), c = in(_) value::<u32>(column), r = in(_) value::<u32>(row),
        f = in(_) value::<u32>(from)
    );
}

/// Makes one group of the stores that this unit has started.
#[cube]
pub(crate) fn stores_commit() {
    gpu_asm!("cp.async.bulk.commit_group;");
}

/// Waits until at most `left` of this unit's groups of stores still read shared memory.
#[cube]
pub(crate) fn stores_wait_read(#[comptime] left: u32) {
    gpu_asm!("cp.async.bulk.wait_group.read {n};", n = const left);
}

/// Waits until this unit's stores are complete.
#[cube]
pub(crate) fn stores_wait() {
    gpu_asm!("cp.async.bulk.wait_group 0;");
}

/// Waits for all units of the cluster. Lanes of a warp may come at different times.
#[cube]
pub(crate) fn cluster_barrier() {
    gpu_asm!("barrier.cluster.arrive.release;");
    gpu_asm!("barrier.cluster.wait.acquire;");
}

/// Makes what this unit wrote to shared memory visible to matrix products and to stores of boxes.
#[cube]
pub(crate) fn publish_shared() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Waits until no product is in flight.
#[cube]
pub(crate) fn products_wait() {
    gpu_asm!("wgmma.wait_group.sync.aligned 0;");
}

/// Stores four 8×8 matrices of 16-bit elements; lane `l` names the address of row `l % 8` of matrix `l / 8`.
#[cube]
pub(crate) fn store_matrices(address: u32, registers: Vector<u32, Const<4>>) {
    gpu_asm!(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{a}], {r};",
        a = in(_) value::<u32>(address), r = in(_) value::<Vector<u32, Const<4>>>(registers)
    );
}
