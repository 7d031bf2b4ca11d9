//! `ChunkAttention` by the kernels of `distflash-kernels`, on any CubeCL runtime.

use super::chunk::{ChunkAttention, ChunkGradient, ChunkOptions, Previous};
use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{DType, Slice, TensorData};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::prelude::AddressType;
use distflash_kernels::{AttentionProblem, Blueprint, Kernel, Refusal, RowIntervals, backward, forward, partial, tune};

fn problem(query: &CubeTensor, key: &CubeTensor) -> AttentionProblem {
    let (q, k) = (query.shape(), key.shape());
    AttentionProblem {
        batch: q[0],
        heads: q[1],
        kv_heads: k[1],
        num_rows: q[2],
        num_keys: k[2],
        head_dim: q[3],
        dtype: dtype_to_elem_type(query.dtype),
    }
}

/// The kernels' shape for attention of these operands on `device`, or why it cannot be.
pub(crate) fn select(device: &CubeDevice, problem: &AttentionProblem, kernel: Kernel) -> Result<Blueprint, Refusal> {
    Blueprint::select(&device.client(), problem, kernel)
}

fn blueprint(query: &CubeTensor, problem: &AttentionProblem, kernel: Kernel) -> Blueprint {
    // `flash_attention` and `dist_attention` have refused what cannot be selected.
    Blueprint::select(&query.client, problem, kernel).unwrap_or_else(|refusal| panic!("{refusal}"))
}

/// `tensor` in a layout that `blueprint` can read: as it is, unless its kernels would meet rows that do not
/// start at multiples of 16 bytes. The copy costs far less than kernels that could do without.
fn readable(tensor: CubeTensor, blueprint: Blueprint) -> CubeTensor {
    if !blueprint.needs_aligned_rows() {
        return tensor;
    }
    if has_aligned_rows(&tensor) { tensor } else { into_contiguous(tensor.copy()) }
}

/// Whether rows start at multiples of 16 bytes and have no gaps between elements.
pub(crate) fn has_aligned_rows(tensor: &CubeTensor) -> bool {
    let size = tensor.dtype.size();
    let (element, rest) = tensor.meta.strides().split_last().expect("a dimension");
    let start = tensor.handle.offset_start.unwrap_or(0) as usize;
    *element == 1 && rest.iter().all(|stride| (stride * size).is_multiple_of(16)) && start.is_multiple_of(16)
}

fn empty(like: &CubeTensor, shape: &[usize]) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.to_vec().into(), DType::F32)
}

fn bounds(like: &CubeTensor, mask: &RowIntervals) -> CubeTensor {
    let bounds = [mask.lo(), mask.hi()].concat();
    // One dimension: CUDA pads the rows of more.
    CubeBackend::int_from_data(TensorData::new(bounds, [2 * mask.num_rows()]), &like.device)
}

fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    tensors.iter().map(|tensor| tensor.required_address_type()).max().expect("at least one tensor")
}

impl ChunkAttention for CubeBackend {
    fn chunk_forward(
        query: CubeTensor,
        key: CubeTensor,
        value: CubeTensor,
        previous: Previous<Self>,
        mask: RowIntervals,
        options: ChunkOptions,
    ) -> (CubeTensor, CubeTensor) {
        let problem = problem(&query, &key);
        let AttentionProblem { batch, heads, num_rows, head_dim, .. } = problem;
        let blueprint = blueprint(&query, &problem, options.kernel);
        let readable = |tensor| readable(tensor, blueprint);
        let [query, key, value] = [query, key, value].map(readable);
        let out = empty(&query, &[batch, heads, num_rows, head_dim]);
        let lse = empty(&query, &[batch, heads, num_rows, 1]);
        let (has_previous, previous) = match previous {
            Previous::Partial { out, lse } => (true, [out, lse]),
            Previous::Nothing => (false, [empty(&query, &[1; 4]), empty(&query, &[1; 4])]),
        };
        let bounds = bounds(&query, &mask);
        let address_type = address_type(&[&query, &key, &value, &previous[0], &out, &bounds]);
        let client = query.client.clone();
        let tensors = forward::ForwardTensors {
            query: query.binding(),
            key: key.binding(),
            value: value.binding(),
            bounds: bounds.binding(),
            previous: previous.map(CubeTensor::binding),
            has_previous,
            out: out.clone().binding(),
            lse: lse.clone().binding(),
        };
        let scale = options.scale as f32;
        if options.kernel == Kernel::Tuned {
            tune::forward(&client, &problem, tensors, scale, address_type);
        } else {
            forward::launch(&client, &problem, blueprint, tensors, scale, address_type);
        }
        (out, lse)
    }

    fn chunk_backward(
        inputs: ChunkGradient<Self>,
        mask: RowIntervals,
        options: ChunkOptions,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let ChunkGradient { query, key, value, lse, delta, d_out } = inputs;
        let problem = problem(&query, &key);
        let AttentionProblem { batch, heads, kv_heads, num_rows, num_keys, head_dim, .. } = problem;
        let blueprint = blueprint(&query, &problem, options.kernel);
        let readable = |tensor| readable(tensor, blueprint);
        let [query, key, value, d_out] = [query, key, value, d_out].map(readable);
        let d_query = empty(&query, &[batch, heads, num_rows, head_dim]);
        let d_key_value = empty(&query, &[2, batch, kv_heads, num_keys, head_dim]);
        let bounds = bounds(&query, &mask);
        let address_type = address_type(&[&query, &key, &value, &d_out, &d_query, &d_key_value, &bounds]);
        let client = query.client.clone();
        let tensors = backward::BackwardTensors {
            query: query.binding(),
            key: key.binding(),
            value: value.binding(),
            d_out: d_out.binding(),
            lse: lse.binding(),
            delta: delta.binding(),
            bounds: bounds.binding(),
            d_query: d_query.clone().binding(),
            d_key_value: d_key_value.clone().binding(),
        };
        let scale = options.scale as f32;
        if options.kernel == Kernel::Tuned {
            tune::backward(&client, &problem, tensors, scale, address_type);
        } else {
            backward::launch(&client, &problem, blueprint, tensors, scale, address_type);
        }
        let [d_key, d_value] = halves(d_key_value, [batch, kv_heads, num_keys, head_dim]);
        (d_query, d_key, d_value)
    }

    fn chunk_delta(out: CubeTensor, d_out: CubeTensor) -> CubeTensor {
        let shape = out.shape();
        let delta = empty(&out, &[shape[0], shape[1], shape[2], 1]);
        let address_type = address_type(&[&out, &d_out, &delta]);
        let (client, dtype) = (out.client.clone(), dtype_to_elem_type(out.dtype));
        partial::delta(&client, out.binding(), d_out.binding(), delta.clone().binding(), dtype, address_type);
        delta
    }

    fn chunk_merge(
        out_a: CubeTensor,
        lse_a: CubeTensor,
        out_b: CubeTensor,
        lse_b: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        let (out, lse) = (empty(&out_a, &out_a.shape()), empty(&lse_a, &lse_a.shape()));
        let address_type = address_type(&[&out_a, &out_b, &out, &lse]);
        let client = out_a.client.clone();
        let bindings = |tensors: [CubeTensor; 2]| tensors.map(CubeTensor::binding);
        let (a, b, result) = (bindings([out_a, lse_a]), bindings([out_b, lse_b]), [out.clone(), lse.clone()]);
        partial::merge(&client, a, b, bindings(result), address_type);
        (out, lse)
    }
}

/// The two halves of a dense tensor.
fn halves(both: CubeTensor, shape: [usize; 4]) -> [CubeTensor; 2] {
    [0, 1].map(|half| {
        let mut slices = vec![Slice::from(half..half + 1)];
        slices.extend(shape.map(|len| Slice::from(0..len)));
        CubeBackend::float_reshape(CubeBackend::float_slice(both.clone(), &slices), shape.to_vec().into())
    })
}
