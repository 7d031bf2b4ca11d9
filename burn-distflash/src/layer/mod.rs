//! What a Llama layer does between its products and its attention.

mod autodiff;
mod composed;
#[cfg(feature = "cube")]
mod cube;
mod op;

pub use op::LayerOps;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

/// RMSNorm (Zhang & Sennrich, arXiv 1910.07467): `x / √(mean(x²) + epsilon) · weight` over the last dimension,
/// differentiable in both. Arithmetic is f32 and rounded once; backward reads `x` and one number a row.
///
/// # Shapes
/// - `x`, result: `[…, width]`
/// - `weight`: `[width]`, in the dtype of `x`
///
/// # Panics
/// If the widths differ.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_distflash::rms_norm;
///
/// let device = Device::flex();
/// let normed = rms_norm(Tensor::<2>::from_floats([[3., 4.]], &device), Tensor::ones([2], &device), 0.);
/// let [a, b] = normed.into_data().try_into_vec::<f32>().unwrap().try_into().unwrap();
/// assert!((a * a + b * b - 2.).abs() < 1e-6);
/// ```
#[must_use]
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    let (dims, [width]) = (x.dims(), weight.dims());
    assert_eq!(dims[D - 1], width, "width of x {dims:?} and of a weight of {width}");
    if dims.contains(&0) {
        // Reshaping nothing is not always possible, and there is nothing to normalise; the weight still gets a gradient.
        return x * weight.unsqueeze();
    }
    let rows: Tensor<2> = x.reshape([dims[..D - 1].iter().product::<usize>(), width]);
    let (normed, _) = Dispatch::rms_norm(rows.into_dispatch(), weight.into_dispatch(), epsilon);
    Tensor::<2>::from_dispatch(normed).reshape(dims)
}

/// SwiGLU between the products of an MLP (Shazeer, arXiv 2002.05202): `silu(gate) ∘ up`, `silu(x) = x / (1 + exp(−x))`,
/// differentiable in both. Arithmetic is f32 and rounded once; backward reads the two operands and nothing else.
///
/// # Panics
/// If shapes differ.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_distflash::swiglu;
///
/// let device = Device::flex();
/// let out = swiglu(Tensor::<1>::from_floats([0., 20.], &device), Tensor::from_floats([7., 3.], &device));
/// assert_eq!(out.into_data().try_into_vec::<f32>().unwrap(), [0., 60.]);
/// ```
#[must_use]
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    assert_eq!(gate.dims(), up.dims(), "shapes of gate and up");
    Tensor::from_dispatch(Dispatch::swiglu(gate.into_dispatch(), up.into_dispatch()))
}

/// Rotary embedding (Su et al., arXiv 2104.09864) of all heads, in Hugging Face's rotate-half form: element `i` of a head is
/// paired with element `i + head_dim / 2`, and the pair turned by an angle of its token. Arithmetic is f32 and rounded
/// once; backward turns back.
///
/// # Shapes
/// - `x`, result: `[batch, len, heads · head_dim]`
/// - `cos`, `sin`: `[len, head_dim / 2]`, in f32, or in f64 where `x` is; constants
///
/// # Panics
/// If shapes or dtypes do not fit.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_distflash::rotate;
///
/// let device = Device::flex();
/// let x = Tensor::<3>::from_floats([[[1., 2.]]], &device);
/// let quarter = [Tensor::from_floats([[0.]], &device), Tensor::from_floats([[1.]], &device)];
/// assert_eq!(rotate(x, quarter).into_data().try_into_vec::<f32>().unwrap(), [-2., 1.]);
/// ```
#[must_use]
pub fn rotate(x: Tensor<3>, [cos, sin]: [Tensor<2>; 2]) -> Tensor<3> {
    let ([_, len, width], [rows, half]) = (x.dims(), cos.dims());
    assert_eq!([rows, half], sin.dims(), "shapes of cos and sin");
    assert_eq!(len, rows, "tokens of x and of the tables");
    assert!(half > 0 && width.is_multiple_of(2 * half), "heads of {} in a width of {width}", 2 * half);
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    assert!(cos.dtype() == wide && sin.dtype() == wide, "tables for {:?} are {wide:?}", x.dtype());
    if x.dims().contains(&0) {
        return x;
    }
    let [x, cos, sin] = [x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch()];
    Tensor::from_dispatch(Dispatch::rotate(x, cos, sin, false))
}
