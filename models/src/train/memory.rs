//! What a run holds in memory, counted and planned.

use super::config::TrainConfig;
use crate::planner::{kept_bytes, state_bytes};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_distflash::{Checkpointing, KeptBytes, Sharding};
use serde::{Deserialize, Serialize};

/// Bytes of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMemory {
    /// Parameters that are updated.
    pub parameters: usize,
    /// AdamW's moments.
    pub optimizer: usize,
    /// Gradients, once they are summed over ranks.
    pub gradients: usize,
    /// Inputs of segments, when all of forward is done and nothing of backward.
    pub kept_inputs: usize,
    /// Outputs and lse of attention at that time.
    pub kept_attention: usize,
    /// Of both, what is in host memory instead.
    pub kept_on_host: usize,
}

/// `memory.json` of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Of each rank: sizes of the tensors that were there.
    pub ranks: Vec<RankMemory>,
    /// By the arithmetic of `distflash plan`, for the rank with most tokens.
    pub planned: RankMemory,
    /// The most that the whole process, hence all ranks together, had allocated at once.
    pub process_peak: usize,
}

impl RankMemory {
    pub(super) fn with_kept(self, kept: KeptBytes) -> Self {
        Self {
            kept_inputs: self.kept_inputs.max(kept.inputs),
            kept_attention: self.kept_attention.max(kept.attention),
            kept_on_host: self.kept_on_host.max(kept.on_host),
            ..self
        }
    }

    /// By arithmetic: what [`state_bytes`] and [`kept_bytes`] say.
    #[must_use]
    pub fn planned(config: &TrainConfig) -> Self {
        let TrainConfig { model, sharding, checkpointing, .. } = config;
        let owned = if *sharding == Sharding::None { 1 } else { config.ranks };
        let state = state_bytes(model, *sharding, config.ranks);
        let element = config.precision.dtype().size() as f64;
        let sequences = config.batch_size / config.data_parallel;
        let tokens = (sequences * config.seq_len.div_ceil(config.ranks_of_a_sequence())) as f64;
        let of_layers = |checkpointing| match checkpointing {
            // Segments keep nothing: Burn's graph keeps everything.
            Checkpointing::Store => 0.,
            other => kept_bytes(model, other, element, 1.) * model.num_hidden_layers as f64,
        };
        let inputs = if *checkpointing == Checkpointing::Store { 0. } else { of_layers(Checkpointing::Boundary) };
        // The head is always a segment.
        let head = element * model.hidden_size as f64;
        Self {
            parameters: (state / 3.) as usize,
            optimizer: (state * 2. / 3.) as usize,
            gradients: 4 * model.num_parameters() / owned,
            kept_inputs: ((inputs + head) * tokens) as usize,
            kept_attention: ((of_layers(*checkpointing) - inputs) * tokens) as usize,
            kept_on_host: 0,
        }
    }
}

impl MemoryReport {
    /// The highest of all ranks, kind by kind.
    #[must_use]
    pub fn highest(&self) -> RankMemory {
        let most = |kind: fn(&RankMemory) -> usize| self.ranks.iter().map(kind).max().unwrap_or(0);
        RankMemory {
            parameters: most(|rank| rank.parameters),
            optimizer: most(|rank| rank.optimizer),
            gradients: most(|rank| rank.gradients),
            kept_inputs: most(|rank| rank.kept_inputs),
            kept_attention: most(|rank| rank.kept_attention),
            kept_on_host: most(|rank| rank.kept_on_host),
        }
    }

    /// For people.
    #[must_use]
    pub fn summary(&self) -> String {
        let (found, planned) = (self.highest(), self.planned);
        let mib = |bytes: usize| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        let kinds = [
            ("parameters", found.parameters, planned.parameters),
            ("optimizer", found.optimizer, planned.optimizer),
            ("gradients", found.gradients, planned.gradients),
            ("segments' inputs", found.kept_inputs, planned.kept_inputs),
            ("kept attention", found.kept_attention, planned.kept_attention),
            ("on the host", found.kept_on_host, planned.kept_on_host),
        ];
        let shown = kinds.iter().filter(|(_, found, planned)| found + planned > 0);
        let shown = shown.map(|(what, found, planned)| format!("{what} {} ({})", mib(*found), mib(*planned)));
        format!(
            "a rank's MiB, counted (planned): {}; all ranks at most {}\n",
            shown.collect::<Vec<_>>().join(", "),
            mib(self.process_peak)
        )
    }
}

/// Bytes of a module's parameters.
pub(super) fn parameter_bytes<M: Module>(module: &M) -> usize {
    struct Bytes(usize);
    impl ModuleVisitor for Bytes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 += bytes(&param.val());
        }
    }
    let mut sum = Bytes(0);
    module.visit(&mut sum);
    sum.0
}

/// Bytes of the gradients there are of a module's parameters.
pub(super) fn gradient_bytes<M: Module>(module: &M, grads: &GradientsParams) -> usize {
    struct Bytes<'a>(&'a GradientsParams, usize);
    impl ModuleVisitor for Bytes<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1 += self.0.get::<D>(param.id).map_or(0, |grad| bytes(&grad));
        }
    }
    let mut sum = Bytes(grads, 0);
    module.visit(&mut sum);
    sum.1
}

fn bytes<const D: usize>(tensor: &Tensor<D>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}
