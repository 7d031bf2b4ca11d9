//! The whole model.

use super::block::DecoderLayer;
use super::config::{ConfigError, LlamaConfig};
use super::init::Init;
use super::megatron::whole_rope;
use super::rope::RotaryEmbedding;
use burn::module::Module;
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::{Device, Int, Tensor};
use burn_distflash::{AttentionError, AttentionOptions, Context, Sequence};

/// Embedding, layers and final norm.
#[derive(Module, Debug)]
pub struct Decoder {
    embed_tokens: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
}

/// A Llama with its language-model head (Touvron et al., arXiv 2302.13971).
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_distflash::{AttentionOptions, Context};
/// use distflash_models::llama::{Llama, LlamaConfig};
///
/// let device = Device::flex();
/// let model = Llama::init(&LlamaConfig::default(), 0, &device)?;
/// let tokens = Tensor::<2, Int>::from_ints([[72, 105, 33]], &device);
/// let logits = model.forward(tokens, &AttentionOptions::default(), &Context::solo(3))?;
/// assert_eq!(logits.dims(), [1, 3, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Module, Debug)]
pub struct Llama {
    model: Decoder,
    /// Absent where the head is the embedding.
    lm_head: Option<Linear>,
    #[module(skip)]
    head_dim: usize,
    #[module(skip)]
    rope_theta: f64,
}

impl Llama {
    /// A model with weights drawn from `seed`, the same on every device.
    ///
    /// # Errors
    /// If the sizes do not make a Llama.
    pub fn init(config: &LlamaConfig, seed: u64, device: &Device) -> Result<Self, ConfigError> {
        config.validate()?;
        let mut init = Init::new(config, seed, device);
        let model = Decoder {
            embed_tokens: init.embedding(config.vocab_size, config.hidden_size),
            layers: (0..config.num_hidden_layers).map(|_| DecoderLayer::new(config, &mut init)).collect(),
            norm: init.norm(config),
        };
        let untied = !config.tie_word_embeddings;
        let lm_head = untied.then(|| init.linear(config.hidden_size, config.vocab_size));
        Ok(Self { model, lm_head, head_dim: config.head_dim, rope_theta: config.rope_theta })
    }

    /// Logits `[batch, shard_len, vocab_size]` of this rank's `tokens`, `[batch, shard_len]`.
    ///
    /// # Errors
    /// See [`dist_attention`](burn_distflash::dist_attention).
    pub fn forward(
        &self,
        tokens: Tensor<2, Int>,
        options: &AttentionOptions,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        let mut x = self.model.embed_tokens.forward(tokens);
        let positions = context.layout().positions(context.rank());
        let rope = RotaryEmbedding::new(&positions, self.head_dim, self.rope_theta, x.dtype(), &x.device());
        for layer in &self.model.layers {
            x = layer.forward(x, &rope, options, context)?;
        }
        Ok(self.logits(x))
    }

    /// As [`forward`](Self::forward), with layers shared Megatron-LM's way: a baseline to compare with.
    ///
    /// # Errors
    /// If ranks lose each other.
    ///
    /// # Panics
    /// Unless the context's shards are contiguous.
    pub fn forward_megatron(
        &self,
        tokens: Tensor<2, Int>,
        options: &AttentionOptions,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        assert!(context.strategy() == Sequence::Ring.into(), "contiguous shards: gathered tokens are in order");
        let mut x = self.model.embed_tokens.forward(tokens);
        let rope = whole_rope(self.head_dim, self.rope_theta, &x, context);
        for layer in &self.model.layers {
            x = layer.forward_megatron(x, &rope, options, context)?;
        }
        Ok(self.logits(x))
    }

    fn logits(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.model.norm.forward(x);
        match &self.lm_head {
            Some(head) => head.forward(x),
            None => x.matmul(self.model.embed_tokens.weight.val().transpose().unsqueeze()),
        }
    }
}
