//! Products on CubeCL runtimes: by this project's kernel where it is made for them.

use super::op::{LinearProduct, ProductForm, burns_product};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

impl LinearProduct for CubeBackend {
    fn matrix_product(a: CubeTensor, b: CubeTensor, form: ProductForm) -> CubeTensor {
        #[cfg(feature = "cuda")]
        if let Some(problem) = hopper::problem(&a, &b, form) {
            return hopper::product(a, b, problem);
        }
        burns_product::<Self>(a, b, form)
    }
}

#[cfg(feature = "cuda")]
mod hopper {
    use super::ProductForm;
    use crate::attention::has_aligned_rows;
    use burn::backend::TensorMetadata;
    use burn::backend::cubecl::dtype_to_elem_type;
    use burn_cubecl::kernel::into_contiguous;
    use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
    use burn_cubecl::tensor::CubeTensor;
    use distflash_kernels::product::{Operand, ProductProblem, ProductTensors, ProductTiles, Store, Target, launch};

    /// What the kernel is asked for, if it takes dense operands of these sizes.
    pub fn problem(a: &CubeTensor, b: &CubeTensor, form: ProductForm) -> Option<ProductProblem> {
        let transposed = form.transposed();
        let size = |tensor: &CubeTensor, dim: usize| tensor.shape()[dim];
        let [a_turned, b_turned] = transposed.map(usize::from);
        let (m, k, n) = (size(a, a_turned), size(a, 1 - a_turned), size(b, 1 - b_turned));
        let operand = |tensor: &CubeTensor, transposed| Operand { transposed, row_stride: size(tensor, 1) };
        let problem = ProductProblem {
            m,
            n,
            k,
            dtype: dtype_to_elem_type(a.dtype),
            a: operand(a, transposed[0]),
            b: operand(b, transposed[1]),
            c: Target { store: Store::Half, row_stride: n },
        };
        ProductTiles::select(&a.client, &problem).ok().map(|_| problem)
    }

    pub fn product(a: CubeTensor, b: CubeTensor, problem: ProductProblem) -> CubeTensor {
        let [a, b] = [a, b].map(readable);
        let shape = [problem.m, problem.n].into();
        let c = empty_device_contiguous_dtype(a.client.clone(), a.device.clone(), shape, a.dtype);
        let stride = |tensor: &CubeTensor| tensor.meta.strides()[0];
        let problem = ProductProblem {
            a: Operand { row_stride: stride(&a), ..problem.a },
            b: Operand { row_stride: stride(&b), ..problem.b },
            c: Target { row_stride: stride(&c), ..problem.c },
            ..problem
        };
        let client = a.client.clone();
        let tensors = ProductTensors { a: a.binding(), b: b.binding(), c: c.clone().binding() };
        launch(&client, &problem, tensors).unwrap_or_else(|refusal| panic!("readable operands are refused: {refusal}"));
        c
    }

    /// `tensor` with aligned rows that do not overlap, which those of layers have anyway.
    fn readable(tensor: CubeTensor) -> CubeTensor {
        let is_readable = has_aligned_rows(&tensor) && tensor.meta.strides()[0] >= tensor.shape()[1];
        if is_readable { tensor } else { into_contiguous(tensor.copy()) }
    }
}
