//! Which attention a device can compute.

use burn::tensor::Tensor;
use distflash_kernels::Kernel;

/// Why the device of `query` cannot compute attention of it over `key`, if it cannot.
#[cfg(feature = "cube")]
pub(crate) fn refusal(query: &Tensor<4>, key: &Tensor<4>, kernel: Kernel) -> Option<String> {
    use burn::backend::DispatchDevice;
    use burn::backend::cubecl::dtype_to_elem_type;
    use distflash_kernels::AttentionProblem;

    let device = query.device().inner();
    let DispatchDevice::Cube(device) = device.as_dispatch() else {
        return composed(kernel);
    };
    let ([batch, heads, num_rows, head_dim], [_, kv_heads, num_keys, _]) = (query.dims(), key.dims());
    let dtype = dtype_to_elem_type(query.dtype());
    let problem = AttentionProblem { batch, heads, kv_heads, num_rows, num_keys, head_dim, dtype };
    super::cube::select(device, &problem, kernel).err().map(|refusal| refusal.to_string())
}

/// As above, without any CubeCL backend.
#[cfg(not(feature = "cube"))]
pub(crate) fn refusal(_: &Tensor<4>, _: &Tensor<4>, kernel: Kernel) -> Option<String> {
    composed(kernel)
}

/// Composed of a backend's own operations, attention has no limits of its own, but no kernels either.
fn composed(kernel: Kernel) -> Option<String> {
    let refuse = || format!("kernel {kernel} was asked for; this backend has none of its own, only auto");
    (kernel != Kernel::Auto).then(refuse)
}
