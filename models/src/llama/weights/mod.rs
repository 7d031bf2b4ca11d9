//! Weights files in Hugging Face's layout: `model.safetensors` beside `config.json`.

mod names;
mod read;
mod write;

pub(super) use write::WeightsWriter;

use super::config::LlamaConfig;
use burn_distflash::CommError;
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};

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
    /// Ranks that write a model together lost each other.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Tensors that are missing, superfluous, of another shape or another dtype; all of them.
    #[error("{}: {}", path.display(), problems.join("; "))]
    Tensors {
        /// Which file.
        path: PathBuf,
        /// One line each.
        problems: Vec<String>,
    },
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> WeightsError {
    let path = path.to_path_buf();
    |source| WeightsError::Io { path, source }
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
    use crate::llama::Llama;
    use burn::tensor::Device;
    use safetensors::tensor::SafeTensors;
    use std::collections::BTreeMap;
    use std::fs;

    fn tiny(tied: bool) -> LlamaConfig {
        LlamaConfig {
            num_hidden_layers: 2,
            hidden_size: 16,
            head_dim: 8,
            tie_word_embeddings: tied,
            ..Default::default()
        }
    }

    /// Shapes and numbers of all tensors, as somebody else's reader finds them.
    fn tensors(model: &Llama, config: &LlamaConfig) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
        let folder = tempfile::tempdir().unwrap();
        model.save(config, folder.path()).unwrap();
        let bytes = fs::read(folder.path().join(WEIGHTS_FILE)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        file.iter().map(|(name, view)| (name.to_string(), (view.shape().to_vec(), view.data().to_vec()))).collect()
    }

    #[test]
    fn a_model_survives_being_written_and_read() {
        for tied in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let model = Llama::init(&tiny(tied), 7, &Device::flex()).unwrap();
            model.save(&tiny(tied), folder.path()).unwrap();
            let (read, config) = Llama::load(folder.path(), &Device::flex()).unwrap();
            assert_eq!(config, tiny(tied));
            assert_eq!(tensors(&read, &config), tensors(&model, &config));
        }
    }

    #[test]
    fn tensors_have_the_names_and_shapes_of_hugging_face() {
        let written = tensors(&Llama::init(&tiny(false), 0, &Device::flex()).unwrap(), &tiny(false));
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
