//! The device under test, chosen by the features the suite is built with.

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_distflash::{AttentionError, AttentionOptions, Kernel, Sequence, Strategy, flash_attention};
use std::env;

/// What a variable of the environment says.
fn chosen(variable: &str) -> Option<String> {
    env::var(variable).ok().filter(|name| !name.is_empty())
}

/// The name of the device under test.
fn name() -> String {
    let built = if cfg!(feature = "cuda") {
        "cuda"
    } else if cfg!(feature = "wgpu") {
        "wgpu"
    } else if cfg!(feature = "cpu") {
        "cpu"
    } else {
        "flex"
    };
    chosen("DISTFLASH_DEVICE").unwrap_or_else(|| built.into())
}

/// The device under test: what `DISTFLASH_DEVICE` names, or else that of the feature `cuda`, `wgpu` or
/// `cpu`, or else Flex. A feature is a promise: without its hardware or driver, the suite fails.
///
/// # Panics
/// If `DISTFLASH_DEVICE` names a device that was not built in.
#[must_use]
pub fn device() -> Device {
    match name().as_str() {
        "flex" => Device::flex(),
        #[cfg(feature = "cuda")]
        "cuda" => Device::cuda(0),
        #[cfg(feature = "wgpu")]
        "wgpu" => Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
        #[cfg(feature = "cpu")]
        "cpu" => Device::cpu(),
        other => {
            panic!("DISTFLASH_DEVICE is {other:?}: expected flex, or cuda, wgpu or cpu with that feature built in")
        }
    }
}

/// The kernels under test: what `DISTFLASH_KERNEL` names, or else the device's own choice.
///
/// # Panics
/// If `DISTFLASH_KERNEL` names none.
#[must_use]
pub fn kernel() -> Kernel {
    chosen("DISTFLASH_KERNEL").map_or(Kernel::Auto, |name| name.parse().expect("DISTFLASH_KERNEL"))
}

/// [`kernel`] where that kind is made for such operands, or else the device's own choice.
#[must_use]
pub fn kernel_for(head_dim: usize, dtype: DType) -> Kernel {
    let named = kernel();
    let is_16_bit = matches!(dtype, DType::F16 | DType::BF16);
    let is_made_for = match named {
        Kernel::Hopper => is_16_bit && [64, 128].contains(&head_dim),
        Kernel::Matrix => is_16_bit && head_dim.is_multiple_of(8),
        Kernel::Auto | Kernel::Tuned | Kernel::Units => true,
    };
    if is_made_for { named } else { Kernel::Auto }
}

/// The strategies that the suite tries on the device under test: all, but on devices that software stands in for
/// only some, which between them use every kind of kernel call and exchange. Ring Self-Attention, whose products are
/// Burn's own, is tried on Flex alone: on a GPU they round to TF32.
#[must_use]
pub fn strategies(world_size: usize) -> Vec<Strategy> {
    let all = Strategy::all_for(world_size);
    let is_software = matches!(name().as_str(), "wgpu" | "cpu");
    let is_tried = |strategy: &Strategy| match strategy {
        Strategy::Sequence(sequence) => matches!(sequence, Sequence::Balanced | Sequence::DoubleRing { .. }),
        Strategy::Ulysses => true,
        Strategy::Hybrid { sequence, .. } => *sequence == Sequence::Zigzag,
        Strategy::PaddedUlysses | Strategy::RingSelfAttention => false,
    };
    let is_burns_own = |strategy: &Strategy| *strategy == Strategy::RingSelfAttention && name() != "flex";
    all.into_iter().filter(|s| (!is_software || is_tried(s)) && !is_burns_own(s)).collect()
}

/// `all` of them, or `few` where software stands in for the device under test.
#[must_use]
pub fn worlds(all: &'static [usize], few: &'static [usize]) -> &'static [usize] {
    if matches!(name().as_str(), "wgpu" | "cpu") { few } else { all }
}

/// Whether the device under test is a CUDA GPU.
#[must_use]
pub fn is_cuda() -> bool {
    name() == "cuda"
}

/// Whether shaders run on Mesa's software Vulkan, or may: it ends their loops after 65,535 iterations in all,
/// about 24,000 keys.
#[must_use]
pub fn may_cut_loops() -> bool {
    name() == "wgpu"
}

/// Whether the device under test computes attention of `dtype`; where it does not, it must say so.
///
/// # Panics
/// If a dtype that the device cannot compute is not refused.
#[must_use]
pub fn takes(dtype: DType) -> bool {
    let device = device();
    let is_taken = match name().as_str() {
        "flex" => true,
        "cuda" => dtype != DType::F64,
        "cpu" => [DType::F32, DType::F16].contains(&dtype),
        _ => dtype == DType::F32 || (dtype != DType::F64 && device.supports_dtype(dtype)),
    };
    if is_taken {
        return true;
    }
    let tensor = || {
        let data = TensorData::new(vec![1f32; 8], [1, 1, 1, 8]).convert_dtype(dtype);
        Tensor::<4>::from_data(data, (&device, dtype))
    };
    let refused = flash_attention(tensor(), tensor(), tensor(), &AttentionOptions::default());
    assert!(matches!(refused, Err(AttentionError::Unsupported { .. })), "{dtype:?} is not refused");
    false
}
