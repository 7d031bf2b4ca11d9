//! What can go wrong between ranks.

use super::{PacketSpec, Tag};
use crate::layout::Rank;
use std::time::Duration;

/// Why an exchange failed, as one rank saw it. Ranks are counted in the group concerned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A peer panicked, failed, or finished before its peers were done with it.
    #[error("rank {rank} lost rank {peer} at {at}: {reason}")]
    PeerLost {
        /// Who noticed.
        rank: Rank,
        /// Who is gone.
        peer: Rank,
        /// During which exchange.
        at: Tag,
        /// What the peer left behind.
        reason: String,
    },
    /// A peer sent nothing within the time limit.
    #[error("rank {rank} heard nothing from rank {peer} at {at} within {limit:?}")]
    TimedOut {
        /// Who waited.
        rank: Rank,
        /// For whom.
        peer: Rank,
        /// During which exchange.
        at: Tag,
        /// The time limit.
        limit: Duration,
    },
    /// A peer is somewhere else in the program.
    #[error(
        "rank {rank} expected `{expected}` from rank {peer}, which sent `{actual}`: ranks must call the same operations in the same order"
    )]
    OutOfStep {
        /// Who noticed.
        rank: Rank,
        /// Who disagrees.
        peer: Rank,
        /// What was expected.
        expected: Tag,
        /// What came.
        actual: Tag,
    },
    /// A peer sent something of another shape or dtype.
    #[error("rank {rank} expected {expected} from rank {peer} at {at}, which sent {actual}")]
    WrongPacket {
        /// Who noticed.
        rank: Rank,
        /// Who disagrees.
        peer: Rank,
        /// During which exchange.
        at: Tag,
        /// What was expected.
        expected: Box<PacketSpec>,
        /// What came.
        actual: Box<PacketSpec>,
    },
    /// Two ranks were called with different things.
    #[error("rank {rank} has {field} {ours}, but rank {peer} has {theirs}; all ranks must agree")]
    Disagree {
        /// One rank.
        rank: Rank,
        /// Another.
        peer: Rank,
        /// What differs.
        field: String,
        /// As the first has it.
        ours: String,
        /// As the other has it.
        theirs: String,
    },
    /// A call with arguments that cannot be right on this rank.
    #[error("rank {rank}: {message}")]
    Invalid {
        /// Who was called.
        rank: Rank,
        /// What is wrong and what was expected.
        message: String,
    },
}
