//! Ranks in two axes: those that share a sequence, and those that have other sequences.

use crate::comm::{CommError, Communicator};
use std::sync::Arc;

/// A world of `data_parallel × context_parallel` ranks: consecutive ranks share a sequence, and every
/// `context_parallel`-th rank has the same place in another.
///
/// A loss that is divided by the number of labels of *all* ranks, and gradients that are summed over all ranks, are those
/// of the mean over the whole batch, whatever the mesh.
#[derive(Clone, Debug)]
pub struct Mesh {
    world: Arc<dyn Communicator>,
    context: Arc<dyn Communicator>,
    data_rank: usize,
    data_parallel: usize,
}

/// Why there is no mesh.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// Ranks that do not divide.
    #[error("{world_size} ranks cannot be shared by {data_parallel} groups; expected a number that divides them")]
    Uneven {
        /// Ranks there are.
        world_size: usize,
        /// As asked for.
        data_parallel: usize,
    },
    /// Ranks lost each other.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl Mesh {
    /// The mesh of all ranks of `world`, of which `data_parallel` groups have sequences of their own.
    ///
    /// # Errors
    /// If the ranks do not divide into so many groups, or are lost.
    pub fn new(world: Arc<dyn Communicator>, data_parallel: usize) -> Result<Self, MeshError> {
        let world_size = world.world_size();
        if data_parallel == 0 || !world_size.is_multiple_of(data_parallel) {
            return Err(MeshError::Uneven { world_size, data_parallel });
        }
        let data_rank = world.rank() / (world_size / data_parallel);
        let context = if data_parallel == 1 { world.clone() } else { world.split(data_rank)? };
        Ok(Self { world, context, data_rank, data_parallel })
    }

    /// All ranks: over these, gradients are summed and parameters spread.
    #[must_use]
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// The ranks that share this rank's sequence: those of its [`Context`](crate::Context).
    #[must_use]
    pub fn context(&self) -> &Arc<dyn Communicator> {
        &self.context
    }

    /// Which of the groups this rank is in.
    #[must_use]
    pub fn data_rank(&self) -> usize {
        self.data_rank
    }

    /// Groups with sequences of their own.
    #[must_use]
    pub fn data_parallel(&self) -> usize {
        self.data_parallel
    }
}
