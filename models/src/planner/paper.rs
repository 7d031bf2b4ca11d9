//! The DistFlashAttn paper's measurements (arXiv 2310.03294) beside what is predicted of them.

use super::cluster::Cluster;
use super::events::simulate;
use super::workload::{MaskKind, Workload};
use crate::llama::LlamaConfig;
use crate::method::Method;
use burn_distflash::schedule::Pass;
use burn_distflash::{Checkpointing, PlanError, Sequence, Sharding, Strategy};

/// One number of the paper.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// What was measured.
    pub what: String,
    /// As the paper has it.
    pub measured: f64,
    /// As the cost model has it.
    pub predicted: f64,
    /// Whether the model's rates were fitted to it: not a prediction then.
    pub is_fitted: bool,
}

impl Finding {
    /// Prediction over measurement, less one.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.predicted / self.measured - 1.
    }
}

fn workload(model: &str, seq_len: usize, checkpointing: Checkpointing, overlap: bool) -> Workload {
    let model = LlamaConfig::preset(model).expect("a preset");
    Workload { model, seq_len, mask: MaskKind::Causal, checkpointing, sharding: Sharding::Full, overlap }
}

fn seconds(
    model: &str,
    seq_len: usize,
    cluster: &Cluster,
    method: Method,
    checkpointing: Checkpointing,
) -> Result<f64, PlanError> {
    Ok(workload(model, seq_len, checkpointing, true).estimate(method, cluster)?.seconds)
}

/// `(GPUs, tokens, [7B, GQA, 33H] of Megatron-LM, the same of DistFlashAttn)`, seconds per iteration.
const ITERATIONS: [(usize, usize, [f64; 3], [f64; 3]); 6] = [
    (8, 64, [6.81, 6.60, 8.37], [5.98, 5.61, 6.08]),
    (8, 128, [20.93, 20.53, 25.75], [17.26, 16.86, 17.77]),
    (8, 256, [72.75, 71.93, 90.21], [58.46, 57.01, 59.96]),
    (16, 128, [14.26, 14.21, 20.63], [12.75, 9.74, 13.12]),
    (16, 256, [43.44, 43.20, 62.78], [30.21, 28.49, 31.33]),
    (16, 512, [147.06, 146.38, 216.70], [106.37, 102.34, 107.76]),
];

/// `(tokens, [7B, 33H])` of DeepSpeed-Ulysses on 16 GPUs, seconds per iteration.
const ULYSSES: [(usize, [f64; 2]); 2] = [(256, [37.53, 56.63]), (512, [134.09, 202.89])];

/// `(thousand tokens a GPU, HuggingFace's checkpoints, the paper's)` on 8 GPUs, seconds per iteration.
const CHECKPOINTS: [(usize, f64, f64); 4] = [(4, 2.64, 2.50), (8, 6.93, 5.98), (16, 21.44, 17.26), (32, 76.38, 58.46)];

/// Everything that the paper measured and the model predicts.
///
/// # Errors
/// Never for the paper's own sizes.
pub fn findings() -> Result<Vec<Finding>, PlanError> {
    let cluster_of = |gpus: usize| Cluster::preset(if gpus == 8 { "8xa100" } else { "2x8xa100" }).expect("a preset");
    let ours = Method::Context(Sequence::Balanced.into());
    let models = [("7B", "llama-7b"), ("GQA", "llama-7b-gqa"), ("33H", "llama-7b-33h")];
    let mut findings = Vec::new();
    let mut add =
        |what: String, measured, predicted, is_fitted| findings.push(Finding { what, measured, predicted, is_fitted });
    for (gpus, len, megatron, distflash) in ITERATIONS {
        let cluster = cluster_of(gpus);
        for (i, (name, model)) in models.into_iter().enumerate() {
            let at = |method, checkpointing| seconds(model, len << 10, &cluster, method, checkpointing);
            let theirs = at(Method::MegatronLm, Checkpointing::Boundary)?;
            let own = at(ours, Checkpointing::KeepAttention)?;
            // The rates of attention are read off these two rows.
            let is_fitted = name == "7B" && matches!((gpus, len), (8, 256) | (8, 128));
            add(format!("DistFlashAttn {name}, {gpus} GPUs, {len}K: s"), distflash[i], own, is_fitted);
            add(format!("Megatron-LM {name}, {gpus} GPUs, {len}K: s"), megatron[i], theirs, false);
            add(
                format!("speed-up over Megatron-LM, {name}, {gpus} GPUs, {len}K"),
                megatron[i] / distflash[i],
                theirs / own,
                false,
            );
        }
    }
    for (len, measured) in ULYSSES {
        let cluster = cluster_of(16);
        for ((name, model), measured) in [models[0], models[2]].into_iter().zip(measured) {
            let method = Method::Context(Strategy::PaddedUlysses);
            let predicted = seconds(model, len << 10, &cluster, method, Checkpointing::Boundary)?;
            add(format!("DeepSpeed-Ulysses {name}, 16 GPUs, {len}K: s"), measured, predicted, false);
        }
    }
    for (len, boundary, kept) in CHECKPOINTS {
        let cluster = cluster_of(8);
        let at = |checkpointing| seconds("llama-7b", (8 * len) << 10, &cluster, ours, checkpointing);
        let speed_up = at(Checkpointing::Boundary)? / at(Checkpointing::KeepAttention)?;
        add(format!("keeping attention, {len}K a GPU: speed-up"), boundary / kept, speed_up, len == 16 || len == 32);
    }
    let cluster = cluster_of(8);
    let attention = |sequence: Sequence, gpus: usize| -> Result<f64, PlanError> {
        let workload = workload("llama-7b", 256 << 10, Checkpointing::Store, true);
        let (plan, scale) = workload.plan(sequence.into(), gpus)?;
        let run = |pass| simulate(&plan, pass, &cluster.clone().with_devices(gpus), scale, true).seconds;
        Ok(run(Pass::Forward) + run(Pass::Backward))
    };
    let alone = attention(Sequence::Ring, 1)?;
    add("attention on 8 GPUs over one, unbalanced ring".to_string(), 4.5, alone / attention(Sequence::Ring, 8)?, false);
    add("attention on 8 GPUs over one, balanced".to_string(), 7.5, alone / attention(Sequence::Balanced, 8)?, false);
    let overlapped = |overlap| -> Result<f64, PlanError> {
        let workload = workload("llama-7b", 128 << 10, Checkpointing::KeepAttention, overlap);
        Ok(workload.estimate(ours, &cluster_of(16))?.seconds)
    };
    add("overlap at 128K, 16 GPUs: speed-up".to_string(), 1.32, overlapped(false)? / overlapped(true)?, false);
    for (len, theirs, own) in [(32, 14.10, 2.50), (64, 30.49, 6.85)] {
        let cluster = cluster_of(8);
        let baseline = seconds(
            "llama-7b",
            len << 10,
            &cluster,
            Method::Context(Strategy::RingSelfAttention),
            Checkpointing::Boundary,
        )?;
        let balanced = seconds("llama-7b", len << 10, &cluster, ours, Checkpointing::KeepAttention)?;
        add(format!("speed-up over Ring Self-Attention, {len}K"), theirs / own, baseline / balanced, false);
    }
    Ok(findings)
}

/// The findings as a table.
#[must_use]
pub fn table(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.what.len()).max().unwrap_or(0);
    let mut text = format!("{:<width$}  {:>8}  {:>9}  {:>6}\n", "the paper", "measured", "predicted", "off");
    for finding in findings {
        let note = if finding.is_fitted { "  (fitted)" } else { "" };
        text += &format!(
            "{:<width$}  {:>8.2}  {:>9.2}  {:>+5.0}%{note}\n",
            finding.what,
            finding.measured,
            finding.predicted,
            100. * finding.error(),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ring Self-Attention at 32K apart, of whose implementation nothing is known but that its time grows linearly.
    #[test]
    fn the_papers_findings_are_within_fifteen_percent() {
        let findings = findings().unwrap();
        let off: Vec<_> = findings.iter().filter(|finding| finding.error().abs() > 0.15).collect();
        assert!(findings.len() >= 60, "{}", findings.len());
        let names: Vec<_> =
            off.iter().map(|finding| (finding.what.as_str(), finding.measured, finding.predicted)).collect();
        assert!(names.iter().all(|name| name.0 == "speed-up over Ring Self-Attention, 32K"), "{names:?}");
    }
}
