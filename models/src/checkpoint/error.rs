//! Why a checkpoint could not be written or read.

use burn::store::RecordError;
use burn_distflash::CommError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not what was once written.
    #[error("{} is damaged: {message}", path.display())]
    Damaged {
        /// Which file or folder.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// Of another model.
    #[error("{} is of another model: {message}", path.display())]
    OtherModel {
        /// Which checkpoint.
        path: PathBuf,
        /// The first difference.
        message: String,
    },
    /// There is none to go on from.
    #[error("{} holds no whole checkpoint", path.display())]
    None {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Ranks lost each other.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Burn cannot say what its optimizer holds.
    #[error("the optimizer's state: {0}")]
    Optimizer(#[from] RecordError),
}

pub(super) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    |source| CheckpointError::Io { path, source }
}

pub(super) fn damaged(path: &Path, message: impl ToString) -> CheckpointError {
    CheckpointError::Damaged { path: path.to_path_buf(), message: message.to_string() }
}
