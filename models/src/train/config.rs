//! What to train and how.

use crate::llama::{ConfigError, Execution, LlamaConfig};
use crate::loss::LossOptions;
use crate::method::Method;
use burn::tensor::{DType, Device};
use burn_distflash::{Checkpointing, Sequence, Sharding, Strategy, StrategyError};
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
    /// Groups of ranks that have sequences of the batch to themselves; the ranks of a group share theirs.
    pub data_parallel: usize,
    /// What each layer keeps for backward.
    pub checkpointing: Checkpointing,
    /// What is spread over ranks.
    pub sharding: Sharding,
    /// What layers compute in, where parameters are spread.
    pub precision: Precision,
    /// Tokens of which an MLP's inner width exists at a time; 0 for all.
    pub mlp_tile: usize,
    /// Tokens of which logits exist at a time.
    pub loss_tile: usize,
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
    /// Steps from one checkpoint to the next; 0 for none.
    pub save_every: usize,
    /// Checkpoints that are kept, the newest.
    pub keep: usize,
    /// What the loss adds.
    pub loss: LossOptions,
    /// Sizes of the model.
    pub model: LlamaConfig,
}

/// What layers compute in.
///
/// | | `f32` | `bf16` | `f16` |
/// |---|---|---|---|
/// | parameters that are updated, moments, sums of gradients over ranks and tiles | f32 | f32 | f32 |
/// | parameters as layers see them, activations, their gradients, what travels of them | f32 | bf16 | f16 |
/// | attention's accumulators, partials and lse; softmax and loss; mean squares of norms | f32 | f32 | f32 |
/// | what the loss is multiplied by before backward ([`LossScale`](super::LossScale)) | 1 | 1 | what overflow allows |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// Single.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Precision {
    /// As Burn knows it.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
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
            data_parallel: 1,
            checkpointing: Checkpointing::Store,
            sharding: Sharding::None,
            precision: Precision::F32,
            mlp_tile: 0,
            loss_tile: 2048,
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
            save_every: 0,
            keep: 2,
            loss: LossOptions::default(),
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
    /// Groups that do not divide the ranks or the batch.
    #[error("data_parallel is {data_parallel}; expected a number that divides {what} ({count})")]
    DataParallel {
        /// As given.
        data_parallel: usize,
        /// What it does not divide.
        what: &'static str,
        /// Of which there are so many.
        count: usize,
    },
    /// Settings that do not go together.
    #[error("{0}")]
    Together(&'static str),
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
            ("data_parallel", self.data_parallel),
            ("loss_tile", self.loss_tile),
            ("keep", self.keep),
        ];
        if let Some((name, _)) = counts.into_iter().find(|count| count.1 == 0) {
            return Err(TrainConfigError::Zero(name));
        }
        let is_share = (0. ..=1.).contains(&self.final_lr_share);
        let is_decay = self.weight_decay.is_finite() && self.weight_decay >= 0.;
        let is_smoothing = (0. ..1.).contains(&self.loss.label_smoothing);
        let is_z = self.loss.z_loss.is_finite() && self.loss.z_loss >= 0.;
        let positive = |value: f64| value.is_finite() && value > 0.;
        let numbers = [
            ("learning_rate", self.learning_rate, positive(self.learning_rate), "a positive number"),
            ("final_lr_share", self.final_lr_share, is_share, "a number from 0 to 1"),
            ("weight_decay", self.weight_decay, is_decay, "a number of at least 0"),
            ("clip_norm", self.clip_norm, positive(self.clip_norm), "a positive number"),
            ("label_smoothing", self.loss.label_smoothing, is_smoothing, "a number from 0 to below 1"),
            ("z_loss", self.loss.z_loss, is_z, "a number of at least 0"),
        ];
        if let Some((name, value, _, expected)) = numbers.into_iter().find(|number| !number.2) {
            return Err(TrainConfigError::Number { name, value: value.to_string(), expected });
        }
        for (what, count) in [("ranks", self.ranks), ("batch_size", self.batch_size)] {
            if !count.is_multiple_of(self.data_parallel) {
                return Err(TrainConfigError::DataParallel { data_parallel: self.data_parallel, what, count });
            }
        }
        if self.precision != Precision::F32 && self.sharding == Sharding::None {
            let message =
                "16-bit precision needs parameters in f32 to update; set sharding to optimizer, gradients or full";
            return Err(TrainConfigError::Together(message));
        }
        let is_plain = self.sharding == Sharding::None && self.checkpointing == Checkpointing::Store;
        if self.strategy == Method::MegatronLm && !is_plain {
            let message = "strategy megatron-lm, a baseline, takes neither sharding nor checkpointing";
            return Err(TrainConfigError::Together(message));
        }
        let keeps = self.checkpointing == Checkpointing::KeepAttention;
        if keeps && self.strategy == Method::Context(Strategy::RingSelfAttention) {
            let message =
                "strategy ring-self-attention, a baseline, has no attention output to keep; use checkpointing boundary";
            return Err(TrainConfigError::Together(message));
        }
        self.strategy.check(self.ranks_of_a_sequence())?;
        Ok(self.model.validate()?)
    }

    /// Ranks that share a sequence.
    #[must_use]
    pub fn ranks_of_a_sequence(&self) -> usize {
        self.ranks / self.data_parallel
    }

    /// How the model is run.
    #[must_use]
    pub fn execution(&self) -> Execution {
        Execution {
            mlp_tile: (self.mlp_tile > 0).then_some(self.mlp_tile),
            loss_tile: self.loss_tile,
            loss: self.loss,
            ..Execution::checkpointed(self.checkpointing)
        }
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
