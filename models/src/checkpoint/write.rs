//! Writing a checkpoint: each rank its own file.

use super::error::{damaged, io_error};
use super::{CheckpointError, FORMAT, FileEntry, INDEX_FILE, Index, KINDS, UnitEntry, tensor_name};
use crate::llama::Row;
use crate::train::LossScale;
use burn_distflash::Communicator;
use safetensors::tensor::{Dtype, TensorView};
use std::fs::{self, File};
use std::path::Path;

/// Writes the checkpoint `folder`, to which each rank gives its part of parameters, first and second moments. All ranks
/// call it together; it exists when they return.
///
/// # Errors
/// If the system refuses, or ranks lose each other: then nothing has that name, or what had it before.
pub fn write(
    folder: &Path,
    step: usize,
    loss_scale: Option<LossScale>,
    rows: &[Vec<Row>; 3],
    group: &dyn Communicator,
) -> Result<(), CheckpointError> {
    let unfinished = folder.with_extension("unfinished");
    let (rank, is_first) = (group.rank(), group.rank() == 0);
    if is_first {
        if unfinished.exists() {
            fs::remove_dir_all(&unfinished).map_err(io_error(&unfinished))?;
        }
        fs::create_dir_all(&unfinished).map_err(io_error(&unfinished))?;
    }
    group.barrier()?;
    let name = format!("rank-{rank}-of-{}.safetensors", group.world_size());
    let own = write_file(&unfinished, name, rows)?;
    let own = serde_json::to_vec(&own).expect("plain data");
    let files = group.gather_bytes("checkpoint", own)?;
    if is_first {
        let files = files.iter().map(|file| serde_json::from_slice(file).expect("a peer's entry")).collect();
        let index = Index { format: FORMAT, step, loss_scale, units: UnitEntry::all(&rows[0]), files };
        let path = unfinished.join(INDEX_FILE);
        let text = serde_json::to_string_pretty(&index).expect("plain data") + "\n";
        fs::write(&path, text).and_then(|()| File::open(&path)?.sync_all()).map_err(io_error(&path))?;
        File::open(&unfinished).and_then(|folder| folder.sync_all()).map_err(io_error(&unfinished))?;
        if folder.exists() {
            // One that was damaged, or the run would not have come here again.
            fs::remove_dir_all(folder).map_err(io_error(folder))?;
        }
        fs::rename(&unfinished, folder).map_err(io_error(folder))?;
    }
    Ok(group.barrier()?)
}

fn write_file(folder: &Path, name: String, rows: &[Vec<Row>; 3]) -> Result<FileEntry, CheckpointError> {
    let path = folder.join(&name);
    let mut tensors = Vec::new();
    for (kind, rows) in KINDS.iter().zip(rows) {
        let named = |row: &Row| (tensor_name(kind, &row.path), row.part.clone().into_data_as::<f32>());
        tensors.extend(rows.iter().map(named));
    }
    let views = tensors.iter().map(|(name, data)| {
        let view = TensorView::new(Dtype::F32, data.shape().to_vec(), data.as_bytes());
        (name, view.expect("as many bytes as the shape says"))
    });
    safetensors::serialize_to_file(views, None, &path).map_err(|error| damaged(&path, error))?;
    File::open(&path).and_then(|file| file.sync_all()).map_err(io_error(&path))?;
    // Of what is on the disk, read back: what memory held is no proof.
    let bytes = fs::read(&path).map_err(io_error(&path))?;
    Ok(FileEntry { name, bytes: bytes.len() as u64, crc32: crc32fast::hash(&bytes) })
}
