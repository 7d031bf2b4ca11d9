//! RMSNorm: a cube normalises a row after the other.

use super::{UNITS, cubes, vector_size};
use crate::problem::Refusal;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// Vectors of a row that a unit holds in registers, at most.
const HELD: usize = 8;
/// Cubes that sum the weight's gradient, each its own rows, at most: some for each multiprocessor of a large GPU.
const SUMMING: usize = 528;

/// What a norm reads and writes.
#[derive(Clone, Debug)]
pub struct NormTensors {
    /// `[rows, width]`.
    pub x: TensorBinding,
    /// `[width]`, in the dtype of `x`.
    pub weight: TensorBinding,
    /// What each row is multiplied by, `[rows]` in f32: written forward, read backward.
    pub scale: TensorBinding,
}

/// Why rows of `width` cannot be normalised on `client`: they are too long for the registers of a cube, or units are
/// threads of a CPU, which would wait for each other ten times a row.
#[must_use]
pub fn norm_refusal(client: &Client, dtype: ElemType, width: usize) -> Option<Refusal> {
    if client.properties().hardware.num_cpu_cores.is_some() {
        return Some(Refusal::CpuNorm);
    }
    let most = UNITS as usize * HELD * vector_size(dtype, &[width]);
    (width > most).then_some(Refusal::WideNorm { width, most })
}

fn held(dtype: ElemType, width: usize) -> usize {
    (width / vector_size(dtype, &[width])).div_ceil(UNITS as usize)
}

/// The sum over the cube's units, to all of them. `shared` holds one number of each.
#[cube]
fn cube_sum(value: f32, shared: &mut Shared<[f32]>) -> f32 {
    let unit = UNIT_POS as usize;
    // Who is late may still be reading the last sum.
    sync_cube();
    shared[unit] = value;
    sync_cube();
    let mut half = comptime!(UNITS as usize / 2).runtime();
    while half > 0 {
        if unit < half {
            let other = shared[unit + half];
            shared[unit] += other;
        }
        sync_cube();
        half /= 2;
    }
    shared[0]
}

#[cube]
fn vector_sum<N: Size>(value: Vector<f32, N>) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..value.vector_size() {
        sum += value.extract(i);
    }
    sum
}

#[cube(launch, address_type = "dynamic")]
fn normalise<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    out: &mut Tensor<Vector<E, N>>,
    scale: &mut Tensor<f32>,
    width: f32,
    epsilon: f32,
    #[comptime] held: usize,
    #[define(E)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let (vectors, rows) = (weight.len(), scale.len());
    let unit = UNIT_POS as usize;
    let mut values = Array::<Vector<f32, N>>::new(held);
    let mut row = CUBE_POS;
    while row < rows {
        let mut sum = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for i in 0..held {
            let at = unit + i * comptime!(UNITS as usize);
            if at < vectors {
                let value = Vector::<f32, N>::cast_from(x[row * vectors + at]);
                values[i] = value;
                sum += value * value;
            }
        }
        let total = cube_sum(vector_sum::<N>(sum), &mut shared);
        let by = (total / width + epsilon).inverse_sqrt();
        #[unroll]
        for i in 0..held {
            let at = unit + i * comptime!(UNITS as usize);
            if at < vectors {
                let gamma = Vector::<f32, N>::cast_from(weight[at]);
                out[row * vectors + at] = Vector::cast_from(values[i] * Vector::new(by) * gamma);
            }
        }
        if unit == 0 {
            scale[row] = by;
        }
        row += CUBE_COUNT;
    }
}

#[cube(launch, address_type = "dynamic")]
fn norm_gradients<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    scale: &Tensor<f32>,
    d_out: &Tensor<Vector<E, N>>,
    d_x: &mut Tensor<Vector<E, N>>,
    d_weights: &mut Tensor<Vector<f32, N>>,
    width: f32,
    #[comptime] held: usize,
    #[define(E)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(UNITS as usize));
    let (vectors, rows) = (weight.len(), scale.len());
    let unit = UNIT_POS as usize;
    let zero = Vector::<f32, N>::new(0.0f32);
    let mut normed = Array::<Vector<f32, N>>::new(held);
    let mut weighed = Array::<Vector<f32, N>>::new(held);
    let mut sums = Array::<Vector<f32, N>>::new(held);
    #[unroll]
    for i in 0..held {
        sums[i] = zero;
    }
    let mut row = CUBE_POS;
    while row < rows {
        let by = scale[row];
        let mut product = zero;
        #[unroll]
        for i in 0..held {
            let at = unit + i * comptime!(UNITS as usize);
            if at < vectors {
                let value = Vector::<f32, N>::cast_from(x[row * vectors + at]) * Vector::new(by);
                let d = Vector::<f32, N>::cast_from(d_out[row * vectors + at]);
                let grad = d * Vector::<f32, N>::cast_from(weight[at]);
                normed[i] = value;
                weighed[i] = grad;
                sums[i] += d * value;
                product += grad * value;
            }
        }
        let mean = cube_sum(vector_sum::<N>(product), &mut shared) / width;
        #[unroll]
        for i in 0..held {
            let at = unit + i * comptime!(UNITS as usize);
            if at < vectors {
                let grad = (weighed[i] - normed[i] * Vector::new(mean)) * Vector::new(by);
                d_x[row * vectors + at] = Vector::cast_from(grad);
            }
        }
        row += CUBE_COUNT;
    }
    #[unroll]
    for i in 0..held {
        let at = unit + i * comptime!(UNITS as usize);
        if at < vectors {
            d_weights[CUBE_POS * vectors + at] = sums[i];
        }
    }
}

/// One unit a column, in the order of the rows: the same bits in every run.
#[cube(launch, address_type = "dynamic")]
fn sum_rows<E: Float>(parts: &Tensor<f32>, sums: &mut Tensor<E>, rows: usize, #[define(E)] _dtype: ElemType) {
    if ABSOLUTE_POS >= sums.len() {
        terminate!();
    }
    let mut sum = 0.0f32;
    for row in 0..rows {
        sum += parts[row * sums.len() + ABSOLUTE_POS];
    }
    sums[ABSOLUTE_POS] = E::cast_from(sum);
}

/// `out = x · scale · weight`, `scale = 1 / √(mean(x²) + epsilon)` of each row; `out` is written.
///
/// # Panics
/// If the device cannot ([`norm_refusal`]).
pub fn rms_norm(
    client: &Client,
    tensors: NormTensors,
    out: TensorBinding,
    epsilon: f32,
    dtype: ElemType,
    address_type: AddressType,
) {
    let [rows, width] = [out.shape[0], out.shape[1]];
    if rows * width == 0 {
        return;
    }
    assert!(norm_refusal(client, dtype, width).is_none(), "rows of {width} on this device");
    normalise::launch(
        client,
        CubeCount::Static(rows.min(16 * SUMMING) as u32, 1, 1),
        CubeDim::new_1d(UNITS),
        address_type,
        vector_size(dtype, &[width]),
        tensors.x.into_tensor_arg(),
        tensors.weight.into_tensor_arg(),
        out.into_tensor_arg(),
        tensors.scale.into_tensor_arg(),
        width as f32,
        epsilon,
        held(dtype, width),
        dtype,
    );
}

/// Rows of the buffer that [`rms_norm_backward`] sums the weight's gradient in.
#[must_use]
pub fn summing_rows(rows: usize) -> usize {
    rows.min(SUMMING)
}

/// Gradients of [`rms_norm`]: with `n = x · scale` and `g = d_out · weight`, `d_x = scale · (g − n · mean(g · n))` of each
/// row, and `d_weight = Σ d_out · n` over rows. `d_x` and `d_weight` are written, and `parts`, f32
/// `[`[`summing_rows`]`, width]`.
///
/// # Panics
/// If the device cannot ([`norm_refusal`]).
pub fn rms_norm_backward(
    client: &Client,
    tensors: NormTensors,
    d_out: TensorBinding,
    parts: TensorBinding,
    [d_x, d_weight]: [TensorBinding; 2],
    dtype: ElemType,
    address_type: AddressType,
) {
    let [rows, width] = [d_x.shape[0], d_x.shape[1]];
    assert!(norm_refusal(client, dtype, width).is_none(), "rows of {width} on this device");
    let cubes_of_rows = summing_rows(rows);
    if rows * width > 0 {
        norm_gradients::launch(
            client,
            CubeCount::Static(cubes_of_rows as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            address_type,
            vector_size(dtype, &[width]),
            tensors.x.into_tensor_arg(),
            tensors.weight.into_tensor_arg(),
            tensors.scale.into_tensor_arg(),
            d_out.into_tensor_arg(),
            d_x.into_tensor_arg(),
            parts.clone().into_tensor_arg(),
            width as f32,
            held(dtype, width),
            dtype,
        );
    }
    sum_rows::launch(
        client,
        cubes(client, width),
        CubeDim::new_1d(UNITS),
        address_type,
        parts.into_tensor_arg(),
        d_weight.into_tensor_arg(),
        cubes_of_rows,
        dtype,
    );
}
