//! How the kernels for Hopper's warpgroups are shaped.

use super::wgmma::{GradientProducts, Half, Products};
use crate::problem::{AttentionProblem, Refusal};
use cubecl::client::Client;
use cubecl::prelude::CubeDim;
use std::fmt;

/// Shape of the forward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardTiles {
    /// Elements of one head's vector: 64 or 128.
    pub head_dim: usize,
    /// Warpgroups that compute 64 queries each; one more copies.
    pub warpgroups: usize,
    /// Tiles of keys, and of values, in shared memory.
    pub stages: usize,
    /// Of the operands.
    pub half: Half,
    /// Whether the scale is below 0.
    pub negative: bool,
}

impl ForwardTiles {
    /// Queries of a tile.
    #[must_use]
    pub fn queries(&self) -> usize {
        64 * self.warpgroups
    }

    /// Keys of a tile.
    #[must_use]
    pub fn keys(&self) -> usize {
        128
    }

    pub(super) fn query_bytes(&self) -> usize {
        self.queries() * self.head_dim * 2
    }

    pub(super) fn stage_bytes(&self) -> usize {
        self.keys() * self.head_dim * 2
    }

    /// Operands and barriers.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        self.query_bytes() + 2 * self.stages * self.stage_bytes() + 256
    }

    /// A cube's registers are shared out in eights; together no more than 65,536.
    pub(super) fn compute_registers(&self) -> u32 {
        if self.warpgroups == 2 { 240 } else { 160 }
    }

    pub(super) fn copy_registers(&self) -> u32 {
        if self.warpgroups == 2 { 24 } else { 32 }
    }

    pub(super) fn products(&self) -> Products {
        let Self { head_dim, half, negative, .. } = *self;
        Products { head_dim, queries: self.queries(), keys: self.keys(), half, negative }
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(128 * (self.warpgroups as u32 + 1))
    }
}

/// Whose gradients a backward kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Of keys and values; queries are walked.
    Keys,
    /// Of queries; keys are walked.
    Queries,
}

/// Shape of a backward kernel: 128 rows that stay, 64 that are walked at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardTiles {
    /// Elements of one head's vector: 64 or 128.
    pub head_dim: usize,
    /// Whose gradients.
    pub side: Side,
    /// Of the operands.
    pub half: Half,
    /// Whether the scale is below 0.
    pub negative: bool,
}

impl BackwardTiles {
    /// Rows that stay.
    #[must_use]
    pub fn outer(&self) -> usize {
        128
    }

    pub(super) fn stay_bytes(&self) -> usize {
        128 * self.head_dim * 2
    }

    pub(super) fn walk_bytes(&self) -> usize {
        64 * self.head_dim * 2
    }

    /// Operands and barriers.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        2 * self.stay_bytes() + 4 * self.walk_bytes() + 128
    }

    /// Whether warpgroups that compute need more registers than their even share of 168.
    pub(super) fn moves_registers(&self) -> bool {
        self.head_dim == 128
    }

    pub(super) fn products(&self) -> GradientProducts {
        let Self { head_dim, half, negative, .. } = *self;
        GradientProducts { head_dim, stay: 128, half, negative }
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(384)
    }
}

/// Later architectures have no wgmma.
///
/// # Errors
/// If the device of `client` is no Hopper.
pub(crate) fn require_hopper(client: &Client) -> Result<(), Refusal> {
    let fingerprint = &client.properties().identity.fingerprint;
    if fingerprint == "ptx_sm90" {
        return Ok(());
    }
    Err(Refusal::Hopper(format!("the device is {fingerprint}, not ptx_sm90")))
}

/// Shapes of the kernels for Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HopperTiles {
    /// Queries by keys.
    pub forward: ForwardTiles,
    /// Queries by keys.
    pub d_query: BackwardTiles,
    /// Keys by queries.
    pub d_key_value: BackwardTiles,
}

impl HopperTiles {
    /// The shapes for `problem` on the device of `client`.
    ///
    /// # Errors
    /// If the device is no Hopper, the operands are not 16-bit, or `head_dim` is neither 64 nor 128.
    pub(crate) fn select(client: &Client, problem: &AttentionProblem) -> Result<Self, Refusal> {
        require_hopper(client)?;
        let half = Half::of(problem.dtype)?;
        if ![64, 128].contains(&problem.head_dim) {
            return Err(Refusal::Hopper(format!("head_dim is {}, neither 64 nor 128", problem.head_dim)));
        }
        Ok(Self::of(problem.head_dim, half))
    }

    /// For a `head_dim` of 64 or 128.
    pub(crate) fn of(head_dim: usize, half: Half) -> Self {
        let warpgroups = if head_dim == 64 { 3 } else { 2 };
        let backward = |side| BackwardTiles { head_dim, side, half, negative: false };
        Self {
            forward: ForwardTiles { head_dim, warpgroups, stages: 2, half, negative: false },
            d_query: backward(Side::Queries),
            d_key_value: backward(Side::Keys),
        }
    }
}

impl fmt::Display for HopperTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { forward, d_query, .. } = self;
        write!(f, "hopper, head_dim {}, forward {}×{}", forward.head_dim, forward.queries(), forward.keys())?;
        write!(f, " by {} warpgroups and one that copies, backward {}×64", forward.warpgroups, d_query.outer())
    }
}
