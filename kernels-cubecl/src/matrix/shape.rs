//! How the kernels for matrix units are shaped.

use crate::problem::{AttentionProblem, Refusal};
use cubecl::client::Client;
use cubecl::ir::features::MmaConfig;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::CubeDim;
use std::fmt;

/// Rows and columns of one product, `mma.m16n8k16`.
pub(super) const M: usize = 16;
pub(super) const N: usize = 8;
pub(super) const K: usize = 16;
/// Elements of 16 bytes: what an asynchronous copy moves and one row of an `ldmatrix`.
pub(super) const CHUNK: usize = 8;

/// One kernel's tile: `planes · blocks · 16` rows of the side that stays by `inner` rows of the side that
/// is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Planes of a cube.
    pub planes: usize,
    /// Blocks of 16 rows that a plane computes.
    pub blocks: usize,
    /// Rows of the other side that are staged at a time, twice: one tile is read while the next arrives.
    pub inner: usize,
    /// Cubes that share the columns of a result, each computing all scores again.
    pub splits: usize,
    /// Elements of one head's vector.
    pub head_dim: usize,
}

impl Tile {
    /// Rows of the side that stays.
    #[must_use]
    pub fn outer(&self) -> usize {
        self.planes * self.blocks * M
    }

    /// Chunks of one row in global memory.
    pub(super) fn chunks(&self) -> usize {
        self.head_dim / CHUNK
    }

    /// Steps of 16 columns that make a row, the last padded with zeros.
    pub(super) fn steps(&self) -> usize {
        self.head_dim.div_ceil(K)
    }

    /// Chunks from one row to the next in shared memory: odd, so that the eight rows of an `ldmatrix` lie
    /// in different banks.
    pub(super) fn stride(&self) -> usize {
        2 * self.steps() + 1
    }

    /// Steps of 16 columns of the result that one cube computes.
    pub(super) fn result_steps(&self) -> usize {
        self.steps().div_ceil(self.splits)
    }

    /// Products side by side along the walked side.
    pub(super) fn score_tiles(&self) -> usize {
        self.inner / N
    }

    /// Units of a cube.
    #[must_use]
    pub fn num_units(&self) -> usize {
        self.planes * 32
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, self.planes as u32)
    }

    /// Bytes of shared memory for `stay` operands of the outer side and two of the inner side, twice.
    fn shared_bytes(&self, stay: usize) -> usize {
        (stay * self.outer() + 4 * self.inner) * self.stride() * 16 + 2 * self.inner * 16 + 64
    }
}

/// Shapes of the kernels for matrix units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixTiles {
    /// Queries by keys.
    pub forward: Tile,
    /// Queries by keys.
    pub d_query: Tile,
    /// Keys by queries.
    pub d_key_value: Tile,
}

impl MatrixTiles {
    /// The shapes for `problem` on the device of `client`.
    ///
    /// # Errors
    /// If the operands are not 16-bit, `head_dim` is no multiple of 8, or the device lacks the
    /// instructions or the shared memory.
    pub(crate) fn select(client: &Client, problem: &AttentionProblem) -> Result<Self, Refusal> {
        let head_dim = problem.head_dim;
        if !head_dim.is_multiple_of(CHUNK) {
            return Err(Refusal::Matrix(format!("head_dim is {head_dim}, no multiple of {CHUNK}")));
        }
        let properties = client.properties();
        let features = &properties.features;
        let float = ElemType::Float(FloatKind::F32);
        let dtype = problem.dtype;
        let product = MmaConfig { a_type: dtype, b_type: dtype, cd_type: float, m: M as u32, n: N as u32, k: K as u32 };
        if !features.matmul.mma.contains(&product) {
            return Err(Refusal::Matrix(format!("the device has no product {M}×{N}×{K} of {dtype:?}")));
        }
        if !features.matmul.ldmatrix.contains(&dtype) || !features.copy_async {
            return Err(Refusal::Matrix("the device has no ldmatrix or no asynchronous copies".into()));
        }
        let tiles = Self::of(head_dim);
        let (needed, available) = (tiles.shared_bytes(), properties.hardware.max_shared_memory_size);
        if needed > available {
            return Err(Refusal::SharedMemory { needed, available });
        }
        Ok(tiles)
    }

    /// Chosen so that accumulators and scores fit 255 registers a unit.
    pub(crate) fn of(head_dim: usize) -> Self {
        let tile = |planes, blocks, inner, splits| Tile { planes, blocks, inner, splits, head_dim };
        let (forward, d_query, d_key_value) = match head_dim {
            0..=64 => (tile(4, 2, 64, 1), tile(4, 2, 64, 1), tile(8, 1, 64, 1)),
            65..=128 => (tile(4, 2, 64, 1), tile(4, 2, 32, 1), tile(8, 1, 64, 1)),
            _ => (tile(8, 1, 32, 1), tile(4, 1, 32, 1), tile(4, 1, 32, 2)),
        };
        Self { forward, d_query, d_key_value }
    }

    /// Other shapes that are worth measuring: 0 is the table's, 1 has planes of one block each and twice as many
    /// of them, 2 half the walked side.
    pub(crate) fn variant(self, number: usize) -> Result<Self, Refusal> {
        let change = |tile: Tile| match number {
            1 if tile.blocks == 2 => Tile { planes: 2 * tile.planes, blocks: 1, ..tile },
            2 if tile.inner > 32 => Tile { inner: tile.inner / 2, ..tile },
            _ => tile,
        };
        let Self { forward, d_query, d_key_value } = self;
        let other = Self { forward: change(forward), d_query: change(d_query), d_key_value: change(d_key_value) };
        if number > 0 && other == self {
            return Err(Refusal::Matrix("no such shape".into()));
        }
        Ok(other)
    }

    /// Bytes of shared memory that the largest kernel takes.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        let backward = self.d_query.shared_bytes(2).max(self.d_key_value.shared_bytes(2));
        self.forward.shared_bytes(1).max(backward)
    }
}

impl fmt::Display for MatrixTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { forward, d_query, d_key_value } = self;
        write!(f, "matrix units, head_dim {}", forward.head_dim)?;
        for (name, tile) in [("forward", forward), ("d_query", d_query), ("d_key_value", d_key_value)] {
            write!(f, ", {name} {}×{} by {} planes", tile.outer(), tile.inner, tile.planes)?;
        }
        Ok(())
    }
}
