//! What to train and how.

use crate::llama::{ConfigError, LlamaConfig};
use crate::method::Method;
use burn::tensor::Device;
use burn_distflash::{Sequence, StrategyError};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Everything that determines a run; `runs/NAME/config.toml` is this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The text; absent for the excerpt that comes with the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    /// Number of ranks, each a thread.
    pub ranks: usize,
    /// Who owns and computes what.
    pub strategy: Method,
    /// Where the ranks compute.
    pub device: DeviceKind,
    /// Tokens of a sequence, over all ranks.
    pub seq_len: usize,
    /// Sequences of a batch.
    pub batch_size: usize,
    /// Optimizer steps.
    pub steps: usize,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// The learning rate falls to this share of the highest.
    pub final_lr_share: f64,
    /// Steps over which the learning rate rises.
    pub warmup_steps: usize,
    /// AdamW's decay of weights per step, times the learning rate.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm.
    pub clip_norm: f64,
    /// Determines initial weights and order of the data.
    pub seed: u64,
    /// Seconds after which a rank that hears nothing from another gives up.
    pub time_limit: u64,
    /// Sizes of the model.
    pub model: LlamaConfig,
}

/// Where ranks compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// Burn's CPU backend in pure Rust.
    Flex,
}

impl DeviceKind {
    /// As Burn knows it, without autodiff.
    #[must_use]
    pub fn device(self) -> Device {
        match self {
            DeviceKind::Flex => Device::flex(),
        }
    }
}

impl Default for TrainConfig {
    /// Ends well below the unigram entropy of English within two minutes on two cores.
    fn default() -> Self {
        Self {
            data: None,
            ranks: 4,
            strategy: Sequence::Balanced.into(),
            device: DeviceKind::Flex,
            seq_len: 1024,
            batch_size: 2,
            steps: 250,
            learning_rate: 3e-3,
            final_lr_share: 0.1,
            warmup_steps: 25,
            weight_decay: 0.1,
            clip_norm: 1.,
            seed: 1,
            time_limit: 60,
            model: LlamaConfig::default(),
        }
    }
}

/// Why a run cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TrainConfigError {
    /// A count of 0.
    #[error("{0} is 0; expected at least 1")]
    Zero(&'static str),
    /// A number outside what it can be.
    #[error("{name} is {value}; expected {expected}")]
    Number {
        /// Which.
        name: &'static str,
        /// As given.
        value: String,
        /// What it can be.
        expected: &'static str,
    },
    /// A strategy whose groups do not divide the ranks.
    #[error(transparent)]
    Strategy(#[from] StrategyError),
    /// Sizes that make no model.
    #[error(transparent)]
    Model(#[from] ConfigError),
}

impl TrainConfig {
    /// Checks what can be checked without the text.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn validate(&self) -> Result<(), TrainConfigError> {
        let counts = [
            ("ranks", self.ranks),
            ("seq_len", self.seq_len),
            ("batch_size", self.batch_size),
            ("steps", self.steps),
            ("time_limit", self.time_limit as usize),
        ];
        if let Some((name, _)) = counts.into_iter().find(|count| count.1 == 0) {
            return Err(TrainConfigError::Zero(name));
        }
        let is_share = (0. ..=1.).contains(&self.final_lr_share);
        let is_decay = self.weight_decay.is_finite() && self.weight_decay >= 0.;
        let positive = |value: f64| value.is_finite() && value > 0.;
        let numbers = [
            ("learning_rate", self.learning_rate, positive(self.learning_rate), "a positive number"),
            ("final_lr_share", self.final_lr_share, is_share, "a number from 0 to 1"),
            ("weight_decay", self.weight_decay, is_decay, "a number of at least 0"),
            ("clip_norm", self.clip_norm, positive(self.clip_norm), "a positive number"),
        ];
        if let Some((name, value, _, expected)) = numbers.into_iter().find(|number| !number.2) {
            return Err(TrainConfigError::Number { name, value: value.to_string(), expected });
        }
        self.strategy.check(self.ranks)?;
        Ok(self.model.validate()?)
    }

    /// The learning rate of `step`, counted from 0: rises linearly over the warm-up, then falls along a
    /// half cosine to its final share at the last step.
    #[must_use]
    pub fn learning_rate_at(&self, step: usize) -> f64 {
        let risen = (step + 1) as f64 / self.warmup_steps.max(1) as f64;
        if risen <= 1. && step < self.warmup_steps {
            return self.learning_rate * risen;
        }
        let falling = self.steps.saturating_sub(self.warmup_steps + 1).max(1) as f64;
        let progress = ((step - self.warmup_steps) as f64 / falling).min(1.);
        let cosine = 0.5 * (1. + (std::f64::consts::PI * progress).cos());
        self.learning_rate * (self.final_lr_share + (1. - self.final_lr_share) * cosine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_rises_to_its_highest_and_falls_to_its_share() {
        let config = TrainConfig { steps: 100, warmup_steps: 10, learning_rate: 2., ..TrainConfig::default() };
        assert!((config.learning_rate_at(0) - 0.2).abs() < 1e-12);
        assert!((config.learning_rate_at(9) - 2.).abs() < 1e-12);
        assert!((config.learning_rate_at(10) - 2.).abs() < 1e-12);
        assert!((config.learning_rate_at(99) - 0.2).abs() < 1e-12);
        let rates: Vec<f64> = (9..100).map(|step| config.learning_rate_at(step)).collect();
        assert!(rates.windows(2).all(|pair| pair[1] <= pair[0]));
    }

    #[test]
    fn no_warm_up_starts_at_the_highest() {
        let config = TrainConfig { steps: 1, warmup_steps: 0, ..TrainConfig::default() };
        assert_eq!(config.learning_rate_at(0), config.learning_rate);
    }

    #[test]
    fn what_cannot_be_is_named() {
        let with = |change: fn(&mut TrainConfig)| {
            let mut config = TrainConfig::default();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(with(|c| c.ranks = 0), "ranks is 0; expected at least 1");
        assert_eq!(with(|c| c.learning_rate = f64::NAN), "learning_rate is NaN; expected a positive number");
        assert_eq!(with(|c| c.final_lr_share = 1.5), "final_lr_share is 1.5; expected a number from 0 to 1");
        assert!(with(|c| c.model.num_key_value_heads = 3).contains("not divisible"));
    }
}
