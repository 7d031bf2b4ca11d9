//! Reading a checkpoint, by any number of ranks.

use super::error::{damaged, io_error};
use super::{CheckpointError, FORMAT, INDEX_FILE, Index, KINDS, UnitEntry, tensor_name};
use crate::llama::{Row, ShardedLlama};
use crate::train::LossScale;
use burn::tensor::{DType, Tensor, TensorData};
use memmap2::Mmap;
use safetensors::tensor::SafeTensors;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A whole checkpoint, its files mapped into memory.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    index: Index,
    files: Arc<[Mmap]>,
}

impl Checkpoint {
    /// Opens the checkpoint `folder` and checks all of it.
    ///
    /// # Errors
    /// If a file is missing or is not what was written, named.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(INDEX_FILE);
        let text = fs::read_to_string(&path).map_err(io_error(&path))?;
        let index: Index = serde_json::from_str(&text).map_err(|error| damaged(&path, error))?;
        if index.format != FORMAT {
            return Err(damaged(&path, format!("its format is {}; expected {FORMAT}", index.format)));
        }
        let mut files = Vec::with_capacity(index.files.len());
        for entry in &index.files {
            let path = folder.join(&entry.name);
            let file = File::open(&path).map_err(io_error(&path))?;
            // SAFETY: nothing in this program writes to a finished checkpoint. Somebody else who did while it is read
            // would change numbers, which are checked here, and no more: they are only ever copied.
            let map = unsafe { Mmap::map(&file) }.map_err(io_error(&path))?;
            if map.len() as u64 != entry.bytes {
                return Err(damaged(&path, format!("it has {} bytes; expected {}", map.len(), entry.bytes)));
            }
            if crc32fast::hash(&map) != entry.crc32 {
                return Err(damaged(&path, "its bytes are not those that were written (CRC-32)"));
            }
            files.push(map);
        }
        Ok(Self { path: folder.to_path_buf(), index, files: files.into() })
    }

    /// Steps made.
    #[must_use]
    pub fn step(&self) -> usize {
        self.index.step
    }

    /// What the loss was multiplied by.
    #[must_use]
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.index.loss_scale
    }

    /// Parameters, first and second moments of `rank` of `world_size`, as models like `model`.
    ///
    /// # Errors
    /// If it is of another model.
    pub fn read(
        &self,
        model: &ShardedLlama,
        rank: usize,
        world_size: usize,
    ) -> Result<[ShardedLlama; 3], CheckpointError> {
        let rows = model.rows();
        let units = UnitEntry::all(&rows);
        if units != self.index.units {
            let differs = units.iter().zip(&self.index.units).find(|(ours, theirs)| ours != theirs);
            let message = differs.map_or_else(
                || format!("it has {} units; expected {}", self.index.units.len(), units.len()),
                |(ours, theirs)| {
                    format!(
                        "{} with {} parameters; expected {} with {}",
                        theirs.path, theirs.num_parameters, ours.path, ours.num_parameters
                    )
                },
            );
            return Err(CheckpointError::OtherModel { path: self.path.clone(), message });
        }
        let files: Vec<SafeTensors<'_>> = self
            .files
            .iter()
            .map(|file| SafeTensors::deserialize(file).map_err(|error| damaged(&self.path, error)))
            .collect::<Result<_, _>>()?;
        let mut models = Vec::with_capacity(KINDS.len());
        for kind in KINDS {
            let parts = rows.iter().map(|row| self.part(&files, kind, row, rank, world_size));
            models.push(model.clone().with_rows(parts.collect::<Result<_, _>>()?));
        }
        Ok(models.try_into().expect("one of each kind"))
    }

    /// The numbers of `row`'s unit that lie in this rank's part, from the files of the ranks that had them.
    fn part(
        &self,
        files: &[SafeTensors<'_>],
        kind: &str,
        row: &Row,
        rank: usize,
        world_size: usize,
    ) -> Result<Tensor<1>, CheckpointError> {
        let [len] = row.part.dims();
        debug_assert_eq!(len, row.num_parameters.div_ceil(world_size).max(1));
        let wanted = rank * len..(rank + 1) * len;
        let mut bytes = Vec::with_capacity(4 * len);
        let mut start = 0;
        for file in files {
            let tensor = file.tensor(&tensor_name(kind, &row.path)).map_err(|error| damaged(&self.path, error))?;
            let data = tensor.data();
            let end = start + data.len() / 4;
            let (from, to) = (wanted.start.max(start), wanted.end.min(end));
            if from < to {
                bytes.extend_from_slice(&data[4 * (from - start)..4 * (to - start)]);
            }
            start = end;
        }
        // Parts are filled up with zeros behind the last parameter; another world may need more of them.
        bytes.resize(4 * len, 0);
        Ok(Tensor::from_data(TensorData::from_bytes_vec(bytes, [len], DType::F32), &row.part.device()))
    }
}
