//! From a model to a weights file, part by part.

use super::names::Names;
use super::{CONFIG_FILE, WEIGHTS_FILE, WeightsError, io_error, to_json};
use crate::llama::{Llama, LlamaConfig};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// A model's folder that is being written: parameters come in the order in which a [`Llama`] is visited, as many at a
/// time as are at hand, so that nobody needs to have them all.
///
/// The weights file gets its name when it is complete.
#[derive(Debug)]
pub(in crate::llama) struct WeightsWriter {
    unfinished: PathBuf,
    path: PathBuf,
    file: BufWriter<File>,
    /// Names of tensors that are still to come.
    left: std::vec::IntoIter<String>,
}

impl WeightsWriter {
    /// Writes `config.json` and the head of the weights file.
    ///
    /// # Errors
    /// If the system refuses; so for all that follow.
    pub fn create(config: &LlamaConfig, folder: &Path) -> Result<Self, WeightsError> {
        fs::create_dir_all(folder).map_err(io_error(folder))?;
        let path = folder.join(CONFIG_FILE);
        let text = serde_json::to_string_pretty(&to_json(config)).expect("plain data");
        fs::write(&path, text + "\n").map_err(io_error(&path))?;

        let mut shapes = Shapes::default();
        Llama::empty(config, &Device::flex()).visit(&mut shapes);
        let names: Vec<String> = shapes.tensors.iter().map(|(name, _)| name.clone()).collect();
        let path = folder.join(WEIGHTS_FILE);
        let unfinished = folder.join(format!("{WEIGHTS_FILE}.unfinished"));
        let metadata = Metadata::new(Some([("format".to_string(), "pt".to_string())].into()), shapes.tensors);
        let metadata = metadata.map_err(|source| WeightsError::Format { path: path.clone(), source })?;
        // Padded, so that numbers are aligned.
        let head = serde_json::to_string(&metadata).expect("plain data");
        let head = format!("{head:<width$}", width = head.len().next_multiple_of(8));
        let file = File::create(&unfinished).map_err(io_error(&unfinished))?;
        let mut writer = Self { unfinished, path, file: BufWriter::new(file), left: names.into_iter() };
        writer.put(&(head.len() as u64).to_le_bytes())?;
        writer.put(head.as_bytes())?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), WeightsError> {
        self.file.write_all(bytes).map_err(io_error(&self.unfinished))
    }

    /// Writes the parameters of a module that is found under `path` in the model.
    ///
    /// # Panics
    /// If it is not the next one's turn.
    pub fn write<M: Module>(&mut self, path: &str, module: &M) -> Result<(), WeightsError> {
        let mut values = Values { names: Names::under(path), writer: self, result: Ok(()) };
        module.visit(&mut values);
        values.result
    }

    /// Gives the file its name.
    ///
    /// # Panics
    /// If tensors are missing.
    pub fn finish(mut self) -> Result<(), WeightsError> {
        assert_eq!(self.left.next(), None, "all are written");
        self.file.flush().map_err(io_error(&self.unfinished))?;
        fs::rename(&self.unfinished, &self.path).map_err(io_error(&self.path))
    }
}

/// Names and shapes in the file, without allocating a parameter.
#[derive(Default)]
struct Shapes {
    names: Names,
    tensors: Vec<(String, TensorInfo)>,
    end: usize,
}

impl ModuleVisitor for Shapes {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.names.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let mut shape = param.shape().as_slice().to_vec();
        if self.names.is_transposed() {
            shape.reverse();
        }
        let start = self.end;
        self.end += 4 * shape.iter().product::<usize>();
        self.tensors
            .push((self.names.current(), TensorInfo { dtype: Dtype::F32, shape, data_offsets: (start, self.end) }));
    }
}

struct Values<'a> {
    names: Names,
    writer: &'a mut WeightsWriter,
    /// The first that failed.
    result: Result<(), WeightsError>,
}

impl ModuleVisitor for Values<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.names.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        assert_eq!(self.writer.left.next(), Some(self.names.current()), "in the model's order");
        if self.result.is_err() {
            return;
        }
        let value = param.val();
        let value = if self.names.is_transposed() { value.transpose() } else { value };
        let bytes: Vec<u8> = value.into_data_as::<f32>().iter::<f32>().flat_map(f32::to_le_bytes).collect();
        self.result = self.writer.put(&bytes);
    }
}

impl Llama {
    /// Writes `model.safetensors` (f32) and `config.json` into `folder`, as transformers reads them.
    ///
    /// # Errors
    /// If the system refuses.
    ///
    /// # Panics
    /// If `config` is another model's.
    pub fn save(&self, config: &LlamaConfig, folder: &Path) -> Result<(), WeightsError> {
        let mut writer = WeightsWriter::create(config, folder)?;
        writer.write("", self)?;
        writer.finish()
    }
}
