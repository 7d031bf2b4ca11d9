//! One rank's training steps.

use super::config::TrainConfig;
use crate::data::Batches;
use crate::llama::{Execution, Gathering, Llama, ShardedLlama};
use crate::method::Method;
use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use burn_distflash::{AttentionError, CommError, Context, Mesh, Sharding, clip_shards, sum_gradients};
use std::ops::Range;
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

/// What a rank has of the model.
#[derive(Debug)]
enum Held {
    /// All of it, the same on all ranks.
    Whole(Box<Llama>),
    /// A part.
    Part(Box<ShardedLlama>, Gathering),
}

/// A rank's model and optimizer. All ranks make the same steps.
pub struct Trainer {
    config: Arc<TrainConfig>,
    held: Held,
    optimizer: ModuleOptimizer,
    context: Context,
    mesh: Mesh,
    device: Device,
    execution: Execution,
}

impl Trainer {
    /// A trainer for this rank's copy of the model, on a device without autodiff; give every rank the same one.
    #[must_use]
    pub fn new(config: Arc<TrainConfig>, model: &Llama, context: Context, mesh: Mesh, device: Device) -> Self {
        let adamw = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
        let optimizer = adamw.with_weight_decay(config.weight_decay as f32).init();
        let execution = config.execution();
        let world = mesh.world();
        let held = match config.sharding {
            // A fork, not a clone: clones share their leaves, and with them the autodiff graphs.
            Sharding::None => Held::Whole(Box::new(model.clone().fork(&device).train())),
            _ => {
                let part = ShardedLlama::new(model, world.rank(), world.world_size());
                let gathering = Gathering { group: world.clone(), dtype: config.precision.dtype() };
                Held::Part(Box::new(part.fork(&device).train()), gathering)
            }
        };
        Self { config, held, optimizer, context, mesh, device, execution }
    }

    /// Forward, backward, sum over ranks, clip, update.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub fn step(&mut self, step: usize, batches: &Batches) -> Result<StepOutcome, AttentionError> {
        let learning_rate = self.config.learning_rate_at(step);
        let context = self.context.clone();
        let batch = batches.part(step, self.sequences(), context.layout(), context.rank(), &self.device);
        let world = self.mesh.world().clone();
        // Divided by the count of all ranks, so that summing gradients over them gives the mean's.
        let mean = |sum: Tensor<1>| sum.div_scalar(batches.num_tokens() as f64);
        let (loss, gradient_norm) = match &self.held {
            Held::Whole(model) => {
                let loss = mean(self.whole_loss(model, batch)?);
                let grads = sum_gradients(&**model, context.backward(&loss)?, &*world)?;
                let norm = grads.norm();
                let grads = grads.clip(self.config.clip_norm).into_params(&**model);
                self.held = Held::Whole(Box::new(self.optimizer.step(learning_rate, (**model).clone(), grads)));
                (loss, norm)
            }
            Held::Part(part, gathering) => {
                let (loss, grads) = self.part_gradients(part, gathering, batch, mean)?;
                let (grads, norm) = clip_shards(&**part, grads, self.config.clip_norm, &*world)?;
                let part = self.optimizer.step(learning_rate, (**part).clone(), grads);
                self.held = Held::Part(Box::new(part), gathering.clone());
                (loss, norm)
            }
        };
        let loss: Tensor<1> = world.all_reduce(loss.inner())?;
        Ok(StepOutcome { loss: loss.into_scalar::<f64>(), gradient_norm, learning_rate })
    }

    /// Of the batch, those of this rank's group.
    fn sequences(&self) -> Range<usize> {
        let each = self.config.batch_size / self.mesh.data_parallel();
        each * self.mesh.data_rank()..each * (self.mesh.data_rank() + 1)
    }

    fn whole_loss(&self, model: &Llama, batch: [Tensor<2, Int>; 2]) -> Result<Tensor<1>, AttentionError> {
        match self.config.strategy {
            Method::Context(_) => model.loss(batch, &self.execution, &self.context),
            Method::MegatronLm => model.loss_megatron(batch, &self.execution, &self.context),
        }
    }

    fn part_gradients(
        &self,
        part: &ShardedLlama,
        gathering: &Gathering,
        batch: [Tensor<2, Int>; 2],
        mean: impl Fn(Tensor<1>) -> Tensor<1>,
    ) -> Result<(Tensor<1>, GradientsParams), AttentionError> {
        if self.config.sharding == Sharding::Optimizer {
            let whole = part.valid().gather(gathering)?.fork(&self.device).train();
            let loss = mean(self.whole_loss(&whole, batch)?);
            let grads = part.reduce(&whole, self.context.backward(&loss)?, &*gathering.group)?;
            return Ok((loss, grads));
        }
        let sum = if self.config.sharding == Sharding::Gradients {
            self.whole_loss(&part.gather(gathering)?, batch)?
        } else {
            part.loss(batch, &self.execution, &self.context, gathering)?
        };
        let loss = mean(sum);
        let grads = self.context.backward(&loss)?;
        self.mesh.world().check()?;
        Ok((loss, GradientsParams::from_grads(grads, part)))
    }

    /// The model as trained so far, whole on every rank.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub fn into_model(self) -> Result<Llama, CommError> {
        match self.held {
            Held::Whole(model) => Ok(model.valid()),
            Held::Part(part, gathering) => {
                part.valid().gather(&Gathering { dtype: burn::tensor::DType::F32, ..gathering })
            }
        }
    }
}
