//! What a run leaves behind.

use super::config::TrainConfig;
use super::memory::MemoryReport;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// `runs/NAME/`: `config.toml`, `metrics.jsonl`, `memory.json`, `loss.svg`, `schedule.svg`, `checkpoints/` and `model/`.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    metrics: File,
}

/// One line of `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Counted from 1.
    pub step: usize,
    /// Mean over the batch's labels, in nats, before the step.
    pub loss: f64,
    /// As applied in this step.
    pub learning_rate: f64,
    /// Global norm before clipping; none where f16 overflowed and nothing was updated.
    pub gradient_norm: Option<f64>,
    /// Tokens seen so far.
    pub tokens: usize,
    /// Over this step alone, all ranks together.
    pub tokens_per_second: f64,
    /// Since the run began.
    pub elapsed_seconds: f64,
}

/// Why a run folder could not be made or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunFolderError {
    /// Nothing is ever overwritten.
    #[error("{} exists already; nothing was changed: choose another --name", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// A name that would lead elsewhere.
    #[error("`{name}` is not a run's name; expected a plain folder name")]
    BadName {
        /// As given.
        name: String,
    },
    /// A run's own configuration that cannot be read.
    #[error("{}: {message}", path.display())]
    Config {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// Records that do not reach the checkpoint.
    #[error("{} ends with step {last}; expected step {step}, that of the checkpoint", path.display())]
    Metrics {
        /// Which file.
        path: PathBuf,
        /// Of its last whole line.
        last: usize,
        /// Of the checkpoint.
        step: usize,
    },
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

const CONFIG_FILE: &str = "config.toml";
const METRICS_FILE: &str = "metrics.jsonl";

fn line(metrics: &Metrics) -> String {
    serde_json::to_string(metrics).expect("plain data") + "\n"
}

/// Writes a file that is either the old or the new one, whatever happens.
fn replace(path: &Path, text: &str) -> Result<(), RunFolderError> {
    let unfinished = path.with_extension("unfinished");
    fs::write(&unfinished, text).and_then(|()| fs::rename(&unfinished, path)).map_err(io_error(path))
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> RunFolderError {
    let path = path.to_path_buf();
    |source| RunFolderError::Io { path, source }
}

impl RunFolder {
    /// Makes `runs/name`, or the first `runs/train-N` that is free, and writes the configuration there.
    ///
    /// # Errors
    /// If there is such a folder already, or the system refuses.
    pub fn create(runs: &Path, name: Option<&str>, config: &TrainConfig) -> Result<Self, RunFolderError> {
        fs::create_dir_all(runs).map_err(io_error(runs))?;
        let path = match name {
            Some(name) => Self::claim(runs, name)?,
            None => Self::claim_next(runs)?,
        };
        let config_path = path.join(CONFIG_FILE);
        let text = toml::to_string_pretty(config).expect("plain data");
        fs::write(&config_path, text).map_err(io_error(&config_path))?;
        let metrics_path = path.join(METRICS_FILE);
        let metrics = File::create_new(&metrics_path).map_err(io_error(&metrics_path))?;
        Ok(Self { path, metrics })
    }

    fn claim(runs: &Path, name: &str) -> Result<PathBuf, RunFolderError> {
        let is_plain = Path::new(name).file_name().is_some_and(|file| file == name);
        if !is_plain {
            return Err(RunFolderError::BadName { name: name.to_string() });
        }
        let path = runs.join(name);
        // Creating is the check: two runs cannot both find the name free.
        match fs::create_dir(&path) {
            Ok(()) => Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(RunFolderError::Exists { path }),
            Err(error) => Err(io_error(&path)(error)),
        }
    }

    fn claim_next(runs: &Path) -> Result<PathBuf, RunFolderError> {
        let mut number = 1;
        loop {
            match Self::claim(runs, &format!("train-{number}")) {
                Err(RunFolderError::Exists { .. }) => number += 1,
                other => return other,
            }
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the folder of a run that goes on after `step` steps, with `config` from there on: what was recorded of later
    /// steps is forgotten. Also what was recorded of earlier ones.
    ///
    /// # Errors
    /// If the system refuses, or the records are not such.
    pub fn reopen(path: &Path, config: &TrainConfig, step: usize) -> Result<(Self, Vec<Metrics>), RunFolderError> {
        let metrics_path = path.join(METRICS_FILE);
        let text = fs::read_to_string(&metrics_path).map_err(io_error(&metrics_path))?;
        let mut earlier = Vec::new();
        for line in text.lines() {
            // The last line may be cut off; what comes after the checkpoint is made again.
            match serde_json::from_str::<Metrics>(line) {
                Ok(metrics) if metrics.step <= step => earlier.push(metrics),
                _ => break,
            }
        }
        let last = earlier.last().map_or(0, |metrics| metrics.step);
        if last != step {
            return Err(RunFolderError::Metrics { path: metrics_path, last, step });
        }
        replace(&path.join(CONFIG_FILE), &toml::to_string_pretty(config).expect("plain data"))?;
        replace(&metrics_path, &earlier.iter().map(line).collect::<String>())?;
        let metrics = File::options().append(true).open(&metrics_path).map_err(io_error(&metrics_path))?;
        Ok((Self { path: path.to_path_buf(), metrics }, earlier))
    }

    /// The configuration of the run in `path`.
    ///
    /// # Errors
    /// If there is none, or it is none.
    pub fn config(path: &Path) -> Result<TrainConfig, RunFolderError> {
        let path = path.join(CONFIG_FILE);
        let text = fs::read_to_string(&path).map_err(io_error(&path))?;
        let message = |error: toml::de::Error| error.message().replace('\n', " ");
        toml::from_str(&text).map_err(|error| RunFolderError::Config { message: message(error), path })
    }

    /// Writes `memory.json`.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn record_memory(&self, report: &MemoryReport) -> Result<(), RunFolderError> {
        replace(&self.path.join("memory.json"), &(serde_json::to_string_pretty(report).expect("plain data") + "\n"))
    }

    /// Appends a line to `metrics.jsonl`.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn record(&mut self, metrics: &Metrics) -> Result<(), RunFolderError> {
        self.metrics.write_all(line(metrics).as_bytes()).map_err(io_error(&self.path.join(METRICS_FILE)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_exists_is_left_alone() {
        let runs = tempfile::tempdir().unwrap();
        let create = |name| RunFolder::create(runs.path(), name, &TrainConfig::default());
        let first = create(Some("mine")).unwrap();
        fs::write(first.path().join("note"), "precious").unwrap();
        let error = create(Some("mine")).unwrap_err();
        assert!(matches!(error, RunFolderError::Exists { .. }), "{error}");
        assert_eq!(fs::read_to_string(first.path().join("note")).unwrap(), "precious");
        assert!(create(None).unwrap().path().ends_with("train-1"));
        assert!(create(None).unwrap().path().ends_with("train-2"));
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let runs = tempfile::tempdir().unwrap();
        for name in ["", "..", "a/b", "/tmp/x"] {
            let error = RunFolder::create(runs.path(), Some(name), &TrainConfig::default()).unwrap_err();
            assert!(matches!(error, RunFolderError::BadName { .. }), "{name}: {error}");
        }
    }

    #[test]
    fn the_configuration_written_is_the_configuration_read() {
        let runs = tempfile::tempdir().unwrap();
        let config = TrainConfig { data: Some("a text.txt".into()), ranks: 3, ..TrainConfig::default() };
        let folder = RunFolder::create(runs.path(), None, &config).unwrap();
        let text = fs::read_to_string(folder.path().join("config.toml")).unwrap();
        assert_eq!(toml::from_str::<TrainConfig>(&text).unwrap(), config);
    }
}
