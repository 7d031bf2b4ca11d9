//! How the kernel is shaped.

use super::problem::{ProductProblem, Store};
use crate::hopper::{Half, require_hopper};
use crate::problem::Refusal;
use cubecl::client::Client;
use cubecl::prelude::CubeDim;
use std::fmt;

/// Rows, and columns, of a cluster's tile of C.
pub(super) const TILE: u32 = 256;
/// What one cube of the cluster copies of A, and of B, for a tile: rows of C or columns.
pub(super) const SHARE: u32 = TILE / 2;
/// Of k, what is copied at a time: 128 bytes.
pub(super) const BLOCK: u32 = 64;
/// A share's block.
pub(super) const SHARE_BYTES: u32 = SHARE * BLOCK * 2;
/// One block: a share of A and two of B.
pub(super) const STAGE_BYTES: u32 = 3 * SHARE_BYTES;
/// 64 rows of 128 bytes, operands or results.
pub(super) const BOX_BYTES: u32 = 64 * 128;
/// Two boxes for each of the warpgroups that multiply.
pub(super) const RESULT_BYTES: u32 = 4 * BOX_BYTES;

/// Shape of the kernel: 128×256 of C a cube, in clusters of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProductTiles {
    /// Of the operands.
    pub half: Half,
    /// Whether A's rows in memory run along k: it is not transposed.
    pub a_along_k: bool,
    /// Whether B's rows in memory run along k: it is transposed.
    pub b_along_k: bool,
    /// What becomes of the sums.
    pub store: Store,
    /// Blocks along k in shared memory.
    pub stages: u32,
    /// Rows of tiles that are walked together.
    pub band: u32,
}

impl ProductTiles {
    /// The shape for `problem` on the device of `client`.
    ///
    /// # Errors
    /// If the device is no Hopper, or the problem is [none](ProductProblem::validate) the kernel can do.
    pub fn select(client: &Client, problem: &ProductProblem) -> Result<Self, Refusal> {
        require_hopper(client)?;
        Self::of(problem)
    }

    /// The shape for `problem`, if it is one the kernel can do.
    pub(crate) fn of(problem: &ProductProblem) -> Result<Self, Refusal> {
        problem.validate()?;
        Ok(Self {
            half: Half::of(problem.dtype)?,
            a_along_k: !problem.a.transposed,
            b_along_k: problem.b.transposed,
            store: problem.c.store,
            stages: 4,
            // Measured under the power limit of an H200; the gradient of 4096×4096 weights alone is faster with 16,
            // 681 TFLOP/s against 672.
            band: 8,
        })
    }

    /// Operands, results and barriers, in bytes.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        (self.stages * (STAGE_BYTES + 16) + RESULT_BYTES) as usize
    }

    /// Columns of C in a box of results: 128 bytes.
    pub(super) fn box_columns(&self) -> u32 {
        if self.store == Store::Half { 64 } else { 32 }
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(384)
    }
}

impl fmt::Display for ProductTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hopper, {TILE}×{TILE} by two cubes, {} blocks of {BLOCK} in flight", self.stages)
    }
}
