//! Linear layers on this project's matrix product.

#[cfg(feature = "cube")]
mod cube;
mod op;

pub use op::{LinearProduct, ProductForm};

use burn::backend::Dispatch;
use burn::tensor::module::linear as burns_linear;
use burn::tensor::{DType, Tensor};

/// `x · weight`, differentiable in both.
///
/// In f16 and bf16 on a Hopper GPU by this project's kernel, which is as fast as cuBLAS; everywhere else, and
/// for sizes that the kernel does not take (rows that are no multiple of 16 bytes), by Burn's own product. Sums are f32
/// either way.
///
/// # Shapes
/// - `x`: `[…, inputs]`
/// - `weight`: `[inputs, outputs]`, as Burn's `Linear` has it
/// - result: `[…, outputs]`
///
/// # Panics
/// If the inputs do not match.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_distflash::linear;
///
/// let x = Tensor::<3>::ones([2, 5, 4], &Device::flex());
/// let weight = Tensor::<2>::ones([4, 3], &Device::flex());
/// assert_eq!(linear(x, weight).dims(), [2, 5, 3]);
/// ```
#[must_use]
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>) -> Tensor<D> {
    let (dims, [inputs, outputs]) = (x.dims(), weight.dims());
    assert_eq!(dims[D - 1], inputs, "inputs of x {dims:?} and of a weight of {inputs} by {outputs}");
    let is_16_bit = matches!(x.dtype(), DType::F16 | DType::BF16);
    // Reshaping nothing is not always possible, and Burn's product knows what to do.
    if D < 2 || !is_16_bit || dims.contains(&0) {
        return burns_linear(x, weight, None);
    }
    let rows: Tensor<2> = x.reshape([dims[..D - 1].iter().product::<usize>(), inputs]);
    let products = Dispatch::linear_product(rows.into_dispatch(), weight.into_dispatch());
    let mut dims = dims;
    dims[D - 1] = outputs;
    Tensor::<2>::from_dispatch(products).reshape(dims)
}
