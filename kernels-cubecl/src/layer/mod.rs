//! What a Llama layer does between its products and its attention, each in one pass over memory: RMSNorm, SwiGLU and
//! rotary embedding, forward and backward, on every CubeCL runtime.
//!
//! All tensors are dense. Operands are f32, f16 or bf16; arithmetic is f32, and results are rounded once.

mod norm;
mod rotary;
mod swiglu;

pub use norm::{NormTensors, norm_refusal, rms_norm, rms_norm_backward, summing_rows};
pub use rotary::rotate;
pub use swiglu::{swiglu, swiglu_backward};

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::CubeCountSelection;

/// Units of a cube.
const UNITS: u32 = 256;

/// Elements that a unit reads at once: as many as fill 16 bytes, of which each of `lens` is a multiple.
fn vector_size(dtype: ElemType, lens: &[usize]) -> usize {
    let most = 16 / dtype.size();
    std::iter::successors(Some(most), |size| Some(size / 2))
        .find(|size| lens.iter().all(|len| len.is_multiple_of(*size)))
        .unwrap_or(1)
}

/// One unit for each of `count` vectors.
fn cubes(client: &Client, count: usize) -> CubeCount {
    CubeCountSelection::new(client, (count as u64).div_ceil(u64::from(UNITS)) as u32).cube_count()
}
