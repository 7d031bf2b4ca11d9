//! What each rank does.

use super::config::TrainConfig;
use super::memory::RankMemory;
use super::rank_error::RankError;
use super::step::{StepOutcome, Trainer};
use crate::checkpoint::{Checkpoint, Checkpoints};
use crate::data::Batches;
use crate::llama::Llama;
use burn_distflash::comm::local::{self, RunError};
use burn_distflash::{Communicator, Context, Mesh};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Where ranks leave checkpoints and the model, and what they begin with.
#[derive(Debug)]
pub struct Saving {
    /// The run folder.
    pub run: PathBuf,
    /// Instead of new weights.
    pub checkpoint: Option<Checkpoint>,
}

/// Trains on all ranks, as threads, and leaves checkpoints and the model in the run folder; `report` is told every step
/// by rank 0. What each rank held.
///
/// # Errors
/// If a rank fails.
///
/// # Panics
/// If `config` is not valid.
pub fn run_ranks(
    config: &Arc<TrainConfig>,
    batches: &Batches,
    saving: Saving,
    report: impl Fn(StepOutcome) + Send + Sync + 'static,
) -> Result<Vec<RankMemory>, RunError> {
    let (config, batches) = (config.clone(), batches.clone());
    let device = config.device.device();
    // With a checkpoint every weight is replaced: none needs to be drawn.
    let model = match &saving.checkpoint {
        Some(_) => Llama::empty(&config.model, &device),
        None => Llama::init(&config.model, config.seed, &device).expect("a validated model"),
    };
    local::run(config.ranks, Duration::from_secs(config.time_limit), move |comm| {
        let mut trainer = trainer(&config, &model, comm.clone())?;
        let mut first = 0;
        if let Some(checkpoint) = &saving.checkpoint {
            trainer = trainer.resume(checkpoint)?;
            first = checkpoint.step();
        }
        let checkpoints = Checkpoints::new(&saving.run, config.keep);
        for step in first..config.steps {
            let outcome = trainer.step(step, &batches)?;
            if comm.rank() == 0 {
                report(outcome);
            }
            if config.save_every > 0 && (step + 1) % config.save_every == 0 {
                trainer.save(step + 1, &checkpoints.folder(step + 1))?;
                if comm.rank() == 0 {
                    checkpoints.prune()?;
                }
            }
        }
        trainer.export(&saving.run.join("model"))?;
        Ok::<_, RankError>(trainer.memory()?)
    })
}

/// Trains a given model on all ranks and returns it as it then is, the same on each; `report` is told every step by
/// rank 0.
///
/// # Errors
/// If a rank fails.
///
/// # Panics
/// If `config` is not valid.
pub fn train_from(
    model: Llama,
    config: &Arc<TrainConfig>,
    batches: &Batches,
    report: impl Fn(StepOutcome) + Send + Sync + 'static,
) -> Result<Llama, RunError> {
    let (config, batches) = (config.clone(), batches.clone());
    let models = local::run(config.ranks, Duration::from_secs(config.time_limit), move |comm| {
        let mut trainer = trainer(&config, &model, comm.clone())?;
        for step in 0..config.steps {
            let outcome = trainer.step(step, &batches)?;
            if comm.rank() == 0 {
                report(outcome);
            }
        }
        Ok::<_, RankError>(trainer.into_model()?)
    })?;
    Ok(models.into_iter().next().expect("at least one rank"))
}

fn trainer(config: &Arc<TrainConfig>, model: &Llama, comm: Arc<dyn Communicator>) -> Result<Trainer, RankError> {
    let mesh = Mesh::new(comm, config.data_parallel).expect("a validated mesh");
    let context = Context::new(mesh.context().clone(), config.strategy.strategy(), config.seq_len)?;
    Ok(Trainer::new(config.clone(), model, context, mesh, config.device.device().autodiff())?)
}
