//! What travels: a tensor of any backend, or bytes.

use burn::backend::Backend;
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape, Tensor};
use std::any::Any;
use std::fmt;

/// What a receiver expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PacketSpec {
    /// A tensor.
    Tensor {
        /// Its shape.
        shape: Shape,
        /// Its dtype.
        dtype: DType,
    },
    /// A 1-D tensor of a length only the sender knows.
    Flat {
        /// Its dtype.
        dtype: DType,
    },
    /// Bytes, any number.
    Bytes,
}

impl PacketSpec {
    /// Whether a packet of spec `actual` is what was asked for.
    #[must_use]
    pub fn admits(&self, actual: &PacketSpec) -> bool {
        match (self, actual) {
            (PacketSpec::Flat { dtype }, PacketSpec::Tensor { shape, dtype: sent }) => {
                shape.num_dims() == 1 && dtype == sent
            }
            _ => self == actual,
        }
    }

    /// Bytes of the tensor; 0 for what is not one of known size.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        match self {
            PacketSpec::Tensor { shape, dtype } => (shape.num_elements() * dtype.size()) as u64,
            PacketSpec::Flat { .. } | PacketSpec::Bytes => 0,
        }
    }
}

impl fmt::Display for PacketSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PacketSpec::Tensor { shape, dtype } => write!(f, "a {dtype:?} tensor of shape {:?}", shape.as_slice()),
            PacketSpec::Flat { dtype } => write!(f, "a 1-D {dtype:?} tensor"),
            PacketSpec::Bytes => f.write_str("bytes"),
        }
    }
}

/// A tensor or bytes on their way, whatever the backend. Shapes and dtypes stay readable, so a
/// receiver can refuse a packet without opening it.
pub struct Packet {
    spec: PacketSpec,
    content: Box<dyn Any + Send>,
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packet({})", self.spec)
    }
}

impl Packet {
    /// A backend's own tensor, as the executor holds it. Another thread may open the packet, so what
    /// computes the tensor is sent to its device first.
    ///
    /// # Panics
    /// If the device has failed; so [`tensor`](Self::tensor).
    #[must_use]
    pub fn primitive<B: Backend>(tensor: FloatTensor<B>) -> Self {
        B::flush(&tensor.device()).expect("a device that works");
        let spec = PacketSpec::Tensor { shape: tensor.shape(), dtype: tensor.dtype() };
        Self { spec, content: Box::new(tensor) }
    }

    /// A user's tensor. It arrives without its autodiff graph.
    #[must_use]
    pub fn tensor(tensor: Tensor<1>) -> Self {
        tensor.device().flush().expect("a device that works");
        let spec = PacketSpec::Tensor { shape: tensor.shape(), dtype: tensor.dtype() };
        Self { spec, content: Box::new(untracked(tensor)) }
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(bytes: Vec<u8>) -> Self {
        Self { spec: PacketSpec::Bytes, content: Box::new(bytes) }
    }

    /// What it is.
    #[must_use]
    pub fn spec(&self) -> &PacketSpec {
        &self.spec
    }

    /// The tensor put in by [`primitive`](Self::primitive).
    ///
    /// # Panics
    /// If something else was put in, as all that follow: transports check the spec, and both ends of
    /// an operation run the same code.
    #[must_use]
    pub fn into_primitive<B: Backend>(self) -> FloatTensor<B> {
        self.open()
    }

    /// The tensor put in by [`tensor`](Self::tensor).
    #[must_use]
    pub fn into_tensor(self) -> Tensor<1> {
        self.open()
    }

    /// The bytes put in by [`bytes`](Self::bytes).
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.open()
    }

    fn open<T: 'static>(self) -> T {
        let Self { spec, content } = self;
        *content.downcast().unwrap_or_else(|_| panic!("a packet of {spec} was opened as something else"))
    }
}

/// What travels has left its graph: gradients cross ranks as messages of their own.
pub(super) fn untracked(tensor: Tensor<1>) -> Tensor<1> {
    if tensor.is_autodiff() { tensor.inner() } else { tensor }
}
