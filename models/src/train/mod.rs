//! Training over ranks that are threads of this process.

mod config;
mod loss_scale;
mod memory;
mod progress;
mod rank_error;
mod ranks;
mod run_folder;
mod step;

pub use config::{DeviceKind, Precision, TrainConfig, TrainConfigError};
pub use loss_scale::LossScale;
pub use memory::{MemoryReport, RankMemory};
pub use progress::Progress;
pub use rank_error::RankError;
pub use ranks::{Saving, run_ranks, train_from};
pub use run_folder::{Metrics, RunFolder, RunFolderError};
pub use step::{StepOutcome, Trainer};

use crate::Counting;
use crate::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use crate::data::{Batches, DataError, Text};
use crate::llama::WeightsError;
use crate::method::Method;
use crate::plot::{PlotError, loss_curve, schedule_timeline};
use burn_distflash::comm::local::RunError;
use burn_distflash::schedule::AttentionShape;
use burn_distflash::{Mask, Plan, PlanError};
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
    /// Refused: nothing to go on from.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Refused: a run goes on with what it began with.
    #[error("{name} is not that of {}; a run that goes on keeps its model, data, seq_len, batch_size and seed", run.display())]
    Changed {
        /// Which setting.
        name: &'static str,
        /// Of which run.
        run: PathBuf,
    },
    /// Refused: there is nothing left to do.
    #[error("{} has made {made} of {steps} steps; give more --steps to go on", run.display())]
    Finished {
        /// Which run.
        run: PathBuf,
        /// Steps made.
        made: usize,
        /// As configured.
        steps: usize,
    },
    /// Refused: the sequence or the strategy.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl TrainError {
    /// Whether the request was refused before anything was done, rather than having failed on the way.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Config(_) | Self::Data(_) | Self::Plan(_) | Self::Checkpoint(_) => true,
            Self::Changed { .. } | Self::Finished { .. } => true,
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
    /// Over what was done now, all ranks together.
    pub tokens_per_second: f64,
    /// Now.
    pub elapsed: Duration,
    /// What ranks held.
    pub memory: MemoryReport,
}

/// Trains as `config` says and writes everything into `runs/NAME`. `allocator` is the program's.
///
/// # Errors
/// If something is wrong with the request, which is found out before the folder is made; if a rank
/// fails; if a file cannot be written.
pub fn train(
    config: TrainConfig,
    runs: &Path,
    name: Option<&str>,
    allocator: &'static Counting,
) -> Result<Summary, TrainError> {
    let run = Run::prepare(config)?;
    let folder = RunFolder::create(runs, name, &run.config)?;
    run.go(folder, Vec::new(), None, allocator)
}

/// Goes on with the run in `folder` from its newest whole checkpoint, with `config` from there on: on another number of
/// ranks, or otherwise shared and sharded, or for more steps. `warn` is told of checkpoints that are damaged.
///
/// # Errors
/// As [`train`]; if there is no checkpoint, or the run was of other data or another model.
pub fn resume(
    config: TrainConfig,
    folder: &Path,
    allocator: &'static Counting,
    warn: impl Fn(&CheckpointError),
) -> Result<Summary, TrainError> {
    let before = RunFolder::config(folder)?;
    let changed = [
        ("model", config.model != before.model),
        ("data", config.data != before.data),
        ("seq_len", config.seq_len != before.seq_len),
        ("batch_size", config.batch_size != before.batch_size),
        ("seed", config.seed != before.seed),
    ];
    if let Some((name, _)) = changed.into_iter().find(|setting| setting.1) {
        return Err(TrainError::Changed { name, run: folder.to_path_buf() });
    }
    let run = Run::prepare(config)?;
    let latest = Checkpoints::new(folder, run.config.keep).latest()?;
    latest.damaged.iter().for_each(warn);
    let (made, steps) = (latest.checkpoint.step(), run.config.steps);
    if made >= steps {
        return Err(TrainError::Finished { run: folder.to_path_buf(), made, steps });
    }
    let (folder, earlier) = RunFolder::reopen(folder, &run.config, made)?;
    run.go(folder, earlier, Some(latest.checkpoint), allocator)
}

/// A request in which nothing is wrong.
struct Run {
    config: Arc<TrainConfig>,
    batches: Batches,
    unigram_entropy: f64,
    plan: Plan,
}

impl Run {
    fn prepare(config: TrainConfig) -> Result<Self, TrainError> {
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
        Ok(Self { config: Arc::new(config), batches, unigram_entropy, plan })
    }

    fn go(
        self,
        mut folder: RunFolder,
        earlier: Vec<Metrics>,
        checkpoint: Option<Checkpoint>,
        allocator: &'static Counting,
    ) -> Result<Summary, TrainError> {
        let Self { config, batches, unigram_entropy, plan } = self;
        let over = |ranks| format!("{} over {ranks} ranks, {} tokens", config.strategy, config.seq_len);
        // Megatron-LM's ranks each compute their heads over everything: there is no schedule to draw.
        if config.strategy != Method::MegatronLm {
            schedule_timeline(&folder.path().join("schedule.svg"), &over(config.ranks_of_a_sequence()), &plan)?;
        }
        let start = Instant::now();
        let (report, reports) = mpsc::channel();
        let ranks = std::thread::spawn({
            let (config, batches) = (config.clone(), batches.clone());
            // Nobody listens any more only if the run folder failed, which is reported instead.
            let tell = move |outcome| report.send(outcome).unwrap_or(());
            let saving = Saving { run: folder.path().to_path_buf(), checkpoint };
            move || run_ranks(&config, &batches, saving, tell)
        });
        let num_earlier = earlier.len();
        let losses = follow(&config, &batches, &mut folder, earlier, start, reports)?;
        let ranks = ranks.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let elapsed = start.elapsed();

        let planned = RankMemory::planned(&config);
        let memory = MemoryReport { ranks, planned, process_peak: allocator.peak() };
        folder.record_memory(&memory)?;
        loss_curve(&folder.path().join("loss.svg"), &over(config.ranks), &losses, unigram_entropy)?;
        let last = &losses[losses.len() - losses.len().div_ceil(10)..];
        let made = losses.len() - num_earlier;
        Ok(Summary {
            folder: folder.path().to_path_buf(),
            final_loss: last.iter().map(|loss| loss.1).sum::<f64>() / last.len() as f64,
            unigram_entropy,
            tokens_per_second: (batches.num_tokens() * made) as f64 / elapsed.as_secs_f64(),
            elapsed,
            memory,
        })
    }
}

fn attention_shape(config: &TrainConfig) -> AttentionShape {
    let model = &config.model;
    AttentionShape {
        batch: config.batch_size / config.data_parallel,
        heads: model.num_attention_heads,
        kv_heads: model.num_key_value_heads,
        head_dim: model.head_dim,
        element_bytes: config.precision.dtype().size(),
    }
}

/// Records and shows the steps as they come, until the ranks end; `(step, loss)` of each, and of `earlier` ones.
fn follow(
    config: &TrainConfig,
    batches: &Batches,
    folder: &mut RunFolder,
    earlier: Vec<Metrics>,
    start: Instant,
    reports: mpsc::Receiver<StepOutcome>,
) -> Result<Vec<(usize, f64)>, RunFolderError> {
    let first = earlier.len();
    let spent = earlier.last().map_or(0., |metrics| metrics.elapsed_seconds);
    let progress = Progress::new(first, config.steps);
    let mut losses: Vec<(usize, f64)> = earlier.iter().map(|metrics| (metrics.step, metrics.loss)).collect();
    let mut before = 0.;
    for (outcome, step) in reports.into_iter().zip(first + 1..) {
        let now = start.elapsed().as_secs_f64();
        let metrics = Metrics {
            step,
            loss: outcome.loss,
            learning_rate: outcome.learning_rate,
            gradient_norm: (!outcome.is_skipped()).then_some(outcome.gradient_norm),
            tokens: step * batches.num_tokens(),
            tokens_per_second: batches.num_tokens() as f64 / (now - before),
            elapsed_seconds: spent + now,
        };
        before = now;
        losses.push((step, outcome.loss));
        folder.record(&metrics)?;
        progress.show(&metrics, now);
    }
    progress.finish();
    Ok(losses)
}
