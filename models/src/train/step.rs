//! One rank's training steps.

use super::config::{Precision, TrainConfig};
use super::loss_scale::LossScale;
use super::memory::{RankMemory, gradient_bytes, parameter_bytes};
use super::rank_error::RankError;
use crate::checkpoint::{self, Checkpoint, CheckpointError, moments, state_bytes, with_moments};
use crate::data::Batches;
use crate::llama::{Execution, Gathering, Llama, ShardedLlama, WeightsError};
use crate::method::Method;
use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Gradients, Int, Tensor};
use burn_distflash::{
    AttentionError, CommError, Context, KeptBytes, Mesh, Sharding, clip_shards, kept_by_segments, scale_gradients,
    sum_gradients,
};
use std::cell::Cell;
use std::ops::Range;
use std::path::Path;
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
    /// What the loss was multiplied by; 1 but in f16.
    pub loss_scale: f64,
}

impl StepOutcome {
    /// Whether f16 gradients overflowed, and nothing was updated.
    #[must_use]
    pub fn is_skipped(&self) -> bool {
        !self.gradient_norm.is_finite()
    }
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
    /// In f16.
    loss_scale: Option<LossScale>,
    memory: RankMemory,
    /// By segments, in the last step.
    kept: Cell<KeptBytes>,
}

impl Trainer {
    /// A trainer for this rank's copy of the model, on a device without autodiff; give every rank the same one.
    ///
    /// # Errors
    /// If ranks lose each other.
    pub fn new(
        config: Arc<TrainConfig>,
        model: &Llama,
        context: Context,
        mesh: Mesh,
        device: Device,
    ) -> Result<Self, CommError> {
        let adamw = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
        let optimizer = adamw.with_weight_decay(config.weight_decay as f32).init();
        let execution = config.execution();
        let world = mesh.world();
        let held = match config.sharding {
            // A fork, not a clone: clones share their leaves, and with them the autodiff graphs.
            Sharding::None => Held::Whole(Box::new(model.clone().fork(&device).train())),
            _ => {
                let part = ShardedLlama::new(model, world.rank(), world.world_size());
                let gathering = Gathering::new(world.clone(), config.precision.dtype())?;
                Held::Part(Box::new(part.fork(&device).train()), gathering)
            }
        };
        let loss_scale = (config.precision == Precision::F16).then(LossScale::default);
        let memory = RankMemory::default();
        let kept = Cell::default();
        Ok(Self { config, held, optimizer, context, mesh, device, execution, loss_scale, memory, kept })
    }

    /// Forward, backward, sum over ranks, clip, update. In f16 a step whose gradients overflow updates nothing.
    ///
    /// # Errors
    /// If ranks lose each other, or loss or gradient are no numbers: on all ranks at once, which agree on both.
    pub fn step(&mut self, step: usize, batches: &Batches) -> Result<StepOutcome, RankError> {
        let learning_rate = self.config.learning_rate_at(step);
        let context = self.context.clone();
        let batch = batches.part(step, self.sequences(), context.layout(), context.rank(), &self.device);
        let world = self.mesh.world().clone();
        let loss_scale = self.loss_scale.map_or(1., LossScale::factor);
        // Divided by the count of all ranks, so that summing gradients over them gives the mean's.
        let mean = |sum: Tensor<1>| sum.mul_scalar(loss_scale / batches.num_tokens() as f64);
        let (loss, grads, gradient_norm) = match &self.held {
            Held::Whole(model) => {
                let loss = mean(self.whole_loss(model, batch)?);
                let grads = sum_gradients(&**model, self.backward(&loss)?, &*world)?;
                let norm = grads.norm();
                (loss, grads.clip(self.config.clip_norm).into_params(&**model), norm)
            }
            Held::Part(part, gathering) => {
                let (loss, grads) = self.part_gradients(part, gathering, batch, mean)?;
                let grads = match self.loss_scale {
                    Some(scale) => scale_gradients(&**part, grads, 1. / scale.factor()),
                    None => grads,
                };
                let (grads, norm) = clip_shards(&**part, grads, self.config.clip_norm, &*world)?;
                (loss, grads, norm)
            }
        };
        let loss: Tensor<1> = world.all_reduce(loss.inner())?;
        let loss = loss.into_scalar::<f64>() / loss_scale;
        let is_finite = gradient_norm.is_finite();
        let can_skip = self.loss_scale.is_some_and(|scale| scale.factor() > 1.);
        if !loss.is_finite() || !(is_finite || can_skip) {
            return Err(RankError::NotFinite { step: step + 1, loss, gradient_norm });
        }
        if is_finite {
            self.update(learning_rate, grads);
        }
        self.loss_scale = self.loss_scale.map(|scale| scale.after(is_finite));
        Ok(StepOutcome { loss, gradient_norm, learning_rate, loss_scale })
    }

    fn update(&mut self, learning_rate: f64, grads: GradientsParams) {
        match &mut self.held {
            Held::Whole(model) => {
                self.memory.gradients = gradient_bytes(&**model, &grads);
                **model = self.optimizer.step(learning_rate, (**model).clone(), grads);
            }
            Held::Part(part, _) => {
                self.memory.gradients = gradient_bytes(&**part, &grads);
                **part = self.optimizer.step(learning_rate, (**part).clone(), grads);
            }
        }
    }

    /// The gradients of this rank's loss; notes what segments keep for them.
    fn backward(&self, loss: &Tensor<1>) -> Result<Gradients, AttentionError> {
        self.kept.set(kept_by_segments());
        self.context.backward(loss)
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
            let grads = part.reduce(&whole, self.backward(&loss)?, &*gathering.group)?;
            return Ok((loss, grads));
        }
        let sum = if self.config.sharding == Sharding::Gradients {
            self.whole_loss(&part.gather(gathering)?, batch)?
        } else {
            part.loss(batch, &self.execution, &self.context, gathering)?
        };
        let loss = mean(sum);
        let grads = self.backward(&loss)?;
        self.mesh.world().check()?;
        Ok((loss, GradientsParams::from_grads(grads, part)))
    }

    /// Writes a checkpoint after `step` steps. All ranks call it together.
    ///
    /// # Errors
    /// If the system refuses, or ranks lose each other.
    pub fn save(&self, step: usize, folder: &Path) -> Result<(), CheckpointError> {
        let world = self.mesh.world();
        let models = match &self.held {
            Held::Whole(model) => {
                let model = model.valid();
                let [first, second] = moments(&self.optimizer, &model)?;
                [model, first, second].map(|whole| ShardedLlama::new(&whole, world.rank(), world.world_size()))
            }
            Held::Part(part, _) => {
                let part = part.valid();
                let [first, second] = moments(&self.optimizer, &part)?;
                [part, first, second]
            }
        };
        checkpoint::write(folder, step, self.loss_scale, &models.map(|model| model.rows()), &**world)
    }

    /// As it was when `checkpoint` was written, by however many ranks, sharded or not.
    ///
    /// # Errors
    /// If it is of another model.
    pub fn resume(mut self, checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let step = checkpoint.step();
        match &mut self.held {
            Held::Whole(model) => {
                let one = ShardedLlama::new(&model.valid(), 0, 1);
                let whole = |part: ShardedLlama| part.join();
                let [found, first, second] = checkpoint.read(&one, 0, 1)?.map(whole);
                **model = found.fork(&self.device).train();
                self.optimizer = with_moments(self.optimizer, &**model, step, &[first, second])?;
            }
            Held::Part(part, _) => {
                let world = self.mesh.world();
                let [found, first, second] = checkpoint.read(&part.valid(), world.rank(), world.world_size())?;
                **part = found.fork(&self.device).train();
                self.optimizer = with_moments(self.optimizer, &**part, step, &[first, second])?;
            }
        }
        self.loss_scale = self.loss_scale.map(|scale| checkpoint.loss_scale().unwrap_or(scale));
        Ok(self)
    }

    /// Writes the model as Hugging Face reads it; no rank gets more of it than a layer that it does not hold. All ranks
    /// call it together.
    ///
    /// # Errors
    /// If the system refuses, or ranks lose each other.
    pub fn export(&self, folder: &Path) -> Result<(), WeightsError> {
        let world = self.mesh.world();
        match &self.held {
            Held::Whole(model) if world.rank() == 0 => model.valid().save(&self.config.model, folder)?,
            Held::Whole(_) => {}
            Held::Part(part, _) => part.valid().save(&self.config.model, folder, world)?,
        }
        Ok(world.barrier()?)
    }

    /// What this rank holds between steps, and held in the last one.
    ///
    /// # Errors
    /// If Burn cannot say what its optimizer holds.
    pub fn memory(&self) -> Result<RankMemory, CheckpointError> {
        let parameters = match &self.held {
            Held::Whole(model) => parameter_bytes(&**model),
            Held::Part(part, _) => parameter_bytes(&**part),
        };
        let optimizer = state_bytes(&self.optimizer)?;
        Ok(RankMemory { parameters, optimizer, ..self.memory }.with_kept(self.kept.get()))
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
