//! Llama, with its sequence sharded over ranks.
//!
//! Modules and their fields carry the names of Hugging Face's implementation, so that a parameter's
//! path in the module is its name in a weights file.

mod attention;
mod block;
mod config;
mod execution;
mod head;
mod init;
mod megatron;
mod mlp;
mod model;
mod presets;
mod rope;
mod sharded;
mod weights;

pub use attention::SelfAttention;
pub use block::DecoderLayer;
pub use config::{ConfigError, LlamaConfig};
pub use execution::Execution;
pub use head::Head;
pub use mlp::Mlp;
pub use model::{Decoder, Llama};
pub use presets::UnknownPreset;
pub use rope::RotaryEmbedding;
pub use sharded::{Gathering, Row, ShardedLlama};
pub use weights::WeightsError;
