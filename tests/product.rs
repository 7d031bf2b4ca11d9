//! The matrix product for Hopper GPUs against the f64 truth, below Burn: its tensors are memory of the GPU.
//!
//! What runs on the GPU is ignored, as few machines have a Hopper: there, run the suite with `--include-ignored`.

use burn::tensor::DType;
use distflash_kernels::Refusal;
use distflash_kernels::product::{Operand, ProductProblem, ProductTensors, ProductTiles, Store, Target, launch};
use distflash_tests::gpu::{Gpu, elem_type, view};
use distflash_tests::{Draw, Expected, assert_is_product, decode, encode};
use rstest::rstest;

const STORES: [Store; 3] = [Store::Half, Store::F32, Store::AddF32];

/// A matrix in memory that is wider and taller than it, full of NaN but for the matrix.
struct Framed {
    dims: [usize; 2],
    row_stride: usize,
    dtype: DType,
    memory: Vec<u8>,
}

impl Framed {
    /// Rows before the matrix, and after it.
    const MARGIN: usize = 2;

    /// A matrix of `values`, or of NaN, whose rows are at least `gap` elements apart.
    fn new(dims: [usize; 2], gap: usize, dtype: DType, values: Option<&[f32]>) -> Self {
        let row_stride = dims[1].next_multiple_of(8) + gap;
        let mut framed = vec![f32::NAN; (dims[0] + 2 * Self::MARGIN) * row_stride];
        for (row, values) in values.iter().flat_map(|values| values.chunks(dims[1])).enumerate() {
            framed[(row + Self::MARGIN) * row_stride..][..dims[1]].copy_from_slice(values);
        }
        Self { dims, row_stride, dtype, memory: encode(framed, dtype) }
    }

    fn start(&self) -> usize {
        Self::MARGIN * self.row_stride * self.dtype.size()
    }

    /// The matrix in `memory`, after the proof that nothing else in it has changed.
    fn values(&self, memory: Vec<u8>) -> Vec<f32> {
        let (size, columns) = (self.dtype.size(), self.dims[1]);
        let is_inside = |at: usize| {
            let (row, column) = (at / self.row_stride, at % self.row_stride);
            (Self::MARGIN..Self::MARGIN + self.dims[0]).contains(&row) && column < columns
        };
        for (at, (after, before)) in memory.chunks(size).zip(self.memory.chunks(size)).enumerate() {
            assert!(is_inside(at) || after == before, "{:?}: element {at} of its memory was written", self.dims);
        }
        let values = decode(memory, self.dtype);
        (0..values.len()).filter(|&at| is_inside(at)).map(|at| values[at]).collect()
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    transposed: [bool; 2],
    dtype: DType,
    gap: usize,
}

impl Case {
    /// Checks the result, in every way to store it that `stores` names.
    fn check(&self, stores: &[Store]) {
        let Self { m, n, k, dtype, .. } = *self;
        let mut draw = Draw::new((m * 31 + n * 17 + k) as u64);
        let mut drawn = |len| decode(encode(draw.uniform(len, 1.), dtype), dtype);
        let (a, b, c) = (drawn(m * k), drawn(k * n), drawn(m * n));
        // Rows of both, so that sums walk memory in order.
        let columns = transpose(&b, [k, n]);
        let element = |at: usize| {
            let (left, right) = (&a[at / n * k..][..k], &columns[at % n * k..][..k]);
            Expected::sum(left.iter().copied().zip(right.iter().copied()))
        };
        let product: Vec<Expected> = (0..m * n).map(element).collect();
        let added: Vec<Expected> = product.iter().zip(&c).map(|(sum, &initial)| sum.plus(initial)).collect();
        for &store in stores {
            let (to, initial, expected) = match store {
                Store::Half => (dtype, None, &product),
                Store::F32 => (DType::F32, None, &product),
                Store::AddF32 => (DType::F32, Some(&c), &added),
            };
            let actual = self.run(&a, &b, initial, store);
            assert_is_product(&format!("{self:?}, {store:?}"), &actual, expected, k, to);
        }
    }

    fn run(&self, a: &[f32], b: &[f32], c: Option<&Vec<f32>>, store: Store) -> Vec<f32> {
        let Self { m, n, k, transposed, dtype, gap } = *self;
        let operand = |values: &[f32], [rows, columns]: [usize; 2], is_transposed| {
            if is_transposed {
                Framed::new([columns, rows], gap, dtype, Some(&transpose(values, [rows, columns])))
            } else {
                Framed::new([rows, columns], gap, dtype, Some(values))
            }
        };
        let (a, b) = (operand(a, [m, k], transposed[0]), operand(b, [k, n], transposed[1]));
        let to = if store == Store::Half { dtype } else { DType::F32 };
        let c = Framed::new([m, n], gap, to, c.map(Vec::as_slice));
        let problem = ProductProblem {
            m,
            n,
            k,
            dtype: elem_type(dtype),
            a: Operand { transposed: transposed[0], row_stride: a.row_stride },
            b: Operand { transposed: transposed[1], row_stride: b.row_stride },
            c: Target { store, row_stride: c.row_stride },
        };
        let gpu = Gpu::first();
        let handles = [&a, &b, &c].map(|matrix| gpu.put(&matrix.memory));
        let [a, b, c_view] = [(&a, &handles[0]), (&b, &handles[1]), (&c, &handles[2])]
            .map(|(matrix, handle)| view(handle, matrix.start(), matrix.dims, matrix.row_stride));
        launch(gpu.client(), &problem, ProductTensors { a, b, c: c_view }).expect("a problem that fits");
        c.values(gpu.get(&handles[2]))
    }
}

fn transpose(values: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    (0..rows * columns).map(|at| values[at % rows * columns + at / rows]).collect()
}

/// Below, at and above the sizes of tiles, blocks and boxes; rows and sums of lengths that are no multiple of anything.
#[rstest]
#[ignore = "needs a Hopper GPU: --include-ignored"]
fn every_form_and_store_is_exact(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(
        (1, 8, 1), (1, 304, 64), (8, 8, 8), (3, 16, 7), (64, 136, 64), (136, 64, 328), (256, 256, 256),
        (328, 264, 136), (257, 264, 65), (520, 1000, 136), (136, 328, 1000)
    )]
    (m, n, k): (usize, usize, usize),
) {
    for transposed in [[false, false], [false, true], [true, false], [true, true]] {
        Case { m, n, k, transposed, dtype, gap: 0 }.check(&STORES);
    }
}

#[rstest]
#[ignore = "needs a Hopper GPU: --include-ignored"]
fn rows_may_be_further_apart_than_they_are_long(#[values(8, 72)] gap: usize) {
    for transposed in [[false, false], [false, true], [true, false]] {
        Case { m: 264, n: 304, k: 200, transposed, dtype: DType::BF16, gap }.check(&STORES);
    }
}

/// 90 tiles in two bands: clusters take several, and stages carry over from one to the next.
#[rstest]
#[ignore = "needs a Hopper GPU: --include-ignored"]
fn more_tiles_than_clusters_are_exact(#[values(40, 328)] k: usize) {
    for transposed in [[false, false], [false, true], [true, false]] {
        Case { m: 2100, n: 2312, k, transposed, dtype: DType::BF16, gap: 0 }.check(&STORES);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: --include-ignored"]
fn the_same_inputs_give_the_same_bits() {
    let case = Case { m: 600, n: 520, k: 328, transposed: [true, false], dtype: DType::BF16, gap: 0 };
    let mut draw = Draw::new(1);
    let [a, b, c] = [600 * 328, 328 * 520, 600 * 520].map(|len| draw.uniform(len, 1.));
    for store in STORES {
        let run = || case.run(&a, &b, (store == Store::AddF32).then_some(&c), store);
        assert_eq!(run(), run(), "{store:?}");
    }
}

#[test]
#[ignore = "needs a Hopper GPU: --include-ignored"]
fn offsets_beyond_two_billion_elements_are_exact() {
    let (m, n, k, dtype) = (65_544, 32_776, 64, DType::BF16);
    let mut draw = Draw::new(2);
    let mut drawn = |len| encode(draw.uniform(len, 1.), dtype);
    let (a, b) = (drawn(m * k), drawn(k * n));
    let gpu = Gpu::first();
    let [a_handle, b_handle] = [&a, &b].map(|bytes| gpu.put(bytes));
    let (a, b) = (decode(a, dtype), decode(b, dtype));
    for (store, to) in [(Store::Half, dtype), (Store::F32, DType::F32)] {
        let problem = ProductProblem {
            m,
            n,
            k,
            dtype: elem_type(dtype),
            a: Operand { transposed: false, row_stride: k },
            b: Operand { transposed: false, row_stride: n },
            c: Target { store, row_stride: n },
        };
        let c = gpu.reserve(m * n * to.size());
        let tensors = ProductTensors {
            a: view(&a_handle, 0, [m, k], k),
            b: view(&b_handle, 0, [k, n], n),
            c: view(&c, 0, [m, n], n),
        };
        launch(gpu.client(), &problem, tensors).expect("a problem that fits");
        for row in [0, m - 1] {
            let start = row * n * to.size();
            let actual = decode(gpu.get_part(&c, start..start + n * to.size()), to);
            let element = |column| Expected::sum((0..k).map(|i| (a[row * k + i], b[i * n + column])));
            let expected: Vec<Expected> = (0..n).map(element).collect();
            assert_is_product(&format!("row {row}, {store:?}"), &actual, &expected, k, to);
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: --include-ignored"]
fn a_start_between_multiples_of_16_bytes_is_refused() {
    let (gpu, problem) = (Gpu::first(), square());
    let memory = gpu.put(&[0; 64 * 64 * 2 + 16]);
    let at = |start| view(&memory, start, [64, 64], 64);
    let refused = launch(gpu.client(), &problem, ProductTensors { a: at(0), b: at(8), c: at(16) });
    assert_eq!(refused, Err(Refusal::Misaligned { matrix: "B", what: "start", bytes: 8 }));
}

#[test]
#[should_panic(expected = "element 24 of its memory was written")]
fn a_frame_notices_what_is_written_outside() {
    let framed = Framed::new([3, 5], 0, DType::BF16, None);
    let mut memory = framed.memory.clone();
    // The first row of the matrix has elements 16 to 20, the second one 24 to 28.
    memory[2 * 16..2 * 21].fill(1);
    assert!(framed.values(memory.clone())[..5].iter().all(|x| x.is_finite()));
    let narrow = Framed { dims: [1, 5], ..framed };
    memory[2 * 24] = 1;
    let _ = narrow.values(memory);
}

#[rstest]
#[case::none(0..0)]
#[should_panic(expected = "off by")]
#[case::the_last(999..1000)]
fn the_bound_notices_a_product_left_out(#[case] left_out: std::ops::Range<usize>) {
    let mut draw = Draw::new(4);
    let products: Vec<(f32, f32)> = draw.uniform(1000, 1.).into_iter().zip(draw.uniform(1000, 1.)).collect();
    let kept = products.iter().enumerate().filter(|(at, _)| !left_out.contains(at)).map(|(_, &product)| product);
    let (actual, expected) = (Expected::sum(kept).naive, Expected::sum(products.iter().copied()));
    assert_is_product("a sum", &[actual], &[expected], 1000, DType::F32);
}

/// 64×64 by 64×64 in bf16.
fn square() -> ProductProblem {
    let operand = Operand { transposed: false, row_stride: 64 };
    let c = Target { store: Store::Half, row_stride: 64 };
    ProductProblem { m: 64, n: 64, k: 64, dtype: elem_type(DType::BF16), a: operand, b: operand, c }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    assert_eq!(square().validate(), Ok(()));
    let of = |row_stride| Operand { transposed: false, row_stride };
    let to = |store, row_stride| Target { store, row_stride };
    for (problem, what) in [
        (ProductProblem { dtype: elem_type(DType::F32), ..square() }, "neither f16 nor bf16"),
        (ProductProblem { m: 0, ..square() }, "the product of [0, 64] by [64, 64] is empty"),
        (ProductProblem { n: 0, ..square() }, "the product of [64, 64] by [64, 0] is empty"),
        (ProductProblem { k: 0, ..square() }, "the product of [64, 0] by [0, 64] is empty"),
        (ProductProblem { m: 1 << 31, ..square() }, "m is 2147483648; the product takes at most 2147483392"),
        (ProductProblem { a: of(68), ..square() }, "the row stride of A is 136 bytes; expected a multiple of 16"),
        (ProductProblem { b: of(56), ..square() }, "rows of B are 56 elements apart; expected 64 to"),
        (ProductProblem { b: of(1 << 39), ..square() }, "rows of B are 549755813888 elements apart; expected 64 to"),
        (ProductProblem { c: to(Store::Half, 68), ..square() }, "the row stride of C is 136 bytes"),
        (ProductProblem { c: to(Store::F32, 66), ..square() }, "the row stride of C is 264 bytes"),
        (ProductProblem { n: 60, ..square() }, "the row length of C is 120 bytes"),
        (ProductProblem { n: 62, c: to(Store::F32, 64), ..square() }, "the row length of C is 248 bytes"),
        (ProductProblem { k: 72, a: of(72), ..square() }, ""),
        (ProductProblem { c: to(Store::AddF32, 68), ..square() }, ""),
    ] {
        let refused = problem.validate().map_or_else(|refusal| refusal.to_string(), |()| String::new());
        assert!(refused.contains(what) && refused.is_empty() == what.is_empty(), "{problem:?}: {refused:?}");
    }
}

#[test]
fn a_transposed_operand_has_rows_of_its_own_length() {
    let wide = ProductProblem { m: 128, a: Operand { transposed: true, row_stride: 64 }, ..square() };
    let refused = wide.validate().expect_err("rows of 128 elements, 64 apart");
    assert!(matches!(refused, Refusal::RowStride { matrix: "A", row_stride: 64, least: 128, .. }), "{refused}");
    let one_row = ProductProblem { m: 1, a: Operand { transposed: false, row_stride: 3 }, ..square() };
    assert_eq!(one_row.validate(), Ok(()), "the stride of a single row is never taken");
}

#[cfg(feature = "cpu")]
#[test]
fn a_device_that_is_no_hopper_is_refused() {
    let client = cubecl::Device::Cpu(Default::default()).client();
    let refused = ProductTiles::select(&client, &square()).expect_err("a CPU");
    assert!(refused.to_string().contains("not ptx_sm90"), "{refused}");
}
