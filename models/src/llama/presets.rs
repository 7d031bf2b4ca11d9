//! Sizes that have names.

use super::config::LlamaConfig;

/// A name that is no preset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown model `{0}`; expected {names}", names = LlamaConfig::PRESETS.join(", "))]
pub struct UnknownPreset(String);

impl LlamaConfig {
    /// Names that [`preset`](Self::preset) knows. `llama-7b-33h` and the like are the variants of the
    /// DistFlashAttn paper: Llama-7B with so many heads of 128, `gqa` with 8 key/value heads.
    pub const PRESETS: [&'static str; 10] = [
        "tiny",
        "smollm2-135m",
        "llama-7b",
        "llama3-8b",
        "llama-7b-gqa",
        "llama-7b-33h",
        "llama-7b-16h",
        "llama-7b-8h",
        "llama-7b-4h",
        "llama-7b-2h",
    ];

    /// The sizes known as `name`.
    ///
    /// # Errors
    /// If none are.
    ///
    /// ```
    /// use distflash_models::llama::LlamaConfig;
    ///
    /// let model = LlamaConfig::preset("llama3-8b")?;
    /// assert_eq!(model.num_parameters(), 8_030_261_248);
    /// # Ok::<(), distflash_models::llama::UnknownPreset>(())
    /// ```
    pub fn preset(name: &str) -> Result<Self, UnknownPreset> {
        let heads_of_7b = |heads, kv_heads| Self {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_hidden_layers: 32,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: 128,
            tie_word_embeddings: false,
            ..Self::default()
        };
        match name {
            "tiny" => Ok(Self::default()),
            "smollm2-135m" => Ok(Self {
                vocab_size: 49_152,
                hidden_size: 576,
                intermediate_size: 1536,
                num_hidden_layers: 30,
                num_attention_heads: 9,
                num_key_value_heads: 3,
                head_dim: 64,
                rope_theta: 100_000.,
                initializer_range: 1. / 24.,
                ..Self::default()
            }),
            "llama3-8b" => {
                Ok(Self { vocab_size: 128_256, intermediate_size: 14_336, rope_theta: 500_000., ..heads_of_7b(32, 8) })
            }
            "llama-7b" => Ok(heads_of_7b(32, 32)),
            "llama-7b-gqa" => Ok(heads_of_7b(32, 8)),
            "llama-7b-33h" => Ok(heads_of_7b(33, 33)),
            "llama-7b-16h" => Ok(heads_of_7b(16, 16)),
            "llama-7b-8h" => Ok(heads_of_7b(8, 8)),
            "llama-7b-4h" => Ok(heads_of_7b(4, 4)),
            "llama-7b-2h" => Ok(heads_of_7b(2, 2)),
            _ => Err(UnknownPreset(name.to_string())),
        }
    }

    /// Weights of one layer's linear maps: what a token is multiplied by there.
    #[must_use]
    pub fn layer_parameters(&self) -> usize {
        let (queries, keys) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        self.hidden_size * (2 * queries + 2 * keys + 3 * self.intermediate_size)
    }

    /// All weights.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        let embeddings = if self.tie_word_embeddings { 1 } else { 2 };
        let norms = (2 * self.num_hidden_layers + 1) * self.hidden_size;
        self.num_hidden_layers * self.layer_parameters() + embeddings * self.vocab_size * self.hidden_size + norms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_a_valid_model_of_the_size_it_is_known_for() {
        for name in LlamaConfig::PRESETS {
            assert_eq!(LlamaConfig::preset(name).unwrap().validate(), Ok(()), "{name}");
        }
        let size = |name| LlamaConfig::preset(name).unwrap().num_parameters();
        assert_eq!((size("llama-7b"), size("smollm2-135m")), (6_738_415_616, 134_515_008));
        assert!(LlamaConfig::preset("gpt-2").unwrap_err().to_string().contains("`gpt-2`; expected tiny, smollm2-135m"));
    }
}
