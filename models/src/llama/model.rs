//! The whole model.

use super::block::DecoderLayer;
use super::config::{ConfigError, LlamaConfig};
use super::execution::Execution;
use super::head::Head;
use super::init::Init;
use super::megatron::whole_rope;
use super::rope::RotaryEmbedding;
use burn::module::Module;
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::{Device, Int, Tensor};
use burn_distflash::{AttentionError, Context, Sequence, segment};

/// Embedding, layers and final norm.
#[derive(Module, Debug)]
pub struct Decoder {
    pub(super) embed_tokens: Embedding,
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) norm: RmsNorm,
}

/// A Llama with its language-model head (Touvron et al., arXiv 2302.13971).
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_distflash::Context;
/// use distflash_models::llama::{Execution, Llama, LlamaConfig};
///
/// let device = Device::flex();
/// let model = Llama::init(&LlamaConfig::default(), 0, &device)?;
/// let tokens = Tensor::<2, Int>::from_ints([[72, 105, 33]], &device);
/// let logits = model.forward(tokens, &Execution::default(), &Context::solo(3))?;
/// assert_eq!(logits.dims(), [1, 3, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Module, Debug)]
pub struct Llama {
    pub(super) model: Decoder,
    /// Absent where the head is the embedding.
    pub(super) lm_head: Option<Linear>,
    #[module(skip)]
    pub(super) head_dim: usize,
    #[module(skip)]
    pub(super) rope_theta: f64,
}

impl Llama {
    /// A model with weights drawn from `seed`, the same on every device.
    ///
    /// # Errors
    /// If the sizes do not make a Llama.
    pub fn init(config: &LlamaConfig, seed: u64, device: &Device) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self::with(config, &mut Init::new(config, seed, device)))
    }

    /// A model whose weights are zeros until something else is put in their place: nothing is drawn, and nothing
    /// allocated before it is asked for.
    ///
    /// # Panics
    /// If the sizes do not make a Llama.
    #[must_use]
    pub fn empty(config: &LlamaConfig, device: &Device) -> Self {
        config.validate().expect("sizes of a Llama");
        Self::with(config, &mut Init::zeros(device))
    }

    fn with(config: &LlamaConfig, init: &mut Init) -> Self {
        let model = Decoder {
            embed_tokens: init.embedding(config.vocab_size, config.hidden_size),
            layers: (0..config.num_hidden_layers).map(|_| DecoderLayer::new(config, init)).collect(),
            norm: init.norm(config),
        };
        let untied = !config.tie_word_embeddings;
        let lm_head = untied.then(|| init.linear(config.hidden_size, config.vocab_size));
        Self { model, lm_head, head_dim: config.head_dim, rope_theta: config.rope_theta }
    }

    /// Logits `[batch, shard_len, vocab_size]` of this rank's `tokens`, `[batch, shard_len]`.
    ///
    /// # Errors
    /// See [`dist_attention`](burn_distflash::dist_attention).
    pub fn forward(
        &self,
        tokens: Tensor<2, Int>,
        execution: &Execution,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        Ok(self.head().logits(self.hidden(tokens, execution, context)?))
    }

    /// The loss of this rank's `tokens`, summed over those whose label is not [`IGNORED`](crate::loss::IGNORED), without
    /// ever holding more than a tile's logits. Both are `[batch, shard_len]`.
    ///
    /// # Errors
    /// See [`dist_attention`](burn_distflash::dist_attention).
    pub fn loss(
        &self,
        [tokens, labels]: [Tensor<2, Int>; 2],
        execution: &Execution,
        context: &Context,
    ) -> Result<Tensor<1>, AttentionError> {
        self.head().loss(self.hidden(tokens, execution, context)?, labels, execution)
    }

    /// The residual stream after all layers.
    fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        execution: &Execution,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        self.decode(self.model.embed_tokens.forward(tokens), execution, context)
    }

    /// The layers alone: from what goes into the first to what comes out of the last, `[batch, shard_len, hidden_size]`.
    ///
    /// # Errors
    /// See [`dist_attention`](burn_distflash::dist_attention).
    pub fn decode(
        &self,
        mut x: Tensor<3>,
        execution: &Execution,
        context: &Context,
    ) -> Result<Tensor<3>, AttentionError> {
        let rope = rope(self.head_dim, self.rope_theta, &x, context);
        for (i, layer) in self.model.layers.iter().enumerate() {
            let (rope, context, of_layer) = (rope.clone(), context.clone(), execution.clone());
            x = segment(layer, x, execution.policy(i), move |layer: &DecoderLayer, x| {
                layer.forward(x, &rope, &of_layer, &context)
            })?;
        }
        Ok(x)
    }

    /// What follows the layers; its parameters are those of the model.
    pub(super) fn head(&self) -> Head {
        let is_tied = self.lm_head.is_none();
        Head {
            norm: self.model.norm.clone(),
            lm_head: self.lm_head.clone(),
            embedding: is_tied.then(|| self.model.embed_tokens.clone()),
        }
    }

    /// As [`loss`](Self::loss), with layers shared Megatron-LM's way: a baseline to compare with.
    ///
    /// # Errors
    /// If ranks lose each other.
    ///
    /// # Panics
    /// Unless the context's shards are contiguous.
    pub fn loss_megatron(
        &self,
        [tokens, labels]: [Tensor<2, Int>; 2],
        execution: &Execution,
        context: &Context,
    ) -> Result<Tensor<1>, AttentionError> {
        assert!(context.strategy() == Sequence::Ring.into(), "contiguous shards: gathered tokens are in order");
        let mut x = self.model.embed_tokens.forward(tokens);
        let rope = whole_rope(self.head_dim, self.rope_theta, &x, context);
        for layer in &self.model.layers {
            x = layer.forward_megatron(x, &rope, &execution.attention, context)?;
        }
        self.head().loss(x, labels, execution)
    }
}

/// The rotary embedding of this rank's tokens.
pub(super) fn rope(head_dim: usize, theta: f64, like: &Tensor<3>, context: &Context) -> RotaryEmbedding {
    let positions = context.layout().positions(context.rank());
    RotaryEmbedding::new(&positions, head_dim, theta, like.dtype(), &like.device())
}
