//! Weights files in Hugging Face's layout: `model.safetensors` beside `config.json`.

use super::config::{ConfigError, LlamaConfig};
use super::model::Llama;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor, TensorData};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

const WEIGHTS_FILE: &str = "model.safetensors";
const CONFIG_FILE: &str = "config.json";

/// Why a model could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not a safetensors file.
    #[error("{}: {source}", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },
    /// Not a configuration we read.
    #[error("{}: {message}", path.display())]
    Config {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// Tensors that are missing, superfluous, of another shape or another dtype; all of them.
    #[error("{}: {}", path.display(), problems.join("; "))]
    Tensors {
        /// Which file.
        path: PathBuf,
        /// One line each.
        problems: Vec<String>,
    },
}

/// Follows a walk through the module and tells the parameter's name in the file.
#[derive(Default)]
struct Names {
    path: Vec<String>,
    /// Types of the enclosing containers.
    containers: Vec<String>,
}

impl Names {
    fn enter(&mut self, name: &str, container: &str) {
        self.path.push(name.to_string());
        self.containers.push(container.to_string());
    }

    fn exit(&mut self) {
        self.path.pop();
        self.containers.pop();
    }

    /// Burn calls a norm's weight `gamma`; Hugging Face calls it `weight` too.
    fn current(&self) -> String {
        let name = self.path.join(".");
        name.strip_suffix(".gamma").map_or(name.clone(), |module| format!("{module}.weight"))
    }

    /// Burn's `Linear` holds `[inputs, outputs]`, the file `[outputs, inputs]`.
    fn is_transposed(&self) -> bool {
        self.containers.last().is_some_and(|container| container == "Struct:Linear")
    }
}

struct Writer {
    names: Names,
    tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
}

impl ModuleVisitor for Writer {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.names.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.names.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let value = if self.names.is_transposed() { value.transpose() } else { value };
        let shape = value.dims().to_vec();
        let bytes = value.into_data_as::<f32>().iter::<f32>().flat_map(f32::to_le_bytes).collect();
        self.tensors.insert(self.names.current(), (shape, bytes));
    }
}

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

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> WeightsError {
    let path = path.to_path_buf();
    |source| WeightsError::Io { path, source }
}

impl Llama {
    /// Writes `model.safetensors` (f32) and `config.json` into `folder`, as transformers reads them.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn save(&self, config: &LlamaConfig, folder: &Path) -> Result<(), WeightsError> {
        fs::create_dir_all(folder).map_err(io_error(folder))?;
        let mut writer = Writer { names: Names::default(), tensors: BTreeMap::new() };
        self.visit(&mut writer);
        let path = folder.join(WEIGHTS_FILE);
        let format = |source| WeightsError::Format { path: path.clone(), source };
        let mut views = Vec::with_capacity(writer.tensors.len());
        for (name, (shape, bytes)) in &writer.tensors {
            views.push((name, TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(format)?));
        }
        let metadata = Some([("format".to_string(), "pt".to_string())].into());
        safetensors::serialize_to_file(views, metadata, &path).map_err(format)?;
        let path = folder.join(CONFIG_FILE);
        let text = serde_json::to_string_pretty(&to_json(config)).expect("plain data");
        fs::write(&path, text + "\n").map_err(io_error(&path))
    }

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

/// What transformers wants to know beyond the sizes.
fn identity() -> [(&'static str, Value); 4] {
    [
        ("architectures", json!(["LlamaForCausalLM"])),
        ("hidden_act", json!("silu")),
        ("model_type", json!("llama")),
        ("torch_dtype", json!("float32")),
    ]
}

fn to_json(config: &LlamaConfig) -> Value {
    let mut value = serde_json::to_value(config).expect("plain data");
    let fields = value.as_object_mut().expect("a struct");
    fields.extend(identity().map(|(name, value)| (name.to_string(), value)));
    value
}

fn from_json(text: &str) -> Result<LlamaConfig, String> {
    let mut value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let fields = value.as_object_mut().ok_or("expected an object")?;
    for (name, expected) in identity() {
        let given = fields.remove(name).unwrap_or_else(|| expected.clone());
        if given != expected {
            return Err(format!("{name} is {given}; expected {expected}"));
        }
    }
    serde_json::from_value(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(tied: bool) -> LlamaConfig {
        LlamaConfig {
            num_hidden_layers: 2,
            hidden_size: 16,
            head_dim: 8,
            tie_word_embeddings: tied,
            ..Default::default()
        }
    }

    fn tensors(model: &Llama) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
        let mut writer = Writer { names: Names::default(), tensors: BTreeMap::new() };
        model.visit(&mut writer);
        writer.tensors
    }

    #[test]
    fn a_model_survives_being_written_and_read() {
        for tied in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let model = Llama::init(&tiny(tied), 7, &Device::flex()).unwrap();
            model.save(&tiny(tied), folder.path()).unwrap();
            let (read, config) = Llama::load(folder.path(), &Device::flex()).unwrap();
            assert_eq!(config, tiny(tied));
            assert_eq!(tensors(&read), tensors(&model));
        }
    }

    #[test]
    fn tensors_have_the_names_and_shapes_of_hugging_face() {
        let written = tensors(&Llama::init(&tiny(false), 0, &Device::flex()).unwrap());
        let shape = |name: &str| written[name].0.clone();
        assert_eq!(shape("model.embed_tokens.weight"), [256, 16]);
        assert_eq!(shape("model.layers.1.self_attn.k_proj.weight"), [2 * 8, 16]);
        assert_eq!(shape("model.layers.0.mlp.down_proj.weight"), [16, 352]);
        assert_eq!(shape("model.layers.0.post_attention_layernorm.weight"), [16]);
        assert_eq!(shape("model.norm.weight"), [16]);
        assert_eq!(shape("lm_head.weight"), [256, 16]);
        assert_eq!(written.len(), 2 * 9 + 3);
    }

    #[test]
    fn every_tensor_that_does_not_fit_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        Llama::init(&tiny(false), 0, &Device::flex()).unwrap().save(&tiny(false), folder.path()).unwrap();
        let other = LlamaConfig { intermediate_size: 8, tie_word_embeddings: true, ..tiny(true) };
        fs::write(folder.path().join(CONFIG_FILE), to_json(&other).to_string()).unwrap();
        let error = Llama::load(folder.path(), &Device::flex()).unwrap_err().to_string();
        assert!(error.contains("lm_head.weight is not part of the model"), "{error}");
        assert_eq!(error.matches("has shape").count(), 6, "{error}");
    }

    #[test]
    fn another_architecture_is_refused_by_name() {
        let error = from_json(r#"{"model_type": "mamba"}"#).unwrap_err();
        assert_eq!(error, r#"model_type is "mamba"; expected "llama""#);
        assert!(from_json(r#"{"rope_scaling": {}}"#).unwrap_err().contains("unknown field `rope_scaling`"));
    }
}
