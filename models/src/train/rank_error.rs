//! Why a rank stopped.

use crate::checkpoint::CheckpointError;
use crate::llama::WeightsError;
use burn_distflash::{AttentionError, CommError, StrategyError};

/// Why a rank stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// Attention, or a peer.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// Saving or resuming.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Writing the model.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Nothing to go on with: the parameters are those before the step.
    #[error("step {step}: the loss is {loss} and its gradient's norm {gradient_norm}; expected numbers")]
    NotFinite {
        /// Counted from 1.
        step: usize,
        /// Of all ranks.
        loss: f64,
        /// Over all parameters.
        gradient_norm: f64,
    },
}

impl From<CommError> for RankError {
    fn from(error: CommError) -> Self {
        Self::Attention(error.into())
    }
}

impl From<StrategyError> for RankError {
    fn from(error: StrategyError) -> Self {
        Self::Attention(error.into())
    }
}
