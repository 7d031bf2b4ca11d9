//! The device under test, chosen by the features the suite is built with.

use burn::tensor::{DType, Device};

/// The device under test: that of the feature `cuda`, `wgpu` or `cpu`, or else Flex. A feature is a
/// promise: without its hardware or driver, the suite fails.
#[must_use]
pub fn device() -> Device {
    #[cfg(feature = "cuda")]
    return Device::cuda(0);
    #[cfg(all(feature = "wgpu", not(feature = "cuda")))]
    return Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    #[cfg(all(feature = "cpu", not(any(feature = "cuda", feature = "wgpu"))))]
    return Device::cpu();
    #[cfg(not(any(feature = "cuda", feature = "wgpu", feature = "cpu")))]
    return Device::flex();
}

/// Whether the device under test computes attention of `dtype`.
#[must_use]
pub fn takes(dtype: DType) -> bool {
    let is_flex = cfg!(not(any(feature = "cuda", feature = "wgpu", feature = "cpu")));
    is_flex || (dtype != DType::F64 && device().supports_dtype(dtype))
}
