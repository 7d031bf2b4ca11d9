//! On CubeCL runtimes, by kernels of one pass over memory.

use super::composed;
use super::op::LayerOps;
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::AddressType;
use distflash_kernels::layer::{self, NormTensors};

fn address_type<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> AddressType {
    tensors.into_iter().map(CubeTensor::required_address_type).max().expect("at least one tensor")
}

fn empty(like: &CubeTensor, shape: &[usize], dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.to_vec().into(), dtype)
}

/// Whether the kernels take `x`: 16 or 32 bits, and not nothing.
fn is_taken(x: &CubeTensor) -> bool {
    matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16) && !x.shape().contains(&0)
}

fn is_norm_taken(x: &CubeTensor, weight: &CubeTensor) -> bool {
    let width = x.shape()[1];
    is_taken(x)
        && weight.dtype == x.dtype
        && layer::norm_refusal(&x.client, dtype_to_elem_type(x.dtype), width).is_none()
}

impl LayerOps for CubeBackend {
    fn rms_norm(x: CubeTensor, weight: CubeTensor, epsilon: f64) -> (CubeTensor, CubeTensor) {
        if !is_norm_taken(&x, &weight) {
            return composed::rms_norm::<Self>(x, weight, epsilon);
        }
        let [x, weight] = [x, weight].map(into_contiguous);
        let (out, scale) = (empty(&x, &x.shape(), x.dtype), empty(&x, &x.shape()[..1], DType::F32));
        let (client, dtype, address_type) = (x.client.clone(), dtype_to_elem_type(x.dtype), address_type([&x, &out]));
        let tensors = NormTensors { x: x.binding(), weight: weight.binding(), scale: scale.clone().binding() };
        layer::rms_norm(&client, tensors, out.clone().binding(), epsilon as f32, dtype, address_type);
        (out, scale)
    }

    fn rms_norm_backward(
        x: CubeTensor,
        weight: CubeTensor,
        scale: CubeTensor,
        d_out: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        if !is_norm_taken(&x, &weight) {
            return composed::rms_norm_backward::<Self>(x, weight, scale, d_out);
        }
        let [x, weight, scale, d_out] = [x, weight, scale, d_out].map(into_contiguous);
        let [rows, width] = x.shape().dims();
        let parts = empty(&x, &[layer::summing_rows(rows), width], DType::F32);
        let (d_x, d_weight) = (empty(&x, &[rows, width], x.dtype), empty(&x, &[width], x.dtype));
        let (client, dtype) = (x.client.clone(), dtype_to_elem_type(x.dtype));
        let address_type = address_type([&x, &d_x, &parts]);
        let tensors = NormTensors { x: x.binding(), weight: weight.binding(), scale: scale.binding() };
        let grads = [&d_x, &d_weight].map(|grad| grad.clone().binding());
        layer::rms_norm_backward(&client, tensors, d_out.binding(), parts.binding(), grads, dtype, address_type);
        (d_x, d_weight)
    }

    fn swiglu(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
        if !is_taken(&gate) {
            return composed::swiglu::<Self>(gate, up);
        }
        let [gate, up] = [gate, up].map(into_contiguous);
        let out = empty(&gate, &gate.shape(), gate.dtype);
        let (client, dtype, address_type) = (gate.client.clone(), dtype_to_elem_type(gate.dtype), address_type([&out]));
        layer::swiglu(&client, [gate.binding(), up.binding()], out.clone().binding(), dtype, address_type);
        out
    }

    fn swiglu_backward(gate: CubeTensor, up: CubeTensor, d_out: CubeTensor) -> (CubeTensor, CubeTensor) {
        if !is_taken(&gate) {
            return composed::swiglu_backward::<Self>(gate, up, d_out);
        }
        let operands = [gate, up, d_out].map(into_contiguous);
        let like = &operands[0];
        let grads = [0, 1].map(|_| empty(like, &like.shape(), like.dtype));
        let (client, dtype) = (like.client.clone(), dtype_to_elem_type(like.dtype));
        let address_type = address_type(&operands);
        let bindings = grads.clone().map(CubeTensor::binding);
        layer::swiglu_backward(&client, operands.map(CubeTensor::binding), bindings, dtype, address_type);
        let [d_gate, d_up] = grads;
        (d_gate, d_up)
    }

    fn rotate(x: CubeTensor, cos: CubeTensor, sin: CubeTensor, back: bool) -> CubeTensor {
        if !is_taken(&x) {
            return composed::rotate::<Self>(x, cos, sin, back);
        }
        let [x, cos, sin] = [x, cos, sin].map(into_contiguous);
        let out = empty(&x, &x.shape(), x.dtype);
        let (client, dtype, address_type) = (x.client.clone(), dtype_to_elem_type(x.dtype), address_type([&x, &cos]));
        let tables = [cos.binding(), sin.binding()];
        layer::rotate(&client, x.binding(), tables, out.clone().binding(), back, dtype, address_type);
        out
    }
}
