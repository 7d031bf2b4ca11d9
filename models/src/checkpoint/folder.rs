//! The checkpoints of a run.

use super::error::io_error;
use super::{Checkpoint, CheckpointError};
use std::fs;
use std::path::{Path, PathBuf};

/// A run's folder of checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    path: PathBuf,
    /// So many are kept, at least one.
    keep: usize,
}

/// The newest whole checkpoint.
#[derive(Debug)]
pub struct Latest {
    /// It.
    pub checkpoint: Checkpoint,
    /// What is wrong with newer ones.
    pub damaged: Vec<CheckpointError>,
}

impl Checkpoints {
    /// Those of the run folder `run`, of which `keep` are kept.
    #[must_use]
    pub fn new(run: &Path, keep: usize) -> Self {
        Self { path: run.join("checkpoints"), keep: keep.max(1) }
    }

    /// The folder of one after `step` steps.
    #[must_use]
    pub fn folder(&self, step: usize) -> PathBuf {
        self.path.join(format!("step-{step:06}"))
    }

    /// Steps of which there is a folder, ascending.
    fn steps(&self) -> Result<Vec<usize>, CheckpointError> {
        let mut steps = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(io_error(&self.path))? {
            let name = entry.map_err(io_error(&self.path))?.file_name();
            steps.extend(name.to_str().and_then(|name| name.strip_prefix("step-")?.parse::<usize>().ok()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Removes all but the newest.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn prune(&self) -> Result<(), CheckpointError> {
        let steps = self.steps()?;
        for &step in &steps[..steps.len().saturating_sub(self.keep)] {
            let folder = self.folder(step);
            fs::remove_dir_all(&folder).map_err(io_error(&folder))?;
        }
        Ok(())
    }

    /// The newest that is whole.
    ///
    /// # Errors
    /// If there is none: what is wrong with the newest.
    pub fn latest(&self) -> Result<Latest, CheckpointError> {
        let none = || CheckpointError::None { path: self.path.clone() };
        let steps = if self.path.exists() { self.steps()? } else { Vec::new() };
        let mut damaged = Vec::new();
        for step in steps.into_iter().rev() {
            match Checkpoint::open(&self.folder(step)) {
                Ok(checkpoint) => return Ok(Latest { checkpoint, damaged }),
                Err(error) => damaged.push(error),
            }
        }
        Err(damaged.into_iter().next().unwrap_or_else(none))
    }
}
