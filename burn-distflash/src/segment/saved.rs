//! What a segment keeps, on its device or on the host.

use super::tensors::{TensorMapper, Tensors};
use burn::tensor::{DType, Device, Tensor, TensorData};

/// Tensors on their device, or in host memory.
pub(super) enum Saved<T> {
    Device(T),
    /// Empty tensors in the place of what lies on the host.
    Host(T, Vec<HostTensor>),
}

#[derive(Clone)]
pub(super) struct HostTensor {
    data: TensorData,
    device: Device,
    dtype: DType,
}

impl<T: Tensors> Saved<T> {
    pub fn new(tensors: T, offload: bool) -> Self {
        if !offload {
            return Self::Device(tensors);
        }
        let mut out = Offload(Vec::new());
        let places = tensors.map_tensors(&mut out);
        Self::Host(places, out.0)
    }

    pub fn get(&self) -> T {
        match self {
            Self::Device(tensors) => tensors.clone(),
            Self::Host(places, data) => places.clone().map_tensors(&mut Upload(data.iter())),
        }
    }
}

struct Offload(Vec<HostTensor>);

impl TensorMapper for Offload {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let (device, dtype) = (tensor.device(), tensor.dtype());
        let place = Tensor::empty([0; D], (&device, dtype));
        self.0.push(HostTensor { data: tensor.into_data(), device, dtype });
        place
    }
}

struct Upload<'a>(std::slice::Iter<'a, HostTensor>);

impl TensorMapper for Upload<'_> {
    fn map<const D: usize>(&mut self, _: Tensor<D>) -> Tensor<D> {
        let HostTensor { data, device, dtype } = self.0.next().expect("data for each tensor").clone();
        Tensor::from_data(data, (&device, dtype))
    }
}
