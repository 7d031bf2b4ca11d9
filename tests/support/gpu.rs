//! A GPU below Burn: memory, and views of it.

use burn::tensor::DType;
use cubecl::Device;
use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::TensorBinding;
use cubecl::zspace::Tiling;
use std::ops::Range;

/// A piece of a GPU's memory.
pub use cubecl::server::Handle as Memory;

/// A GPU that holds memory and runs kernels.
#[derive(Clone)]
pub struct Gpu(Client);

impl Gpu {
    /// The first CUDA device.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn first() -> Self {
        Self(Device::Cuda(Default::default()).client())
    }

    /// What it calls itself.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.properties().identity.name
    }

    /// What launches kernels.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.0
    }

    /// `bytes` in its memory.
    #[must_use]
    pub fn put(&self, bytes: &[u8]) -> Memory {
        self.0.create_from_slice(bytes)
    }

    /// Memory that holds anything.
    #[must_use]
    pub fn reserve(&self, num_bytes: usize) -> Memory {
        self.0.empty(num_bytes)
    }

    /// What memory holds when all work is done.
    ///
    /// # Panics
    /// If work failed.
    #[must_use]
    pub fn get(&self, memory: &Memory) -> Vec<u8> {
        self.0.read_one(memory.clone()).expect("a device that works").to_vec()
    }

    /// As [`get`](Self::get), of some of its bytes.
    ///
    /// # Panics
    /// If work failed.
    #[must_use]
    pub fn get_part(&self, memory: &Memory, bytes: Range<usize>) -> Vec<u8> {
        let after = memory.size_in_used() - bytes.end as u64;
        self.get(&memory.clone().offset_start(bytes.start as u64).offset_end(after))
    }

    /// Waits until all work is done.
    ///
    /// # Panics
    /// If work failed.
    pub fn sync(&self) {
        cubecl::future::block_on(self.0.sync()).expect("a device that works");
    }
}

/// A matrix whose first element is `start` bytes into `memory`.
#[must_use]
pub fn view(memory: &Memory, start: usize, [rows, columns]: [usize; 2], row_stride: usize) -> TensorBinding {
    TensorBinding {
        handle: memory.clone().offset_start(start as u64).binding(),
        strides: [row_stride, 1].into(),
        shape: [rows, columns].into(),
        tiling: Tiling::UNTILED,
    }
}

/// As CubeCL names it.
///
/// # Panics
/// If `dtype` is none that products have.
#[must_use]
pub fn elem_type(dtype: DType) -> ElemType {
    match dtype {
        DType::F16 => FloatKind::F16.into(),
        DType::BF16 => FloatKind::BF16.into(),
        DType::F32 => FloatKind::F32.into(),
        other => panic!("{other:?}: expected F16, BF16 or F32"),
    }
}
