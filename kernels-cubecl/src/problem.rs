//! What a kernel is asked to do.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::TensorBinding;

/// Sizes and precision of one block of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionProblem {
    /// Independent sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Query rows.
    pub num_rows: usize,
    /// Keys.
    pub num_keys: usize,
    /// Elements of one head's vector.
    pub head_dim: usize,
    /// Of query, key, value and the gradient of the output.
    pub dtype: ElemType,
}

/// Why a device or a kernel cannot do what it is asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Accumulators of one head must fit a unit's registers.
    #[error("head_dim is {0}; the kernels take 1 to 256")]
    HeadDim(usize),
    /// Grouped-query attention needs whole groups.
    #[error("{heads} query heads do not divide evenly over {kv_heads} key/value heads")]
    UnevenGroups {
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// The kernels accumulate in f32.
    #[error("operands are {0}; the kernels take f32, f16 and bf16")]
    DType(String),
    /// Not every device has every float.
    #[error("the device does not store {0}")]
    DeviceDType(String),
    /// The kernels for Hopper were asked for.
    #[error("no kernel for Hopper: {0}")]
    Hopper(String),
    /// The kernels for matrix units were asked for.
    #[error("no kernel for matrix units: {0}")]
    Matrix(String),
    /// A cube's tiles must fit its shared memory.
    #[error("the tiles need {needed} bytes of shared memory; the device has {available}")]
    SharedMemory {
        /// Bytes.
        needed: usize,
        /// Bytes.
        available: usize,
    },
    /// A cube needs its units.
    #[error("the tiles need {needed} units a cube; the device has {available}")]
    Units {
        /// Number of units.
        needed: usize,
        /// Number of units.
        available: usize,
    },
    /// Sums of nothing, or no sums.
    #[error("the product of [{m}, {k}] by [{k}, {n}] is empty; every dimension must be at least 1")]
    EmptyProduct {
        /// Rows.
        m: usize,
        /// Columns.
        n: usize,
        /// What is summed over.
        k: usize,
    },
    /// A cube's units wait for each other, which threads of a CPU do slowly.
    #[error("the kernel of norms is made for GPUs")]
    CpuNorm,
    /// A row must fit the registers of a cube.
    #[error("rows to normalise are {width} long; expected at most {most}")]
    WideNorm {
        /// Elements.
        width: usize,
        /// Elements.
        most: usize,
    },
    /// Coordinates of copies have 31 bits.
    #[error("{dimension} is {len}; the product takes at most {most}")]
    LongProduct {
        /// Its name.
        dimension: &'static str,
        /// Elements.
        len: usize,
        /// Elements.
        most: usize,
    },
    /// Rows must not overlap, nor be further apart than copies can step.
    #[error("rows of {matrix} are {row_stride} elements apart; expected {least} to {most}")]
    RowStride {
        /// Its name.
        matrix: &'static str,
        /// Elements.
        row_stride: usize,
        /// Elements of a row.
        least: usize,
        /// Elements.
        most: usize,
    },
    /// Copies need aligned rows.
    #[error("the {what} of {matrix} is {bytes} bytes; expected a multiple of 16")]
    Misaligned {
        /// Its name.
        matrix: &'static str,
        /// Start, row stride or row length.
        what: &'static str,
        /// Bytes.
        bytes: usize,
    },
}

impl AttentionProblem {
    /// Checks what does not depend on the device.
    ///
    /// # Errors
    /// The first thing that cannot be done.
    pub fn validate(&self) -> Result<(), Refusal> {
        let Self { heads, kv_heads, head_dim, dtype, .. } = *self;
        if head_dim == 0 || head_dim > 256 {
            return Err(Refusal::HeadDim(head_dim));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Refusal::UnevenGroups { heads, kv_heads });
        }
        match dtype {
            ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16) => Ok(()),
            other => Err(Refusal::DType(format!("{other:?}"))),
        }
    }

    /// Asserts that `queries` and `keys` have this problem's shapes: unchecked kernels rely on them.
    pub(crate) fn assert_shapes(&self, queries: &[&TensorBinding], keys: &[&TensorBinding]) {
        let Self { batch, heads, kv_heads, num_rows, num_keys, head_dim, .. } = *self;
        for (tensors, shape) in
            [(queries, [batch, heads, num_rows, head_dim]), (keys, [batch, kv_heads, num_keys, head_dim])]
        {
            for tensor in tensors {
                assert_eq!(tensor.shape[..], shape[..], "an operand of {self:?}");
            }
        }
    }
}
