//! The CUDA C++ of every kernel for matrix units and for Hopper, attention and the matrix product, without a GPU: for reading, and for asking the compiler
//! offline about registers and spills.

use crate::hopper::{self, BackwardTiles, Half, HopperTiles};
use crate::matrix::{self, MatrixTiles};
use crate::product::{self, Operand, ProductProblem, ProductTiles, Store, Target};
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties,
    TargetProperties, VectorSize, features::Features,
};
use cubecl::prelude::*;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler};
use cubecl_cpp::target::Cuda;
use cubecl_runtime::compiler::Compiler;
use cubecl_runtime::kernel::CubeKernel;
use std::sync::Arc;

/// A kernel's name and source.
#[derive(Clone, Debug)]
pub struct Source {
    /// Unique among the kernels.
    pub name: String,
    /// CUDA C++.
    pub code: String,
}

/// A Hopper GPU, as far as code generation asks.
fn properties() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 32,
        max_shared_memory_size: 232_448,
        max_cube_count: (u32::MAX, u32::from(u16::MAX), u32::from(u16::MAX)),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 1024),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    Arc::new(DeviceProperties::new(
        Features::default(),
        MemoryDeviceProperties::new(u64::MAX, 256),
        hardware,
        cubecl::profile::TimingMethod::Device,
        DeviceIdentity { name: "offline".into(), fingerprint: "offline".into(), physical: None },
    ))
}

fn compile(name: String, kernel: impl CubeKernel) -> Source {
    let mut options = CompilationOptions::default();
    options.supports_features.grid_constants = true;
    options.supports_features.clusters = true;
    options.supports_features.fast_math = true;
    options.supports_features.elect_sync = true;
    let kernel = CppCompiler::<Cuda>::default().compile(kernel.define(), &options).expect("a kernel that compiles");
    Source { name, code: kernel.source }
}

fn settings(dim: CubeDim) -> KernelSettings {
    KernelSettings::new(*dim, ExecutionMode::Unchecked, AddressType::U32)
}

fn target() -> Arc<TargetProperties> {
    Arc::new(TargetProperties::default())
}

fn tensor() -> TensorCompilationArg {
    let meta = TensorMetaCompilationArg { rank: (), len: () };
    TensorCompilationArg { meta, buffer: BufferCompilationArg { inplace: None } }
}

/// Every kernel for matrix units and, of the `head_dim`s they know, for Hopper, for bf16 operands.
#[must_use]
pub fn sources(head_dim: usize) -> Vec<Source> {
    let mut sources = matrix_sources(head_dim);
    if [64, 128].contains(&head_dim) {
        sources.extend(hopper_sources(head_dim));
    }
    sources
}

const DTYPE: ElemType = ElemType::Float(FloatKind::BF16);

fn matrix_sources(head_dim: usize) -> Vec<Source> {
    let tiles = MatrixTiles::of(head_dim);
    let forward = |has_previous| {
        matrix::forward::attention_forward::AttentionForward::new(
            settings(tiles.forward.cube_dim()),
            properties(),
            target(),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            (),
            (),
            has_previous,
            tiles.forward,
            DTYPE,
        )
    };
    let d_query = matrix::dq::attention_backward_dq::AttentionBackwardDq::new(
        settings(tiles.d_query.cube_dim()),
        properties(),
        target(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        (),
        tiles.d_query,
        DTYPE,
    );
    let d_key_value = matrix::dkdv::attention_backward_dkdv::AttentionBackwardDkdv::new(
        settings(tiles.d_key_value.cube_dim()),
        properties(),
        target(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        (),
        tiles.d_key_value,
        DTYPE,
    );
    vec![
        compile(format!("matrix_forward_{head_dim}"), forward(false)),
        compile(format!("matrix_forward_previous_{head_dim}"), forward(true)),
        compile(format!("matrix_dq_{head_dim}"), d_query),
        compile(format!("matrix_dkdv_{head_dim}"), d_key_value),
    ]
}

fn hopper_sources(head_dim: usize) -> Vec<Source> {
    let tiles = HopperTiles::of(head_dim, Half::BF16);
    let forward = |has_previous| {
        hopper::forward::attention_forward::AttentionForward::new(
            settings(tiles.forward.cube_dim()),
            properties(),
            target(),
            (),
            (),
            (),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            (),
            (),
            (),
            head_dim / 2,
            has_previous,
            tiles.forward,
            DTYPE,
        )
    };
    let backward = |tiles: BackwardTiles| {
        hopper::backward::attention_backward::AttentionBackward::new(
            settings(tiles.cube_dim()),
            properties(),
            target(),
            (),
            (),
            (),
            (),
            tensor(),
            tensor(),
            tensor(),
            tensor(),
            (),
            (),
            (),
            (),
            head_dim / 2,
            tiles,
            DTYPE,
        )
    };
    vec![
        compile(format!("hopper_forward_{head_dim}"), forward(false)),
        compile(format!("hopper_forward_previous_{head_dim}"), forward(true)),
        compile(format!("hopper_dq_{head_dim}"), backward(tiles.d_query)),
        compile(format!("hopper_dkdv_{head_dim}"), backward(tiles.d_key_value)),
    ]
}

/// The matrix product in the forms of a linear layer and of its gradients, with each way to store the result; one for
/// f16, which differs from bf16 by a name.
#[must_use]
pub fn product_sources() -> Vec<Source> {
    let mut sources = Vec::new();
    for (form, transposed) in [("y", [false, false]), ("dx", [false, true]), ("dw", [true, false])] {
        for (to, store) in [("half", Store::Half), ("f32", Store::F32), ("add", Store::AddF32)] {
            sources.push(product_source(format!("product_{form}_{to}"), transposed, store, DTYPE));
        }
    }
    sources.push(product_source("product_y_f16".into(), [false, false], Store::Half, FloatKind::F16.into()));
    sources
}

fn product_source(name: String, transposed: [bool; 2], store: Store, dtype: ElemType) -> Source {
    let [a, b] = transposed.map(|transposed| Operand { transposed, row_stride: 256 });
    let c = Target { store, row_stride: 256 };
    let problem = ProductProblem { m: 256, n: 256, k: 256, dtype, a, b, c };
    let tiles = ProductTiles::of(&problem).expect("a problem that fits");
    let kernel = product::kernel::matrix_product::MatrixProduct::new(
        settings(tiles.cube_dim()).cluster_dim(*CubeDim::new_1d(2)),
        properties(),
        target(),
        (),
        (),
        (),
        (),
        (),
        (),
        tiles,
        dtype,
        store.dtype(dtype),
    );
    compile(name, kernel)
}
