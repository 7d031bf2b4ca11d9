//! Checkpoints of a run: what each rank has, written by that rank, and readable by any number of ranks.
//!
//! ```text
//! runs/NAME/checkpoints/step-000100/
//!   rank-0-of-4.safetensors   parameters/UNIT, moment_1/UNIT, moment_2/UNIT: this rank's part of each unit's row
//!   rank-1-of-4.safetensors   …
//!   checkpoint.json           the step, all units with their lengths, and size and CRC of each file
//! ```
//!
//! A checkpoint is written into `step-000100.unfinished` and gets its name when all of it is on the disk: a folder with
//! that name is whole, unless something happened to it later, which sizes and CRCs tell.

mod error;
mod folder;
mod moments;
mod read;
mod write;

pub use error::CheckpointError;
pub use folder::{Checkpoints, Latest};
pub use moments::{moments, state_bytes, with_moments};
pub use read::Checkpoint;
pub use write::write;

use crate::llama::Row;
use crate::train::LossScale;
use serde::{Deserialize, Serialize};

/// Kinds of numbers there are of each unit.
const KINDS: [&str; 3] = ["parameters", "moment_1", "moment_2"];

const INDEX_FILE: &str = "checkpoint.json";

/// A unit's row in a file.
fn tensor_name(kind: &str, path: &str) -> String {
    format!("{kind}/{path}")
}

/// What a checkpoint says about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    /// Of this layout.
    format: u32,
    /// Steps made.
    step: usize,
    /// What the loss is multiplied by in f16.
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<LossScale>,
    /// In the model's order.
    units: Vec<UnitEntry>,
    /// By rank.
    files: Vec<FileEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnitEntry {
    path: String,
    num_parameters: usize,
}

impl UnitEntry {
    fn all(rows: &[Row]) -> Vec<Self> {
        rows.iter().map(|row| Self { path: row.path.clone(), num_parameters: row.num_parameters }).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    name: String,
    bytes: u64,
    crc32: u32,
}

const FORMAT: u32 = 1;
