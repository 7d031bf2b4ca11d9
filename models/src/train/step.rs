//! One rank's training steps.

use super::config::TrainConfig;
use crate::data::Batches;
use crate::llama::{Execution, Llama};
use crate::method::Method;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_distflash::{AttentionError, Context, sum_gradients};
use std::sync::Arc;

/// What one step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean over all ranks' labels, in nats, before the step.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// As applied.
    pub learning_rate: f64,
}

/// A rank's model and optimizer. All ranks hold the same weights and make the same steps.
pub struct Trainer {
    config: Arc<TrainConfig>,
    model: Llama,
    optimizer: ModuleOptimizer,
    context: Context,
    device: Device,
    execution: Execution,
}

impl Trainer {
    /// A trainer for this rank's copy of the model; give every rank a fork of the same one.
    #[must_use]
    pub fn new(config: Arc<TrainConfig>, model: Llama, context: Context, device: Device) -> Self {
        let adamw = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
        let optimizer = adamw.with_weight_decay(config.weight_decay as f32).init();
        Self { config, model, optimizer, context, device, execution: Execution::default() }
    }

    /// Forward, backward, sum over ranks, clip, update.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub fn step(&mut self, step: usize, batches: &Batches) -> Result<StepOutcome, AttentionError> {
        let context = &self.context;
        let batch = batches.shard(step, context.layout(), context.rank(), &self.device);
        let loss = match self.config.strategy {
            Method::Context(_) => self.model.loss(batch, &self.execution, context)?,
            Method::MegatronLm => self.model.loss_megatron(batch, &self.execution, context)?,
        };
        // Divided by the count of all ranks, so that summing gradients over them gives the mean's.
        let loss = loss.div_scalar(batches.num_tokens() as f64);
        let grads = context.backward(&loss)?;
        let comm = context.communicator();
        let grads = sum_gradients(&self.model, grads, &**comm)?;
        let gradient_norm = grads.norm();
        let grads = grads.clip(self.config.clip_norm).into_params(&self.model);
        let learning_rate = self.config.learning_rate_at(step);
        self.model = self.optimizer.step(learning_rate, self.model.clone(), grads);
        let loss: Tensor<1> = comm.all_reduce(loss.inner())?;
        Ok(StepOutcome { loss: loss.into_scalar::<f64>(), gradient_norm, learning_rate })
    }

    /// The model as trained so far.
    #[must_use]
    pub fn into_model(self) -> Llama {
        self.model
    }
}
