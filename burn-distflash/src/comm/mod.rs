//! How ranks talk: the one trait the executor knows, and its transports.
//!
//! Every wait has a time limit, and every message carries a [`Tag`] that the receiver compares with
//! what it expects. A lost peer, a stalled one, or one that does something else becomes an error that
//! names rank, peer and step on every rank; none of them hangs.

mod collectives;
mod error;
pub mod local;
mod packet;

pub use error::CommError;
pub use packet::{Packet, PacketSpec};

use crate::layout::Rank;
use burn::tensor::Tensor;
use std::fmt;
use std::sync::Arc;

/// Names one exchange, the same on all ranks that take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// What it is for, such as `attention forward`.
    pub operation: &'static str,
    /// The how-many-eth operation of this group it belongs to.
    pub call: u64,
    /// Its place within the operation: a ring step, or a round of a collective.
    pub step: usize,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, call {}, step {}", self.operation, self.call, self.step)
    }
}

/// The receives of an exchange that was posted; [`wait`](Self::wait) for them.
pub struct Pending(Box<dyn FnOnce() -> Result<Vec<Packet>, CommError> + Send>);

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

impl Pending {
    /// What to do when waited for; for implementors of [`Communicator`].
    #[must_use]
    pub fn new(wait: impl FnOnce() -> Result<Vec<Packet>, CommError> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// What was received, in the order it was asked for.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn wait(self) -> Result<Vec<Packet>, CommError> {
        (self.0)()
    }
}

/// A rank's end of a group.
///
/// All ranks must call the same operations in the same order; a rank that does not is told so. The
/// reductions add in order of rank, so every rank gets the same bits, and so does every run. Results
/// are not tracked by autodiff.
pub trait Communicator: fmt::Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// The number of the next operation. Ranks that agree on the order of operations agree on it.
    fn next_call(&self) -> u64;

    /// Posts sends and receives as one group and returns at once; the receives are waited for later.
    /// Packets between two ranks arrive in the order they were sent.
    ///
    /// # Errors
    /// If this rank or a peer has failed.
    fn exchange(
        &self,
        tag: Tag,
        sends: Vec<(Rank, Packet)>,
        receives: Vec<(Rank, PacketSpec)>,
    ) -> Result<Pending, CommError>;

    /// Ranks that give the same `color` form a group of their own, in the order they have here.
    ///
    /// # Errors
    /// See [`CommError`].
    fn split(&self, color: usize) -> Result<Arc<dyn Communicator>, CommError>;

    /// Takes this rank out of the group because of `reason`: its peers' waits end with an error that
    /// repeats it, and every later call here returns it. The first reason stays.
    fn fail(&self, reason: &CommError);

    /// The error this rank failed with, if it did.
    ///
    /// # Errors
    /// That error.
    fn check(&self) -> Result<(), CommError>;

    /// Bytes of tensors this rank has sent so far.
    fn bytes_sent(&self) -> u64;

    /// The sum of all ranks' tensors, on every rank.
    ///
    /// # Errors
    /// See [`CommError`]; so for all that follow.
    fn all_reduce(&self, tensor: Tensor<1>) -> Result<Tensor<1>, CommError> {
        collectives::all_reduce(self, tensor)
    }

    /// All ranks' tensors, which may differ in length, in order of rank.
    fn all_gather(&self, tensor: Tensor<1>) -> Result<Vec<Tensor<1>>, CommError> {
        collectives::all_gather(self, tensor)
    }

    /// As [`all_gather`](Self::all_gather), whose packets are waited for later. What this group does meanwhile must not
    /// receive anything: packets arrive in order.
    fn start_all_gather(&self, tensor: Tensor<1>) -> Result<Pending, CommError> {
        collectives::start_all_gather(self, tensor)
    }

    /// The sum of all ranks' tensors, of which this rank keeps part `rank` of the given lengths.
    fn reduce_scatter(&self, tensor: Tensor<1>, lens: &[usize]) -> Result<Tensor<1>, CommError> {
        collectives::reduce_scatter(self, tensor, lens)
    }

    /// Sends `tensors[r]` to rank `r` and returns what each rank sent here, in order of rank.
    fn all_to_all(&self, tensors: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, CommError> {
        collectives::all_to_all(self, tensors)
    }

    /// `root`'s tensor, on every rank. The others give one of the same length and dtype.
    fn broadcast(&self, tensor: Tensor<1>, root: Rank) -> Result<Tensor<1>, CommError> {
        collectives::broadcast(self, tensor, root)
    }

    /// All ranks' bytes, in order of rank: small things said on the host.
    fn gather_bytes(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        collectives::gather_bytes(self, operation, bytes)
    }

    /// Returns once every rank has called it.
    fn barrier(&self) -> Result<(), CommError> {
        self.gather_bytes("barrier", Vec::new()).map(drop)
    }
}
