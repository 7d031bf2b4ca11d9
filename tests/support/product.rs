//! Matrix products on a GPU, below Burn: memory, views of it, and what a result may be off by.

use burn::tensor::{DType, TensorData};
use cubecl::Device;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::TensorBinding;
use cubecl::zspace::Tiling;
use std::ops::Range;

/// A piece of a GPU's memory.
pub use cubecl::server::Handle as Memory;

/// A GPU that holds memory and runs kernels.
#[derive(Clone)]
pub struct Gpu(Client);

impl Gpu {
    /// The first CUDA device.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn first() -> Self {
        Self(Device::Cuda(Default::default()).client())
    }

    /// What it calls itself.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.properties().identity.name
    }

    /// What launches kernels.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.0
    }

    /// `bytes` in its memory.
    #[must_use]
    pub fn put(&self, bytes: &[u8]) -> Memory {
        self.0.create_from_slice(bytes)
    }

    /// Memory that holds anything.
    #[must_use]
    pub fn reserve(&self, num_bytes: usize) -> Memory {
        self.0.empty(num_bytes)
    }

    /// What memory holds when all work is done.
    ///
    /// # Panics
    /// If work failed.
    #[must_use]
    pub fn get(&self, memory: &Memory) -> Vec<u8> {
        self.0.read_one(memory.clone()).expect("a device that works").to_vec()
    }

    /// As [`get`](Self::get), of some of its bytes.
    ///
    /// # Panics
    /// If work failed.
    #[must_use]
    pub fn get_part(&self, memory: &Memory, bytes: Range<usize>) -> Vec<u8> {
        let after = memory.size_in_used() - bytes.end as u64;
        self.get(&memory.clone().offset_start(bytes.start as u64).offset_end(after))
    }

    /// Waits until all work is done.
    ///
    /// # Panics
    /// If work failed.
    pub fn sync(&self) {
        cubecl::future::block_on(self.0.sync()).expect("a device that works");
    }
}

/// A matrix whose first element is `start` bytes into `memory`.
#[must_use]
pub fn view(memory: &Memory, start: usize, [rows, columns]: [usize; 2], row_stride: usize) -> TensorBinding {
    TensorBinding {
        handle: memory.clone().offset_start(start as u64).binding(),
        strides: [row_stride, 1].into(),
        shape: [rows, columns].into(),
        tiling: Tiling::UNTILED,
    }
}

/// As CubeCL names it.
///
/// # Panics
/// If `dtype` is none that products have.
#[must_use]
pub fn elem_type(dtype: DType) -> ElemType {
    match dtype {
        DType::F16 => FloatKind::F16.into(),
        DType::BF16 => FloatKind::BF16.into(),
        DType::F32 => FloatKind::F32.into(),
        other => panic!("{other:?}: expected F16, BF16 or F32"),
    }
}

/// `values` rounded to `dtype`, as memory has them.
#[must_use]
pub fn encode(values: Vec<f32>, dtype: DType) -> Vec<u8> {
    let len = values.len();
    TensorData::new(values, [len]).convert_dtype(dtype).as_bytes().to_vec()
}

/// What memory has, as numbers.
///
/// # Panics
/// If `bytes` are no whole elements.
#[must_use]
pub fn decode(bytes: Vec<u8>, dtype: DType) -> Vec<f32> {
    let len = bytes.len() / dtype.size();
    TensorData::from_bytes_vec(bytes, [len], dtype).convert::<f32>().try_into_vec().expect("f32")
}

/// An element of a result, exactly and naively, and the size of what it is the sum of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// In f64.
    pub exact: f64,
    /// Added up in f32, one product after the other, and rounded to the dtype of the result.
    pub naive: f32,
    /// Sum of the products without their signs.
    pub magnitude: f64,
}

impl Expected {
    /// The sum of `products`, of pairs of 16-bit numbers: their products are exact in f32.
    pub fn sum(products: impl Iterator<Item = (f32, f32)>) -> Self {
        let zero = Self { exact: 0., naive: 0., magnitude: 0. };
        products.fold(zero, |sum, (x, y)| {
            let product = f64::from(x) * f64::from(y);
            Self { exact: sum.exact + product, naive: sum.naive + x * y, magnitude: sum.magnitude + product.abs() }
        })
    }

    /// Added to what was there.
    #[must_use]
    pub fn plus(self, initial: f32) -> Self {
        Self { exact: self.exact + f64::from(initial), naive: self.naive + initial, ..self }
    }
}

/// Asserts that `actual`, elements of a product over `k` in `dtype`, are no further off than twice what the naive
/// run is, plus one rounding of the largest result to `dtype`, plus what the accumulator costs: one rounding of the
/// largest magnitude, and one of the largest result for every 16 products, after which matrix units cut off what the
/// naive run rounds.
///
/// # Panics
/// If any is.
pub fn assert_is_product(case: &str, actual: &[f32], expected: &[Expected], k: usize, dtype: DType) {
    assert_eq!(actual.len(), expected.len(), "sizes");
    let naive = decode(encode(expected.iter().map(|e| e.naive).collect(), dtype), dtype);
    let worst = |values: &[f32]| {
        let off = values.iter().zip(expected).map(|(&x, e)| (f64::from(x) - e.exact).abs());
        off.fold(0., |most: f64, off| if off.is_nan() { f64::INFINITY } else { most.max(off) })
    };
    let largest = |of: fn(&Expected) -> f64| expected.iter().map(of).fold(0., f64::max);
    let (result, magnitude) = (largest(|e| e.exact.abs()), largest(|e| e.magnitude));
    let rounding = dtype.finfo().expect("a float").epsilon;
    let accumulator = f64::from(f32::EPSILON) * (magnitude + k.div_ceil(16) as f64 * result);
    let bound = 2. * worst(&naive) + rounding * result + accumulator;
    let off = worst(actual);
    assert!(off <= bound, "{case}: off by {off:e}, bound {bound:e}, largest {result:e}");
}
