//! The sizes of a Llama.

use serde::{Deserialize, Serialize};

/// The sizes of a Llama, under the names of Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// Number of tokens the model knows.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Elements of one head's vector.
    pub head_dim: usize,
    /// Added to the mean square before its root is taken.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
}

impl Default for LlamaConfig {
    /// A byte-level Llama of 0.77 M parameters, small enough to train on two cores within two minutes.
    fn default() -> Self {
        Self {
            vocab_size: 256,
            hidden_size: 128,
            intermediate_size: 352,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 32,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.,
            tie_word_embeddings: true,
            initializer_range: 0.02,
        }
    }
}

/// Why sizes do not make a Llama.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A size of 0.
    #[error("{0} is 0; expected at least 1")]
    Zero(&'static str),
    /// Grouped-query attention needs whole groups.
    #[error("num_attention_heads ({heads}) is not divisible by num_key_value_heads ({kv_heads})")]
    UnevenHeads {
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// Rotary embeddings turn pairs of elements.
    #[error("head_dim is {0}; rotary embeddings need an even number")]
    OddHeadDim(usize),
    /// A number that is not finite and positive.
    #[error("{name} is {value}; expected a positive number")]
    NotPositive {
        /// Which.
        name: &'static str,
        /// As given.
        value: String,
    },
}

impl LlamaConfig {
    /// Checks that the sizes make a Llama.
    ///
    /// # Errors
    /// The first that does not.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
        ];
        if let Some((name, _)) = sizes.into_iter().find(|size| size.1 == 0) {
            return Err(ConfigError::Zero(name));
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(ConfigError::UnevenHeads { heads, kv_heads });
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::OddHeadDim(self.head_dim));
        }
        let numbers = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("initializer_range", self.initializer_range),
        ];
        let positive = |value: f64| value.is_finite() && value > 0.;
        match numbers.into_iter().find(|number| !positive(number.1)) {
            Some((name, value)) => Err(ConfigError::NotPositive { name, value: value.to_string() }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid() {
        assert_eq!(LlamaConfig::default().validate(), Ok(()));
    }

    #[test]
    fn sizes_that_make_no_llama_are_named() {
        let with = |change: fn(&mut LlamaConfig)| {
            let mut config = LlamaConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(with(|c| c.num_hidden_layers = 0), "num_hidden_layers is 0; expected at least 1");
        assert!(with(|c| c.num_key_value_heads = 3).contains("(4) is not divisible by num_key_value_heads (3)"));
        assert!(with(|c| c.head_dim = 33).contains("head_dim is 33"));
        assert!(with(|c| c.rope_theta = -1.).contains("rope_theta is -1"));
    }
}
