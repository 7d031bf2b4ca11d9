//! One attention problem with its inputs and its truth.

use crate::bound::{Results, Truth};
use crate::device::kernel_for;
use crate::draw::Draw;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_distflash::{AttentionOptions, Mask, RowIntervals};
use distflash_kernels::reference::{self, Dims};

/// Masks by name, so that a failing case says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is its own name")]
pub enum Masks {
    Causal,
    Full,
    Window,
    WindowBothSides,
    Documents,
    DocumentsFull,
    WindowedDocuments,
    Prefix,
    PrefixedDocuments,
    /// Some rows see nothing.
    Gaps,
}

impl Masks {
    /// All of them.
    pub const ALL: [Masks; 10] = [
        Masks::Causal,
        Masks::Full,
        Masks::Window,
        Masks::WindowBothSides,
        Masks::Documents,
        Masks::DocumentsFull,
        Masks::WindowedDocuments,
        Masks::Prefix,
        Masks::PrefixedDocuments,
        Masks::Gaps,
    ];

    /// The mask over `len` tokens.
    ///
    /// # Panics
    /// Never for the lengths tests use.
    #[must_use]
    pub fn build(self, len: usize) -> Mask {
        let window = len / 5 + 1;
        // Four documents, one of them empty.
        let cut = [0, len / 3, len / 3, len / 2 + 1, len].map(|at| at.min(len));
        let documents = |mask: Mask| mask.with_documents(&cut).expect("cuts in order");
        match self {
            Masks::Causal => Mask::causal(),
            Masks::Full => Mask::full(),
            Masks::Window => Mask::causal().with_window(window, 0).expect("not 0"),
            Masks::WindowBothSides => Mask::full().with_window(window, len / 7).expect("not 0"),
            Masks::Documents => documents(Mask::causal()),
            Masks::DocumentsFull => documents(Mask::full()),
            Masks::WindowedDocuments => documents(Mask::causal().with_window(window, 0).expect("not 0")),
            Masks::Prefix => Mask::causal().with_prefix(len / 4),
            Masks::PrefixedDocuments => documents(Mask::causal()).with_prefix(len / 6),
            Masks::Gaps => {
                // The middle eighth of the rows sees nothing; rows before it see the first half of the
                // keys causally, rows after it what follows.
                let (start, end) = (len / 2, len / 2 + len / 8);
                let keys = |row: usize| match row {
                    row if row < start => 0..row + 1,
                    row if row < end => start..start,
                    row => start..row + 1,
                };
                let bound =
                    |of: fn(std::ops::Range<usize>) -> usize| (0..len).map(|row| of(keys(row)) as u32).collect();
                let intervals = RowIntervals::new(bound(|keys| keys.start), bound(|keys| keys.end), len);
                Mask::explicit(intervals.expect("monotone"))
            }
        }
    }
}

/// Sizes, mask and inputs of one attention call, and of a gradient of its output.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Sizes.
    pub dims: Dims,
    /// What is asked for.
    pub options: AttentionOptions,
    /// Precision of the operands; the inputs are rounded to it.
    pub dtype: DType,
    /// Query, key, value and the gradient of the output, dense.
    pub inputs: [Vec<f32>; 4],
}

impl Problem {
    /// A problem with inputs drawn from a seed made of its sizes.
    #[must_use]
    pub fn draw(dims: Dims, mask: Mask, dtype: DType) -> Self {
        let Dims { batch, heads, kv_heads, num_rows, num_keys, head_dim } = dims;
        let (queries, keys) = (batch * heads * num_rows * head_dim, batch * kv_heads * num_keys * head_dim);
        let mut draw = Draw::new((queries * 31 + keys * 17 + head_dim) as u64);
        let inputs = [queries, keys, keys, queries].map(|len| round(draw.uniform(len, 2.), dtype));
        let options = AttentionOptions { kernel: kernel_for(head_dim, dtype), ..AttentionOptions::masked(mask) };
        Self { dims, options, dtype, inputs }
    }

    /// The factor on the logits.
    #[must_use]
    pub fn scale(&self) -> f64 {
        self.options.scale.unwrap_or(1. / (self.dims.head_dim as f64).sqrt())
    }

    /// The compiled mask.
    ///
    /// # Panics
    /// If it does not fit the lengths.
    #[must_use]
    pub fn intervals(&self) -> RowIntervals {
        self.options.mask.intervals(self.dims.num_rows, self.dims.num_keys).expect("a mask that fits")
    }

    /// Input `index` as a tensor on `device`, without gradients.
    #[must_use]
    pub fn tensor(&self, index: usize, device: &Device) -> Tensor<4> {
        let Dims { batch, heads, kv_heads, num_rows, num_keys, head_dim } = self.dims;
        let is_key = index == 1 || index == 2;
        let (heads, len) = if is_key { (kv_heads, num_keys) } else { (heads, num_rows) };
        let data = TensorData::new(self.inputs[index].clone(), [batch, heads, len, head_dim]);
        Tensor::from_data(data.convert_dtype(self.dtype), (device, self.dtype))
    }

    /// The truth, in f64 on the host.
    #[must_use]
    pub fn truth(&self) -> Truth {
        Truth { results: self.results(), magnitudes: self.magnitudes(), dtype: self.dtype }
    }

    fn results(&self) -> Results {
        let [q, k, v, g] = self.inputs_f64();
        let (mask, scale) = (self.intervals(), self.scale());
        let output = reference::forward(self.dims, &q, &k, &v, &mask, scale);
        let grads = reference::backward(self.dims, &q, &k, &v, &g, &mask, scale);
        Results { out: output.out, lse: output.lse, d_query: grads.query, d_key: grads.key, d_value: grads.value }
    }

    /// The size of what each result is the sum of: rounding errors are in proportion to it, and not to
    /// results that may cancel.
    fn magnitudes(&self) -> [f64; 5] {
        let [q, k, v, g] = self.inputs_f64();
        let (mask, scale) = (self.intervals(), self.scale());
        let lse = largest(&reference::forward(self.dims, &q, &k, &v, &mask, scale).lse);
        let sizes = reference::backward_magnitudes(self.dims, &q, &k, &v, &g, &mask, scale);
        // A softmax's weights add up to 1 but carry the rounding of their logits, of about lse's size.
        [largest(&v) * (1. + lse), lse, largest(&sizes.query), largest(&sizes.key), largest(&sizes.value)]
    }

    fn inputs_f64(&self) -> [Vec<f64>; 4] {
        self.inputs.each_ref().map(|x| x.iter().map(|&x| f64::from(x)).collect())
    }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().filter(|x| x.is_finite()).fold(0., |most: f64, x| most.max(x.abs()))
}

fn round(values: Vec<f32>, dtype: DType) -> Vec<f32> {
    let len = values.len();
    TensorData::new(values, [len]).convert_dtype(dtype).convert::<f32>().try_into_vec::<f32>().expect("f32")
}
