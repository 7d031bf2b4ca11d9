//! `distflash train`.

use super::Failure;
use super::settings::{parse, resolve};
use crate::Counting;
use crate::method::{Method, UnknownMethod};
use crate::planner::{self, Cluster, MaskKind, Workload};
use crate::train::{Summary, TrainConfig, TrainError, resume, train};
use burn_distflash::{Checkpointing, Sharding};
use clap::{Args, ValueHint};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;
use std::str::FromStr;
use toml::Table;

/// Train a small Llama on a text, its sequence sharded over ranks.
///
/// Ranks are threads of this process. Every setting can come from a TOML file under the same name with
/// underscores (`--config`); flags win over the file, the file over the defaults. The run folder's
/// config.toml is such a file.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  distflash train                                      the defaults, about two minutes on two cores
  distflash train --data book.txt --seq-len 4096       a text of your own, a longer sequence
  distflash train --ranks 3 --strategy zigzag          another way to shard it, the same result
  distflash train --checkpointing keep-attention --sharding full   in less memory, the same result
  distflash train --config runs/train-1/config.toml    a run again
  distflash train --save-every 50                      a checkpoint every 50 steps
  distflash train --resume runs/train-1 --ranks 2      go on from the last one, on other ranks")]
pub struct TrainCommand {
    /// Settings file (TOML).
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
    /// Go on with a run from its newest checkpoint: with its settings, but for flags given here.
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath, conflicts_with_all = ["config", "name", "runs"])]
    resume: Option<PathBuf>,
    /// Name of the run; its folder must not exist yet [default: train-1, train-2, …].
    #[arg(long)]
    name: Option<String>,
    /// Where run folders go.
    #[arg(long, value_name = "FOLDER", default_value = "runs", value_hint = ValueHint::DirPath)]
    runs: PathBuf,
    #[command(flatten)]
    flags: TrainFlags,
}

/// Flags not given serialise to nothing, so that they leave the file and the defaults alone.
#[derive(Debug, Args, Serialize)]
struct TrainFlags {
    /// Text to train on, read as bytes [default: five books of the King James Bible].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    data: Option<PathBuf>,
    /// Ranks to shard the sequence over [default: 4].
    #[arg(long)]
    ranks: Option<usize>,
    /// Who owns and computes what; all give the same result: ring, balanced, zigzag, striped, all-gather,
    /// adaptive, double-ring:<ranks per node>, ulysses, hybrid:<ranks that share heads>:<one of the first>, or
    /// the baselines megatron-lm, padded-ulysses and ring-self-attention; or auto, the fastest by the model
    /// of `distflash plan` [default: balanced].
    #[arg(long)]
    #[serde(skip_serializing_if = "StrategyFlag::leaves_it")]
    strategy: Option<StrategyFlag>,
    /// Groups of ranks that have sequences of the batch to themselves; the ranks of a group share theirs
    /// [default: 1].
    #[arg(long, value_name = "GROUPS")]
    data_parallel: Option<usize>,
    /// What each layer keeps for backward: store (everything), boundary (its input; the rest is computed
    /// again), or keep-attention (its input and attention's output, which is never computed again)
    /// [default: store].
    #[arg(long)]
    checkpointing: Option<Checkpointing>,
    /// What is spread over ranks instead of being on each: none, optimizer (ZeRO 1), gradients (2), or full
    /// (3, FSDP) [default: none].
    #[arg(long)]
    sharding: Option<Sharding>,
    /// What layers compute in: f32, or bf16 or f16 with sharded f32 parameters [default: f32].
    #[arg(long, value_parser = ["f32", "bf16", "f16"])]
    precision: Option<String>,
    /// Tokens of which an MLP's inner width exists at a time; 0 for all [default: 0].
    #[arg(long, value_name = "TOKENS")]
    mlp_tile: Option<usize>,
    /// Tokens of which logits exist at a time [default: 2048].
    #[arg(long, value_name = "TOKENS")]
    loss_tile: Option<usize>,
    /// Where ranks compute: flex is Burn's CPU backend in pure Rust [default: flex].
    #[arg(long, value_parser = ["flex"])]
    device: Option<String>,
    /// Tokens of a sequence, over all ranks [default: 1024].
    #[arg(long, value_name = "TOKENS")]
    seq_len: Option<usize>,
    /// Sequences of a batch [default: 2].
    #[arg(long, value_name = "N")]
    batch_size: Option<usize>,
    /// Optimizer steps [default: 250].
    #[arg(long)]
    steps: Option<usize>,
    /// Highest learning rate [default: 0.003].
    #[arg(long, value_name = "RATE")]
    learning_rate: Option<f64>,
    /// Share of the highest learning rate at the last step [default: 0.1].
    #[arg(long, value_name = "SHARE")]
    final_lr_share: Option<f64>,
    /// Steps over which the learning rate rises [default: 25].
    #[arg(long, value_name = "STEPS")]
    warmup_steps: Option<usize>,
    /// AdamW's weight decay [default: 0.1].
    #[arg(long, value_name = "DECAY")]
    weight_decay: Option<f64>,
    /// Global norm that gradients are clipped to [default: 1].
    #[arg(long, value_name = "NORM")]
    clip_norm: Option<f64>,
    /// Determines initial weights and order of the data [default: 1].
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds after which a rank that hears nothing from another gives up [default: 60].
    #[arg(long, value_name = "SECONDS")]
    time_limit: Option<u64>,
    /// Steps from one checkpoint to the next; 0 for none [default: 0].
    #[arg(long, value_name = "STEPS")]
    save_every: Option<usize>,
    /// Checkpoints that are kept, the newest [default: 2].
    #[arg(long, value_name = "N")]
    keep: Option<usize>,
    #[command(flatten)]
    loss: LossFlags,
    #[command(flatten)]
    model: ModelFlags,
}

/// What the loss adds.
#[derive(Debug, Args, Serialize)]
struct LossFlags {
    /// Share of a label's weight that is spread over the vocabulary [default: 0].
    #[arg(long, value_name = "SHARE")]
    label_smoothing: Option<f64>,
    /// Times the square of the softmax denominator's logarithm [default: 0].
    #[arg(long, value_name = "FACTOR")]
    z_loss: Option<f64>,
}

/// Sizes of the model, as in Hugging Face's config.json.
#[derive(Debug, Args, Serialize)]
#[command(next_help_heading = "Model")]
struct ModelFlags {
    /// Width of the residual stream [default: 128].
    #[arg(long, value_name = "N")]
    hidden_size: Option<usize>,
    /// Width inside the MLP [default: 352].
    #[arg(long, value_name = "N")]
    intermediate_size: Option<usize>,
    /// Layers [default: 4].
    #[arg(long = "layers", value_name = "N")]
    num_hidden_layers: Option<usize>,
    /// Query heads [default: 4].
    #[arg(long = "heads", value_name = "N")]
    num_attention_heads: Option<usize>,
    /// Key/value heads; must divide the query heads [default: 2].
    #[arg(long = "kv-heads", value_name = "N")]
    num_key_value_heads: Option<usize>,
    /// Elements of one head's vector [default: 32].
    #[arg(long, value_name = "N")]
    head_dim: Option<usize>,
}

/// A strategy, or the wish to have one chosen.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
enum StrategyFlag {
    #[serde(skip)]
    Auto,
    Named(Method),
}

impl StrategyFlag {
    fn leaves_it(flag: &Option<Self>) -> bool {
        !matches!(flag, Some(Self::Named(_)))
    }
}

impl FromStr for StrategyFlag {
    type Err = UnknownMethod;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        if name == "auto" { Ok(Self::Auto) } else { name.parse().map(Self::Named) }
    }
}

/// Sets the strategy that is fastest for this run, and says why.
fn choose_strategy(config: &mut TrainConfig) -> Result<String, String> {
    config.validate().map_err(|error| error.to_string())?;
    let cluster = Cluster::preset("cpu").expect("a preset").with_devices(config.ranks_of_a_sequence());
    let workload = Workload {
        model: config.model.clone(),
        seq_len: config.seq_len,
        mask: MaskKind::Causal,
        checkpointing: config.checkpointing,
        sharding: config.sharding,
        overlap: true,
    };
    let choice = planner::choose(&workload, &cluster).map_err(|error| error.to_string())?;
    config.strategy = choice.strategy.into();
    Ok(format!("auto chooses {}\n", choice.reason))
}

impl TrainCommand {
    /// Trains, and says what came of it.
    pub(super) fn run(self, allocator: &'static Counting) -> Result<String, Failure> {
        let mut file = self.file().map_err(Failure::Refused)?;
        let is_auto = match self.flags.strategy {
            Some(StrategyFlag::Auto) => true,
            Some(StrategyFlag::Named(_)) => false,
            None => file.get("strategy").and_then(toml::Value::as_str) == Some("auto"),
        };
        if is_auto {
            file.remove("strategy");
        }
        let mut config = resolve(&TrainConfig::default(), file, &self.flags)
            .map_err(|error| Failure::Refused(self.in_file(error)))?;
        if is_auto {
            // Before the run, which may be long; standard output is for what came of it.
            eprint!("{}", choose_strategy(&mut config).map_err(Failure::Refused)?);
        }
        let describe = |error: TrainError| {
            let failure = if error.is_refusal() { Failure::Refused } else { Failure::Failed };
            failure(error.to_string())
        };
        let summary = match &self.resume {
            Some(run) => resume(config, run, allocator, |damaged| eprintln!("passed over: {damaged}")),
            None => train(config, &self.runs, self.name.as_deref(), allocator),
        };
        summary.map(|summary| report(&summary)).map_err(describe)
    }

    fn file(&self) -> Result<Table, String> {
        let Some(path) = self.settings() else { return Ok(Table::new()) };
        let text = fs::read_to_string(&path).map_err(|error| self.in_file(error.to_string()))?;
        parse(&text).map_err(|error| self.in_file(error))
    }

    /// The settings file, or that of the run that goes on.
    fn settings(&self) -> Option<PathBuf> {
        self.config.clone().or_else(|| Some(self.resume.as_ref()?.join("config.toml")))
    }

    fn in_file(&self, error: String) -> String {
        self.settings().map_or_else(|| error.clone(), |path| format!("{}: {error}", path.display()))
    }
}

fn report(summary: &Summary) -> String {
    let Summary { folder, final_loss, unigram_entropy, tokens_per_second, elapsed, memory } = summary;
    // Baselines that have no schedule draw none.
    let schedule = if folder.join("schedule.svg").exists() { "schedule.svg, " } else { "" };
    format!(
        "loss {final_loss:.3} nats per byte; guessing by frequency alone would give {unigram_entropy:.3}\n\
         {:.0} s, {tokens_per_second:.0} tokens/s\n\
         {}{}: loss.svg, {schedule}metrics.jsonl, memory.json, config.toml, model/\n",
        elapsed.as_secs_f64(),
        memory.summary(),
        folder.display(),
    )
}
