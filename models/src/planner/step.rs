//! Time, traffic and memory of one optimizer step.

use super::cluster::Cluster;
use super::events::{Scale, Timeline, simulate};
use super::workload::{MaskKind, Workload};
use crate::llama::LlamaConfig;
use crate::method::Method;
use burn_distflash::schedule::{AttentionShape, Pass};
use burn_distflash::{Checkpointing, Plan, PlanError, Sequence, Sharding, Strategy};

/// What a step costs. Seconds are those of the slowest rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// How the model is shared.
    pub method: Method,
    /// Tokens of the sequence.
    pub tokens: f64,
    /// In all.
    pub seconds: f64,
    /// Of attention, with its transfers; forward, recomputed and backward, all layers.
    pub attention_seconds: f64,
    /// Of attention's transfers that nothing hides.
    pub exposed_seconds: f64,
    /// Of parameters and gradients that travel while nothing is computed.
    pub fsdp_seconds: f64,
    /// Share of attention's time in which a rank computes nothing; unknown for baselines that are not simulated.
    pub idle_share: Option<f64>,
    /// Model FLOP/s over what the devices promise: `6 · parameters` per token and attention's unmasked pairs, nothing
    /// that is done twice.
    pub mfu: f64,
    /// Bytes a rank sends in a step, for attention, in the mean.
    pub bytes_sent: f64,
    /// The same, to other nodes.
    pub bytes_to_other_nodes: f64,
    /// Highest memory of a rank in bytes.
    pub memory: f64,
    /// Whether a device has as much.
    pub fits: bool,
    /// Attention of one layer, forward and backward; none for baselines that are not simulated.
    pub timelines: Option<[Timeline; 2]>,
}

/// Tokens a rank has at least in a plan that stands for a longer one.
const TOKENS_A_RANK: usize = 64;

/// Tokens up to which a plan is made at its real length.
const MOST_TOKENS: usize = 1 << 17;

/// Bytes of an element in training: bf16.
const ELEMENT: f64 = 2.;

impl Workload {
    /// What a step costs under `method` on `cluster`, one rank a device.
    ///
    /// # Errors
    /// If the strategy does not fit the cluster, or the mask the length.
    pub fn estimate(&self, method: Method, cluster: &Cluster) -> Result<Estimate, PlanError> {
        let layer = match method {
            Method::Context(Strategy::RingSelfAttention) => self.whole_rows(cluster),
            Method::Context(strategy) => self.context(strategy, cluster)?,
            Method::MegatronLm => self.megatron(cluster),
        };
        Ok(self.step(method, cluster, layer))
    }

    fn attention_shape(&self) -> AttentionShape {
        let model = &self.model;
        AttentionShape {
            batch: 1,
            heads: model.num_attention_heads,
            kv_heads: model.num_key_value_heads,
            head_dim: model.head_dim,
            element_bytes: ELEMENT as usize,
        }
    }

    fn tokens_a_rank(&self, cluster: &Cluster) -> f64 {
        (self.seq_len as f64 / cluster.num_devices as f64).ceil()
    }

    /// The plan, at a length that is quick to count, and what it stands for.
    ///
    /// # Errors
    /// As [`estimate`](Self::estimate).
    pub fn plan(&self, strategy: Strategy, num_ranks: usize) -> Result<(Plan, Scale), PlanError> {
        let least = num_ranks * TOKENS_A_RANK;
        // Windows and documents are looked at token by token where that is quick, or keep at least 8 tokens.
        let needed = match self.mask.detail() {
            None if strategy.axes(num_ranks).1 != Sequence::Adaptive => least,
            None => least.max(self.seq_len.min(MOST_TOKENS)),
            Some(detail) => {
                let visible = (8 * self.seq_len.div_ceil(detail)).min(4 * MOST_TOKENS);
                least.max(visible).max(self.seq_len.min(MOST_TOKENS))
            }
        };
        let len = if needed < self.seq_len { needed } else { self.seq_len };
        let factor = self.seq_len as f64 / len.max(1) as f64;
        let scaled = |keys: usize| ((keys as f64 / factor).round() as usize).max(1);
        let mask = match self.mask {
            MaskKind::Window(keys) => MaskKind::Window(scaled(keys)),
            MaskKind::Documents(each) => MaskKind::Documents(scaled(each)),
            other => other,
        };
        let plan = Plan::new(strategy, &mask.build(len)?, len, num_ranks, self.attention_shape())?;
        Ok((plan, Scale { factor }))
    }

    fn context(&self, strategy: Strategy, cluster: &Cluster) -> Result<Layer, PlanError> {
        let (plan, scale) = self.plan(strategy, cluster.num_devices)?;
        let run = |pass| simulate(&plan, pass, cluster, scale, self.overlap);
        let timelines = [Pass::Forward, Pass::Backward].map(run);
        let [forward, backward] = &timelines;
        Ok(Layer {
            linear: self.linear_seconds(cluster, 1.),
            forward: forward.seconds,
            backward: backward.seconds,
            exposed: [forward.exposed_seconds(), backward.exposed_seconds()],
            extra_memory: self.buffers(strategy, cluster),
            heads_share: 1.,
            moved: [0.; 2],
            timelines: Some(timelines),
        })
    }

    /// Keys, values and their f32 gradients, twice: what a step works on and what arrives for the next; all of them
    /// where they are gathered. Ranks that share heads hold their operands and results once more.
    fn buffers(&self, strategy: Strategy, cluster: &Cluster) -> f64 {
        let model = &self.model;
        let (head_ranks, sequence) = strategy.axes(cluster.num_devices);
        let keys = 2. * (model.num_key_value_heads * model.head_dim) as f64;
        let queries = (model.num_attention_heads * model.head_dim) as f64;
        let tokens = self.tokens_a_rank(cluster);
        let held = if sequence == Sequence::AllGather { self.seq_len as f64 / head_ranks as f64 } else { 2. * tokens };
        let shared = if head_ranks > 1 { tokens * ELEMENT * (2. * queries + keys) } else { 0. };
        held * keys * (ELEMENT + 4.) + shared
    }

    /// Seconds of one layer's products, forward, where each rank does `share` times an equal part.
    fn linear_seconds(&self, cluster: &Cluster, share: f64) -> f64 {
        let device = &cluster.device;
        let tokens = self.tokens_a_rank(cluster);
        let products = 2. * self.model.layer_parameters() as f64 * tokens * share / (device.matmul_tflops * 1e12);
        // Norms, rotary embedding, SwiGLU and residuals read and write the stream about a dozen times.
        let width = (12 * self.model.hidden_size + 3 * self.model.intermediate_size) as f64;
        products + width * ELEMENT * tokens / (device.memory_gb_s * 1e9)
    }

    fn attention_seconds(&self, cluster: &Cluster, heads: f64, rows: f64, keys: f64) -> [f64; 2] {
        let device = &cluster.device;
        let operations = heads * self.model.head_dim as f64 * rows * keys;
        let seconds = |cost: f64, rate: f64| cost * operations / (rate * 1e12) + device.call_us * 1e-6;
        [seconds(4., device.attention_forward.at(rows)), seconds(10., device.attention_backward.at(rows))]
    }

    /// Ring Self-Attention: unmasked rows of scores, written and read four times each way as f32.
    fn whole_rows(&self, cluster: &Cluster) -> Layer {
        let (rows, len, heads) =
            (self.tokens_a_rank(cluster), self.seq_len as f64, self.model.num_attention_heads as f64);
        let scores = heads * rows * len;
        let products = 4. * scores * self.model.head_dim as f64 / (cluster.device.matmul_tflops * 1e12);
        let passes = |count: f64| count * 4. * scores / (cluster.device.memory_gb_s * 1e9);
        let keys = 2. * (self.model.num_key_value_heads * self.model.head_dim) as f64 * ELEMENT * len;
        let ranks = cluster.num_devices as f64;
        let gather = keys * (ranks - 1.) / ranks / (self.slowest_link(cluster) * 1e9);
        Layer {
            linear: self.linear_seconds(cluster, 1.),
            forward: products + passes(4.) + gather,
            backward: 2. * products + passes(6.) + 2. * gather,
            exposed: [gather, 2. * gather],
            extra_memory: 2. * 4. * scores,
            heads_share: 1.,
            moved: [keys * (ranks - 1.); 2],
            timelines: None,
        }
    }

    /// GB/s at which a ring over all devices passes things on.
    fn slowest_link(&self, cluster: &Cluster) -> f64 {
        // One of a node's devices sends to the next node at a time.
        if cluster.num_nodes() > 1 { cluster.network.gb_s.min(cluster.node_link.gb_s) } else { cluster.node_link.gb_s }
    }

    fn megatron(&self, cluster: &Cluster) -> Layer {
        let ranks = cluster.num_devices;
        let heads = self.model.num_attention_heads;
        let own = heads.div_ceil(ranks) as f64;
        let len = self.seq_len as f64;
        let [forward, backward] = self.attention_seconds(cluster, own, len, self.mask.mean_keys(len));
        // Around attention and around the MLP: an all-gather and a reduce-scatter of the stream each.
        let stream = len * self.model.hidden_size as f64 * ELEMENT * (ranks - 1) as f64 / ranks as f64;
        let collective =
            stream / (self.slowest_link(cluster) * 1e9) + cluster.node_link.latency_us * 1e-6 * ranks as f64;
        let padded = own * ranks as f64 / heads as f64;
        let model = &self.model;
        let attention_parameters = model.hidden_size * 2 * model.head_dim * (heads + model.num_key_value_heads);
        let share = 1. + (padded - 1.) * attention_parameters as f64 / model.layer_parameters() as f64;
        Layer {
            linear: self.linear_seconds(cluster, share),
            forward: forward + 4. * collective,
            backward: backward + 4. * collective,
            exposed: [4. * collective, 4. * collective],
            extra_memory: 2. * len * model.hidden_size as f64 * ELEMENT,
            heads_share: padded,
            moved: [4. * stream * ranks as f64; 2],
            timelines: None,
        }
    }

    fn step(&self, method: Method, cluster: &Cluster, layer: Layer) -> Estimate {
        let (model, device) = (&self.model, &cluster.device);
        let layers = model.num_hidden_layers as f64;
        let checkpointing = if method == Method::MegatronLm { Checkpointing::Boundary } else { self.checkpointing };
        let (linear_again, attention_again) = match checkpointing {
            Checkpointing::Store => (0., 0.),
            Checkpointing::Boundary => (1., 1.),
            Checkpointing::KeepAttention => (1., 0.),
        };
        let attention = (1. + attention_again) * layer.forward + layer.backward;
        let exposed = (1. + attention_again) * layer.exposed[0] + layer.exposed[1];
        let linear = (3. + linear_again) * layer.linear;
        let tokens = self.tokens_a_rank(cluster);
        let head = 6. * (model.vocab_size * model.hidden_size) as f64 * tokens / (device.matmul_tflops * 1e12);
        let parameters = model.num_parameters() as f64;
        let ranks = cluster.num_devices as f64;
        let is_shared = self.sharding != Sharding::None && method != Method::MegatronLm;
        let owned = if is_shared || method == Method::MegatronLm { parameters / ranks } else { parameters };
        // AdamW reads and writes f32 parameter, gradient and two moments.
        let optimizer = 7. * 4. * owned / (device.memory_gb_s * 1e9);
        let fsdp = self.fsdp_seconds(method, cluster, layers * (attention + linear));
        let seconds = layers * (attention + linear) + head + optimizer + fsdp;
        let pairs = self.seq_len as f64 * self.mask.mean_keys(self.seq_len as f64);
        let width = (model.num_attention_heads * model.head_dim) as f64;
        let model_operations = 6. * parameters * self.seq_len as f64 + 12. * pairs * width * layers;
        let memory = self.memory(method, cluster, checkpointing, &layer);
        // Around a ring over all devices, one of a node's sends to another node.
        let moved = (1. + attention_again) * layer.moved[0] + layer.moved[1];
        let crossing = if cluster.num_nodes() > 1 { moved / cluster.devices_per_node as f64 } else { 0. };
        let counted = (moved - crossing, crossing);
        let (near, far) = layer.timelines.as_ref().map_or(counted, |[forward, backward]| {
            let (a, b) = (forward.bytes(cluster), backward.bytes(cluster));
            ((1. + attention_again) * a.0 + b.0, (1. + attention_again) * a.1 + b.1)
        });
        Estimate {
            method,
            tokens: self.seq_len as f64,
            seconds,
            attention_seconds: layers * attention,
            exposed_seconds: layers * exposed,
            fsdp_seconds: fsdp,
            idle_share: layer.timelines.as_ref().map(|[forward, backward]| {
                let idle = forward.idle_share() * forward.seconds + backward.idle_share() * backward.seconds;
                idle / (forward.seconds + backward.seconds)
            }),
            mfu: model_operations / (seconds * ranks * device.peak_tflops * 1e12),
            bytes_sent: layers * (near + far) / ranks,
            bytes_to_other_nodes: layers * far / ranks,
            fits: memory <= device.memory_gib * f64::powi(2., 30),
            memory,
            timelines: layer.timelines,
        }
    }

    /// What FSDP's transfers add: parameters are gathered for forward and for backward and gradients are
    /// reduce-scattered in f32, beside what is computed.
    fn fsdp_seconds(&self, method: Method, cluster: &Cluster, computing: f64) -> f64 {
        if method == Method::MegatronLm || cluster.num_devices == 1 {
            return 0.;
        }
        let parameters = self.model.num_parameters() as f64;
        let bytes = match self.sharding {
            Sharding::Full => parameters * (2. * ELEMENT + 4.),
            // An all-reduce of gradients, or its two halves.
            Sharding::None | Sharding::Optimizer | Sharding::Gradients => parameters * (4. + ELEMENT),
        };
        let moving = bytes / (self.slowest_link(cluster) * 1e9);
        // The first layer's gather and the last layer's scatter have nothing beside them.
        let ends = moving * 2. / (3. * self.model.num_hidden_layers as f64);
        ends.max(moving - 0.9 * computing)
    }

    fn memory(&self, method: Method, cluster: &Cluster, checkpointing: Checkpointing, layer: &Layer) -> f64 {
        let model = &self.model;
        let (parameters, ranks) = (model.num_parameters() as f64, cluster.num_devices as f64);
        let tokens = self.tokens_a_rank(cluster);
        // Beside what lives between steps: bf16 parameters, and gradients in f32.
        let state = match (method, self.sharding) {
            (Method::MegatronLm, _) => parameters * (ELEMENT + 16.) / ranks,
            (_, sharding) => {
                state_bytes(model, sharding, cluster.num_devices)
                    + match sharding {
                        Sharding::None | Sharding::Optimizer => parameters * (ELEMENT + 4.),
                        Sharding::Gradients => parameters * (ELEMENT + 4. / ranks),
                        Sharding::Full => {
                            parameters * 4. / ranks + 2. * model.layer_parameters() as f64 * (ELEMENT + 4.)
                        }
                    }
            }
        };
        let kept_of = |checkpointing| kept_bytes(model, checkpointing, ELEMENT, layer.heads_share);
        let (whole, kept) = (kept_of(Checkpointing::Store), kept_of(checkpointing));
        // One layer is always whole, with its gradients; logits are made a few thousand tokens at a time.
        let working = tokens * 2. * whole + layer.extra_memory;
        let logits = tokens.min(4096.) * model.vocab_size as f64 * 6.;
        state + tokens * kept * model.num_hidden_layers as f64 + working + logits
    }

    /// The longest sequence that fits, a power of two times 1024, up to 64M tokens; 0 if none does.
    ///
    /// # Errors
    /// As [`estimate`](Self::estimate).
    pub fn longest(&self, method: Method, cluster: &Cluster) -> Result<usize, PlanError> {
        let lens = (10..27).map(|power| 1usize << power);
        let mut longest = 0;
        for seq_len in lens {
            let workload = Self { seq_len, ..self.clone() };
            let layer = match method {
                Method::Context(Strategy::RingSelfAttention) => workload.whole_rows(cluster),
                Method::MegatronLm => workload.megatron(cluster),
                Method::Context(strategy) => {
                    Layer { extra_memory: workload.buffers(strategy, cluster), ..workload.whole_rows(cluster) }
                }
            };
            let checkpointing = if method == Method::MegatronLm { Checkpointing::Boundary } else { self.checkpointing };
            if workload.memory(method, cluster, checkpointing, &layer) > cluster.device.memory_gib * f64::powi(2., 30) {
                break;
            }
            longest = seq_len;
        }
        Ok(longest)
    }

    /// Estimates of `methods`, those that do not fit the cluster left out.
    #[must_use]
    pub fn compare(&self, methods: &[Method], cluster: &Cluster) -> Vec<Estimate> {
        methods.iter().filter_map(|&method| self.estimate(method, cluster).ok()).collect()
    }
}

/// Bytes a token that a layer keeps for backward, with elements of so many bytes, on a rank that has a share of the
/// heads for all of the tokens it is counted for.
///
/// For `Store` it is what backward needs at least; Burn's own autodiff keeps about half as much again.
#[must_use]
pub fn kept_bytes(model: &LlamaConfig, checkpointing: Checkpointing, element: f64, heads_share: f64) -> f64 {
    let (hidden, inner) = (model.hidden_size as f64, model.intermediate_size as f64);
    let queries = (model.num_attention_heads * model.head_dim) as f64 * heads_share;
    let keys = (model.num_key_value_heads * model.head_dim) as f64 * heads_share;
    let lse = 4. * model.num_attention_heads as f64;
    match checkpointing {
        // Residual, two norms, q, k, v, out, the second residual, gate, up and their product.
        Checkpointing::Store => element * (4. * hidden + 2. * queries + 2. * keys + 3. * inner) + lse,
        Checkpointing::Boundary => element * hidden,
        Checkpointing::KeepAttention => element * (hidden + queries) + lse,
    }
}

/// Bytes of parameters and optimizer state between steps on each of `ranks`: f32 parameters and two moments, whole or
/// in equal parts.
#[must_use]
pub fn state_bytes(model: &LlamaConfig, sharding: Sharding, ranks: usize) -> f64 {
    let whole = 12. * model.num_parameters() as f64;
    if sharding == Sharding::None { whole } else { whole / ranks as f64 }
}

/// What one layer costs.
struct Layer {
    linear: f64,
    forward: f64,
    backward: f64,
    exposed: [f64; 2],
    extra_memory: f64,
    heads_share: f64,
    /// Bytes of all ranks, forward and backward, where no timeline says them.
    moved: [f64; 2],
    timelines: Option<[Timeline; 2]>,
}

/// The strategies to choose from on `cluster`: all sequences, Ulysses, and hybrids whose heads stay within a node.
#[must_use]
pub fn candidates(cluster: &Cluster) -> Vec<Strategy> {
    let world = cluster.num_devices;
    let mut all: Vec<Strategy> = Sequence::ALL.map(Strategy::from).into();
    if cluster.num_nodes() > 1 && world.is_multiple_of(cluster.devices_per_node) {
        all.push(Sequence::DoubleRing { ranks_per_node: cluster.devices_per_node }.into());
    }
    all.push(Strategy::Ulysses);
    let divides = |ranks: &usize| world.is_multiple_of(*ranks) && *ranks < world;
    for head_ranks in (2..=cluster.devices_per_node).filter(divides) {
        for sequence in [Sequence::Zigzag, Sequence::Balanced] {
            all.push(Strategy::Hybrid { head_ranks, sequence });
        }
    }
    all
}
