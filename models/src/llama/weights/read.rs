//! From a weights file to a model.

use super::names::Names;
use super::{CONFIG_FILE, WEIGHTS_FILE, WeightsError, from_json, io_error};
use crate::llama::{ConfigError, Llama, LlamaConfig};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use safetensors::tensor::{Dtype, SafeTensors};
use std::fs;
use std::path::Path;

struct Reader<'a> {
    names: Names,
    file: SafeTensors<'a>,
    unread: Vec<String>,
    problems: Vec<String>,
    device: Device,
}

impl Reader<'_> {
    fn read<const D: usize>(&mut self, name: &str, dims: [usize; D]) -> Result<Tensor<D>, String> {
        let view = self.file.tensor(name).map_err(|_| format!("{name} is missing"))?;
        self.unread.retain(|other| other != name);
        if view.shape() != dims {
            return Err(format!("{name} has shape {:?}, expected {dims:?}", view.shape()));
        }
        if view.dtype() != Dtype::F32 {
            return Err(format!("{name} is {:?}, expected F32", view.dtype()));
        }
        let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("4 bytes"));
        let values: Vec<f32> = view.data().chunks_exact(4).map(number).collect();
        Ok(Tensor::from_data(TensorData::new(values, dims), &self.device))
    }
}

impl ModuleMapper for Reader<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.names.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (name, transposed) = (self.names.current(), self.names.is_transposed());
        let mut dims = param.val().dims();
        if transposed {
            dims.swap(D - 2, D - 1);
        }
        match self.read(&name, dims) {
            Ok(tensor) => param.map(|_| if transposed { tensor.transpose() } else { tensor }),
            Err(problem) => {
                self.problems.push(problem);
                param
            }
        }
    }
}

impl Llama {
    /// Reads what [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// If a file is missing or malformed, or its tensors are not those of the configuration: one error
    /// that lists them all.
    pub fn load(folder: &Path, device: &Device) -> Result<(Self, LlamaConfig), WeightsError> {
        let path = folder.join(CONFIG_FILE);
        let text = fs::read_to_string(&path).map_err(io_error(&path))?;
        let config = from_json(&text).map_err(|message| WeightsError::Config { path: path.clone(), message })?;
        let invalid = |error: ConfigError| WeightsError::Config { path, message: error.to_string() };
        let model = Llama::init(&config, 0, device).map_err(invalid)?;

        let path = folder.join(WEIGHTS_FILE);
        let bytes = fs::read(&path).map_err(io_error(&path))?;
        let format = |source| WeightsError::Format { path: path.clone(), source };
        let file = SafeTensors::deserialize(&bytes).map_err(format)?;
        let unread = file.names().into_iter().map(str::to_string).collect();
        let mut reader = Reader { names: Names::default(), file, unread, problems: Vec::new(), device: device.clone() };
        let model = model.map(&mut reader);
        let mut problems = reader.problems;
        problems.extend(reader.unread.iter().map(|name| format!("{name} is not part of the model")));
        if problems.is_empty() { Ok((model, config)) } else { Err(WeightsError::Tensors { path, problems }) }
    }
}
