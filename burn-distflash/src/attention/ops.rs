//! The few tensor operations that attention and the executor are written in, on backend primitives.
//! Tensors are `[batch, heads, rows, columns]`.

use burn::backend::tensor::{BoolTensor, Device, FloatTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{DType, Shape, Slice, TensorData};
use std::ops::Range;

type Float<B> = FloatTensor<B>;

/// f64 where the operands are f64, f32 for all others.
pub fn accumulator(operand: DType) -> DType {
    if operand == DType::F64 { DType::F64 } else { DType::F32 }
}

pub fn cast<B: Backend>(tensor: Float<B>, dtype: DType) -> Float<B> {
    if tensor.dtype() == dtype { tensor } else { B::float_cast(tensor, dtype.into()) }
}

fn rows_of(shape: &Shape, rows: &Range<usize>) -> [Slice; 4] {
    block_of(shape, &(0..shape[1]), rows)
}

fn block_of(shape: &Shape, heads: &Range<usize>, rows: &Range<usize>) -> [Slice; 4] {
    [0..shape[0], heads.clone(), rows.clone(), 0..shape[3]].map(Slice::from)
}

pub fn block<B: Backend>(tensor: &Float<B>, heads: &Range<usize>, rows: &Range<usize>) -> Float<B> {
    let shape = tensor.shape();
    if *heads == (0..shape[1]) && *rows == (0..shape[2]) {
        return tensor.clone();
    }
    B::float_slice(tensor.clone(), &block_of(&shape, heads, rows))
}

/// One after the other along `dim`.
pub fn join<B: Backend>(mut tensors: Vec<Float<B>>, dim: usize) -> Float<B> {
    if tensors.len() == 1 { tensors.remove(0) } else { B::float_cat(tensors, dim) }
}

pub fn rows<B: Backend>(tensor: &Float<B>, rows: &Range<usize>) -> Float<B> {
    let shape = tensor.shape();
    if *rows == (0..shape[2]) {
        return tensor.clone();
    }
    B::float_slice(tensor.clone(), &rows_of(&shape, rows))
}

pub fn set_rows<B: Backend>(tensor: Float<B>, rows: &Range<usize>, values: Float<B>) -> Float<B> {
    let shape = tensor.shape();
    if *rows == (0..shape[2]) {
        return values;
    }
    B::float_slice_assign(tensor, &rows_of(&shape, rows), values)
}

pub fn add_rows<B: Backend>(tensor: Float<B>, at: &Range<usize>, values: Float<B>) -> Float<B> {
    let sum = B::float_add(rows::<B>(&tensor, at), values);
    set_rows::<B>(tensor, at, sum)
}

pub fn full<B: Backend>(shape: [usize; 4], value: f64, device: &Device<B>, dtype: DType) -> Float<B> {
    B::float_full(shape.into(), value.into(), device, dtype.into())
}

pub fn from_f32<B: Backend>(values: Vec<f32>, shape: [usize; 4], device: &Device<B>, dtype: DType) -> Float<B> {
    B::float_from_data(TensorData::new(values, shape).convert_dtype(dtype), device)
}

pub fn scale<B: Backend>(tensor: Float<B>, by: f64) -> Float<B> {
    B::float_mul_scalar(tensor, by.into())
}

/// Where `tensor` equals `value`.
pub fn equal<B: Backend>(tensor: &Float<B>, value: f64) -> BoolTensor<B> {
    let dtype = get_device_settings::<B>(&tensor.device()).bool_dtype;
    B::float_equal_elem(tensor.clone(), value.into(), dtype)
}

pub fn fill<B: Backend>(tensor: Float<B>, where_: BoolTensor<B>, value: f64) -> Float<B> {
    B::float_mask_fill(tensor, where_, value.into())
}
