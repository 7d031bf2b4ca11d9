//! Why attention was refused or failed.

use crate::comm::CommError;
use crate::layout::Rank;
use crate::mask::MaskError;
use crate::segment::SegmentError;
use crate::strategy::StrategyError;
use burn::tensor::DType;

/// Why attention was refused, before anything was sent, or failed on the way.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// Grouped-query attention needs whole groups.
    #[error("rank {rank}: {heads} query heads do not divide evenly over {kv_heads} key/value heads")]
    UnevenGroups {
        /// Who was called.
        rank: Rank,
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// A dimension that must agree does not.
    #[error("rank {rank}: {what} is {actual}; expected {expected}")]
    Shape {
        /// Who was called.
        rank: Rank,
        /// Which dimension of which operand.
        what: &'static str,
        /// As it should be.
        expected: usize,
        /// As it is.
        actual: usize,
    },
    /// Query, key and value differ in dtype.
    #[error("rank {rank}: query is {query:?}, key {key:?}, value {value:?}; expected one dtype")]
    DTypes {
        /// Who was called.
        rank: Rank,
        /// Of the query.
        query: DType,
        /// Of the key.
        key: DType,
        /// Of the value.
        value: DType,
    },
    /// A logit scale that is no number.
    #[error("rank {rank}: scale is {scale}; expected a finite number")]
    Scale {
        /// Who was called.
        rank: Rank,
        /// As given.
        scale: f64,
    },
    /// The device cannot compute it.
    #[error("rank {rank}: the device cannot compute this attention: {reason}")]
    Unsupported {
        /// Who was called.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// The mask does not fit the sequence.
    #[error("rank {rank}: {source}")]
    Mask {
        /// Who was called.
        rank: Rank,
        /// Why.
        source: MaskError,
    },
    /// The strategy does not fit the group.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// A checkpoint segment is not what it should be.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// Ranks lost each other.
    #[error(transparent)]
    Comm(#[from] CommError),
}
