//! Training over ranks that are threads of this process.

mod config;
mod progress;
mod run_folder;
mod step;

pub use config::{DeviceKind, Precision, TrainConfig, TrainConfigError};
pub use progress::Progress;
pub use run_folder::{Metrics, RunFolder, RunFolderError};
pub use step::{StepOutcome, Trainer};

use crate::data::{Batches, DataError, Text};
use crate::llama::{Llama, WeightsError};
use crate::method::Method;
use crate::plot::{PlotError, loss_curve, schedule_timeline};
use burn_distflash::comm::local::{self, RunError};
use burn_distflash::schedule::AttentionShape;
use burn_distflash::{AttentionError, Context, Mask, Mesh, Plan, PlanError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Why a run was refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Refused: the configuration.
    #[error(transparent)]
    Config(#[from] TrainConfigError),
    /// Refused: the text.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Refused or failed: the run folder.
    #[error(transparent)]
    Folder(#[from] RunFolderError),
    /// Failed: one or more ranks.
    #[error(transparent)]
    Ranks(#[from] RunError),
    /// Failed: a picture.
    #[error(transparent)]
    Plot(#[from] PlotError),
    /// Failed: writing the model.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Refused: the sequence or the strategy.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl TrainError {
    /// Whether the request was refused before anything was done, rather than having failed on the way.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Config(_) | Self::Data(_) | Self::Plan(_) => true,
            Self::Folder(error) => !matches!(error, RunFolderError::Io { .. }),
            Self::Ranks(_) | Self::Plot(_) | Self::Weights(_) => false,
        }
    }
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The run folder.
    pub folder: PathBuf,
    /// Mean loss over the last tenth of the steps, in nats per token.
    pub final_loss: f64,
    /// Of the text, in nats per token.
    pub unigram_entropy: f64,
    /// Over the whole run, all ranks together.
    pub tokens_per_second: f64,
    /// In all.
    pub elapsed: Duration,
}

/// Trains as `config` says and writes everything into `runs/NAME`.
///
/// # Errors
/// If something is wrong with the request, which is found out before the folder is made; if a rank
/// fails; if a file cannot be written.
pub fn train(config: TrainConfig, runs: &Path, name: Option<&str>) -> Result<Summary, TrainError> {
    config.validate()?;
    let text = config.data.as_deref().map_or_else(|| Ok(Text::excerpt()), Text::read)?;
    let unigram_entropy = text.unigram_entropy();
    let batches = text.batches(config.seq_len, config.batch_size, config.model.vocab_size, config.seed)?;
    let plan = Plan::new(
        config.strategy.strategy(),
        &Mask::causal(),
        config.seq_len,
        config.ranks_of_a_sequence(),
        attention_shape(&config),
    )?;

    let mut folder = RunFolder::create(runs, name, &config)?;
    let over = |ranks| format!("{} over {ranks} ranks, {} tokens", config.strategy, config.seq_len);
    let title = over(config.ranks);
    // Megatron-LM's ranks each compute their heads over everything: there is no schedule to draw.
    if config.strategy != Method::MegatronLm {
        schedule_timeline(&folder.path().join("schedule.svg"), &over(config.ranks_of_a_sequence()), &plan)?;
    }

    let config = Arc::new(config);
    let start = Instant::now();
    let (report, reports) = mpsc::channel();
    let ranks = std::thread::spawn({
        let (config, batches) = (config.clone(), batches.clone());
        // Nobody listens any more only if the run folder failed, which is reported instead.
        let tell = move |outcome| report.send(outcome).unwrap_or(());
        move || run_ranks(&config, &batches, tell)
    });
    let losses = follow(&config, &batches, &mut folder, start, reports)?;
    let model = ranks.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;

    let elapsed = start.elapsed();
    loss_curve(&folder.path().join("loss.svg"), &title, &losses, unigram_entropy)?;
    model.save(&config.model, &folder.path().join("model"))?;
    let last = &losses[losses.len() - losses.len().div_ceil(10)..];
    Ok(Summary {
        folder: folder.path().to_path_buf(),
        final_loss: last.iter().map(|loss| loss.1).sum::<f64>() / last.len() as f64,
        unigram_entropy,
        tokens_per_second: (batches.num_tokens() * losses.len()) as f64 / elapsed.as_secs_f64(),
        elapsed,
    })
}

fn attention_shape(config: &TrainConfig) -> AttentionShape {
    let model = &config.model;
    AttentionShape {
        batch: config.batch_size / config.data_parallel,
        heads: model.num_attention_heads,
        kv_heads: model.num_key_value_heads,
        head_dim: model.head_dim,
        element_bytes: size_of::<f32>(),
    }
}

/// Records and shows the steps as they come, until the ranks end; `(step, loss)` of each.
fn follow(
    config: &TrainConfig,
    batches: &Batches,
    folder: &mut RunFolder,
    start: Instant,
    reports: mpsc::Receiver<StepOutcome>,
) -> Result<Vec<(usize, f64)>, RunFolderError> {
    let progress = Progress::new(config.steps);
    let mut losses = Vec::with_capacity(config.steps);
    let mut before = 0.;
    for (outcome, step) in reports.into_iter().zip(1..) {
        let elapsed_seconds = start.elapsed().as_secs_f64();
        let metrics = Metrics {
            step,
            loss: outcome.loss,
            learning_rate: outcome.learning_rate,
            gradient_norm: outcome.gradient_norm,
            tokens: step * batches.num_tokens(),
            tokens_per_second: batches.num_tokens() as f64 / (elapsed_seconds - before),
            elapsed_seconds,
        };
        before = elapsed_seconds;
        losses.push((step, outcome.loss));
        folder.record(&metrics)?;
        progress.show(&metrics);
    }
    progress.finish();
    Ok(losses)
}

/// Trains on all ranks and returns the model, which is the same on each; `report` is told every step by
/// rank 0.
///
/// # Errors
/// If a rank fails.
///
/// # Panics
/// If `config` is not valid.
pub fn run_ranks(
    config: &Arc<TrainConfig>,
    batches: &Batches,
    report: impl Fn(StepOutcome) + Send + Sync + 'static,
) -> Result<Llama, RunError> {
    let (config, batches) = (config.clone(), batches.clone());
    let model = Llama::init(&config.model, config.seed, &config.device.device()).expect("a validated model");
    train_from(model, &config, &batches, report)
}

/// As [`run_ranks`], from a given model.
///
/// # Errors
/// If a rank fails.
pub fn train_from(
    model: Llama,
    config: &Arc<TrainConfig>,
    batches: &Batches,
    report: impl Fn(StepOutcome) + Send + Sync + 'static,
) -> Result<Llama, RunError> {
    let (config, batches) = (config.clone(), batches.clone());
    let (world_size, time_limit) = (config.ranks, Duration::from_secs(config.time_limit));
    let models = local::run(world_size, time_limit, move |comm| {
        let device = config.device.device().autodiff();
        let rank = comm.rank();
        let mesh = Mesh::new(comm, config.data_parallel).expect("a validated mesh");
        let context = Context::new(mesh.context().clone(), config.strategy.strategy(), config.seq_len)?;
        let mut trainer = Trainer::new(config.clone(), &model, context, mesh, device);
        for step in 0..config.steps {
            let outcome = trainer.step(step, &batches)?;
            if rank == 0 {
                report(outcome);
            }
        }
        Ok::<_, AttentionError>(trainer.into_model()?)
    })?;
    Ok(models.into_iter().next().expect("at least one rank"))
}
