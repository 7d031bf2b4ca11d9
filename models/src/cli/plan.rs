//! `distflash plan`.

use super::Failure;
use super::schedule::{len, mask};
use crate::llama::LlamaConfig;
use crate::method::Method;
use crate::planner::{self, Cluster, Estimate, MaskKind, Workload};
use burn_distflash::{Checkpointing, Sharding, Strategy};
use clap::{Args, ValueHint};
use std::fs;
use std::path::PathBuf;

/// What a training step would cost under every strategy, before anything is rented.
///
/// Nothing is computed on a device: attention is simulated kernel by kernel and transfer by transfer on a described
/// cluster, the rest is counted.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  distflash plan --model llama-7b --cluster 8xh100 --seq-len 256K
  distflash plan --model llama3-8b --cluster 8xh200 --gpus 64 --seq-len 1M --html plan.html
  distflash plan --cluster my-cluster.toml --mask documents:8K
  distflash plan --paper                               the paper's measurements beside predictions")]
pub struct PlanCommand {
    /// The model: tiny, smollm2-135m, llama-7b, llama3-8b, or the paper's llama-7b-gqa, -33h, -16h, -8h, -4h, -2h.
    #[arg(long, default_value = "llama-7b")]
    model: String,
    /// The cluster: cpu, 8xh100, 8xh200, 8xa100, 2x8xa100, or a TOML file that describes one.
    #[arg(long, default_value = "8xh100", value_hint = ValueHint::FilePath)]
    cluster: String,
    /// Devices, in nodes like the cluster's [default: as many as the cluster has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    gpus: Option<u32>,
    /// Measured rates that replace the cluster's: a TOML file with fields of its [device].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    rates: Option<PathBuf>,
    /// Tokens of the sequence, over all devices; K and M are powers of 1024.
    #[arg(long, value_name = "TOKENS", default_value = "128K", value_parser = len)]
    seq_len: usize,
    /// causal, full, window:<keys>, or documents:<tokens each>.
    #[arg(long, default_value = "causal", value_parser = mask)]
    mask: MaskKind,
    /// The strategy to show; auto is the fastest that fits, or what sends least of those within half a percent of it.
    #[arg(long, default_value = "auto")]
    strategy: String,
    /// What of the forward pass is kept for backward: store, boundary or keep-attention.
    #[arg(long, default_value = "keep-attention")]
    checkpointing: Checkpointing,
    /// What is spread over devices: none, optimizer (ZeRO 1), gradients (2) or full (3).
    #[arg(long, default_value = "full")]
    sharding: Sharding,
    /// Start a step's transfers only when the step before is computed.
    #[arg(long)]
    no_overlap: bool,
    /// Write a web page with the timeline and curves.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    html: Option<PathBuf>,
    /// Print what the DistFlashAttn paper measured beside what is predicted of it, and nothing else.
    #[arg(long, exclusive = true)]
    paper: bool,
}

impl PlanCommand {
    pub(super) fn run(self) -> Result<String, Failure> {
        let refused = |error: &dyn ToString| Failure::Refused(error.to_string());
        if self.paper {
            let findings = planner::paper::findings().map_err(|error| refused(&error))?;
            return Ok(planner::paper::table(&findings));
        }
        let model = LlamaConfig::preset(&self.model).map_err(|error| refused(&error))?;
        let mut cluster = Cluster::load(&self.cluster).map_err(|error| refused(&error))?;
        if let Some(rates) = &self.rates {
            cluster = cluster.with_rates(rates).map_err(|error| refused(&error))?;
        }
        if let Some(gpus) = self.gpus {
            cluster = cluster.with_devices(gpus as usize);
        }
        let workload = Workload {
            model,
            seq_len: self.seq_len,
            mask: self.mask,
            checkpointing: self.checkpointing,
            sharding: self.sharding,
            overlap: !self.no_overlap,
        };
        let choice = planner::choose(&workload, &cluster).map_err(|error| refused(&error))?;
        let mut rows = choice.ranking;
        let baselines = [
            Method::Context(Strategy::PaddedUlysses),
            Method::Context(Strategy::RingSelfAttention),
            Method::MegatronLm,
        ];
        rows.extend(workload.compare(&baselines, &cluster));
        let (method, reason) = match self.strategy.as_str() {
            "auto" => (choice.strategy.into(), format!("auto chooses {}", choice.reason)),
            named => {
                let method: Method = named.parse().map_err(|error| refused(&error))?;
                (method, format!("{method}, as asked for; auto would choose {}", choice.reason))
            }
        };
        let chosen = workload.estimate(method, &cluster).map_err(|error| refused(&error))?;
        if !rows.iter().any(|row| row.method == method) {
            rows.push(chosen.clone());
        }
        rows.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let longest = |estimate: Estimate| {
            let longest = workload.longest(estimate.method, &cluster).unwrap_or(0);
            (estimate, longest)
        };
        let rows: Vec<_> = rows.into_iter().map(longest).collect();
        let table = planner::table(&rows);
        let devices = cluster.num_devices;
        let mut text = format!(
            "{}, {} tokens, {devices} like those of {}\n{reason}\n\n{table}",
            self.model,
            planner::human_len(self.seq_len),
            cluster.name,
        );
        if let Some(path) = &self.html {
            let page = planner::html::Page {
                model: &self.model,
                workload: &workload,
                cluster: &cluster,
                rows: &rows,
                chosen: &chosen,
                reason: &reason,
            };
            let html = page.render().map_err(|error| Failure::Failed(error.to_string()))?;
            fs::write(path, html).map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))?;
            text += &format!("\n{}: the timeline and curves\n", path.display());
        }
        Ok(text)
    }
}
