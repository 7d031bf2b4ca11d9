//! How a model is run.

use crate::loss::LossOptions;
use burn_distflash::{AttentionOptions, Checkpointing, Policy};

/// How a model is run. What it computes does not depend on it, but for the loss's own options.
#[derive(Clone, Debug, PartialEq)]
pub struct Execution {
    /// Who sees whom, and which kernels.
    pub attention: AttentionOptions,
    /// What each layer keeps for backward; the last stands for all layers beyond.
    pub policies: Vec<Policy>,
    /// Tokens of which the MLP's inner width exists at a time; `None` for all.
    pub mlp_tile: Option<usize>,
    /// Tokens of which logits exist at a time.
    pub loss_tile: usize,
    /// What the loss adds.
    pub loss: LossOptions,
}

impl Default for Execution {
    /// Causal; everything is kept; logits of 2048 tokens at a time.
    fn default() -> Self {
        Self {
            attention: AttentionOptions::default(),
            policies: vec![Checkpointing::Store.into()],
            mlp_tile: None,
            loss_tile: 2048,
            loss: LossOptions::default(),
        }
    }
}

impl Execution {
    /// With the same policy for every layer.
    #[must_use]
    pub fn checkpointed(policy: impl Into<Policy>) -> Self {
        Self { policies: vec![policy.into()], ..Self::default() }
    }

    /// The policy of a layer.
    pub(super) fn policy(&self, layer: usize) -> Policy {
        let policy = self.policies.get(layer).or(self.policies.last());
        policy.copied().unwrap_or(Checkpointing::Store.into())
    }
}
