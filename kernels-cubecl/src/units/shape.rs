//! How the kernels of single units are shaped.

use crate::problem::{AttentionProblem, Refusal};
use cubecl::client::Client;
use cubecl::prelude::CubeDim;
use std::fmt;

/// Shape of the kernels of single units: a cube of `units_y × units_x` units computes a tile of `outer ×
/// inner` scores at a time. The outer side stays (queries in the forward pass and for `d_query`, keys
/// for `d_key` and `d_value`); the inner side is walked. A unit holds `outer_per_unit × inner_per_unit`
/// scores, and `outer_per_unit` rows of every accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitTiles {
    /// Units along the inner side.
    pub units_x: usize,
    /// Units along the outer side.
    pub units_y: usize,
    /// Rows of the outer side that one unit holds, next to each other.
    pub outer_per_unit: usize,
    /// Rows of the inner side that one unit holds, `units_x` apart.
    pub inner_per_unit: usize,
    /// Columns of the operands that are in shared memory at a time; a multiple of `units_x`.
    pub chunk: usize,
    /// Elements of one head's vector.
    pub head_dim: usize,
}

impl UnitTiles {
    /// The shape for `problem` on the device of `client`.
    ///
    /// # Errors
    /// If the device is too small for it.
    pub(crate) fn select(client: &Client, problem: &AttentionProblem) -> Result<Self, Refusal> {
        let hardware = &client.properties().hardware;
        let available = hardware.max_units_per_cube as usize;
        let head_dim = problem.head_dim;
        // A CPU runs the units of a cube one after another or one a core: one unit does it all.
        let tiles = if available < 64 {
            Self { units_x: 1, units_y: 1, outer_per_unit: 16, inner_per_unit: 16, chunk: 32, head_dim }
        } else {
            Self { units_x: 16, units_y: 16, outer_per_unit: 4, inner_per_unit: 2, chunk: 32, head_dim }
        };
        if tiles.num_units() > available {
            return Err(Refusal::Units { needed: tiles.num_units(), available });
        }
        let (needed, available) = (tiles.shared_bytes(), hardware.max_shared_memory_size);
        if needed > available {
            return Err(Refusal::SharedMemory { needed, available });
        }
        Ok(tiles)
    }

    /// Rows of the outer side of a tile.
    #[must_use]
    pub fn outer(&self) -> usize {
        self.units_y * self.outer_per_unit
    }

    /// Rows of the inner side of a tile.
    #[must_use]
    pub fn inner(&self) -> usize {
        self.units_x * self.inner_per_unit
    }

    /// Units of a cube.
    #[must_use]
    pub fn num_units(&self) -> usize {
        self.units_x * self.units_y
    }

    /// Chunks of columns that make a head's vector; the last may be partly padding.
    #[must_use]
    pub fn num_chunks(&self) -> usize {
        self.head_dim.div_ceil(self.chunk)
    }

    /// Columns of a chunk that one unit accumulates, `units_x` apart.
    #[must_use]
    pub fn columns_per_unit(&self) -> usize {
        self.chunk / self.units_x
    }

    /// Scores one unit holds.
    #[must_use]
    pub fn scores_per_unit(&self) -> usize {
        self.outer_per_unit * self.inner_per_unit
    }

    /// Elements of an accumulator that one unit holds.
    #[must_use]
    pub fn accumulators_per_unit(&self) -> usize {
        self.outer_per_unit * self.num_chunks() * self.columns_per_unit()
    }

    /// Elements from one row of a staged chunk to the next; odd, so that rows fall into different banks.
    #[must_use]
    pub fn chunk_stride(&self) -> usize {
        self.chunk + 1
    }

    /// Elements from one row of a tile of weights to the next.
    #[must_use]
    pub fn weights_stride(&self) -> usize {
        self.inner() + 1
    }

    /// Bytes of shared memory that the largest kernel takes: two staged chunks and two tiles.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        let chunks = (self.outer() + self.inner()) * self.chunk_stride();
        4 * (chunks + 2 * self.outer() * self.weights_stride())
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.units_x as u32, self.units_y as u32)
    }

    /// Loops over a unit's own elements are unrolled where those are registers.
    pub(crate) fn unroll(&self) -> bool {
        self.num_units() > 1
    }
}

impl fmt::Display for UnitTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "units, tiles of {}×{} by {} units, head_dim {} in chunks of {}",
            self.outer(),
            self.inner(),
            self.num_units(),
            self.head_dim,
            self.chunk
        )
    }
}
