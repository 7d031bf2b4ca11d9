//! Matrix products: what a result may be off by.

use burn::tensor::{DType, TensorData};

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
