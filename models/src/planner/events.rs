//! What a plan does over time on a cluster: a simulation of every kernel and every transfer.

use super::cluster::{Cluster, Link};
use burn_distflash::schedule::{Chunk, Pair, Pass, Schedule, Transfer};
use burn_distflash::{HeadShare, Plan, Rank};

/// What a rank does in one stretch of time.
#[derive(Clone, Debug, PartialEq)]
pub enum Activity {
    /// Computes a block of its own queries.
    Own(String),
    /// Computes a block for another rank.
    Help(String),
    /// An all-to-all over heads.
    HeadExchange,
}

/// A stretch of time of a rank, in seconds from the start of the pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// From.
    pub start: f64,
    /// To.
    pub end: f64,
    /// Doing what.
    pub activity: Activity,
}

/// One transfer, in seconds from the start of the pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Sent {
    /// From.
    pub start: f64,
    /// To.
    pub end: f64,
    /// Who sends.
    pub from: Rank,
    /// Who receives.
    pub to: Rank,
    /// How much.
    pub bytes: f64,
}

/// One pass of attention in one layer, on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// `ranks[r]`: what rank `r` computes, in order.
    pub ranks: Vec<Vec<Span>>,
    /// All transfers.
    pub transfers: Vec<Sent>,
    /// When the last rank is done.
    pub seconds: f64,
    /// The same if every transfer took no time.
    pub compute_seconds: f64,
}

impl Timeline {
    /// Time that transfers add to the pass.
    #[must_use]
    pub fn exposed_seconds(&self) -> f64 {
        self.seconds - self.compute_seconds
    }

    /// How long kernels of `rank` run.
    #[must_use]
    pub fn compute_seconds_of(&self, rank: Rank) -> f64 {
        let kernels = self.ranks[rank].iter().filter(|span| span.activity != Activity::HeadExchange);
        kernels.map(|span| span.end - span.start).sum()
    }

    /// Share of all ranks' time in which nothing is computed.
    #[must_use]
    pub fn idle_share(&self) -> f64 {
        let busy: f64 = (0..self.ranks.len()).map(|rank| self.compute_seconds_of(rank)).sum();
        let slots = self.seconds * self.ranks.len() as f64;
        if slots > 0. { (1. - busy / slots).max(0.) } else { 0. }
    }

    /// Bytes between devices of a node, and between nodes.
    #[must_use]
    pub fn bytes(&self, cluster: &Cluster) -> (f64, f64) {
        let node = |rank| rank / cluster.devices_per_node;
        let split = self
            .transfers
            .iter()
            .map(|sent| if node(sent.from) == node(sent.to) { (sent.bytes, 0.) } else { (0., sent.bytes) });
        split.fold((0., 0.), |sum, bytes| (sum.0 + bytes.0, sum.1 + bytes.1))
    }
}

/// Keys of a kernel's tile.
const TILE: f64 = 128.;

/// A plan for `len` tokens stands for one of `len · factor`: schedules look alike at every length, and long ones
/// take long to count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Tokens for one of the plan's.
    pub factor: f64,
}

/// What transfers cost, and where they wait: each device has a way out and a way in to its node, each node one to
/// the network.
struct Links<'a> {
    cluster: &'a Cluster,
    /// Until when each is busy: `[out, in]` by device, then by node.
    devices: Vec<[f64; 2]>,
    nodes: Vec<[f64; 2]>,
    is_free: bool,
}

impl<'a> Links<'a> {
    fn new(cluster: &'a Cluster, is_free: bool) -> Self {
        let (devices, nodes) = (vec![[0.; 2]; cluster.num_devices], vec![[0.; 2]; cluster.num_nodes()]);
        Self { cluster, devices, nodes, is_free }
    }

    /// When a transfer that may start at `ready` starts and ends.
    fn send(&mut self, from: Rank, to: Rank, bytes: f64, ready: f64) -> (f64, f64) {
        if self.is_free {
            return (ready, ready);
        }
        let node = |rank| rank / self.cluster.devices_per_node;
        let (link, places, [a, b]) = if node(from) == node(to) {
            (self.cluster.node_link, &mut self.devices, [from, to])
        } else {
            (self.cluster.network, &mut self.nodes, [node(from), node(to)])
        };
        // Each end serves its own transfers in order and waits for no other: switches buffer and share, and a transfer
        // that waits for its receiver does not hold up its sender.
        let seconds = bytes / (link.gb_s * 1e9);
        let [start, at_b] = [places[a][0], places[b][1]].map(|free| ready.max(free));
        (places[a][0], places[b][1]) = (start + seconds, at_b + seconds);
        (start, start.max(at_b) + seconds + link.latency_us * 1e-6)
    }

    /// When an all-to-all among `group` that all enter at `ready` ends, where each sends `bytes` to each other.
    fn all_to_all(&self, group: std::ops::Range<Rank>, bytes: impl Fn(Rank, Rank) -> f64, ready: f64) -> f64 {
        if self.is_free || group.len() < 2 {
            return ready;
        }
        let node = |rank| rank / self.cluster.devices_per_node;
        let time =
            |link: Link, bytes: f64| if bytes > 0. { bytes / (link.gb_s * 1e9) + link.latency_us * 1e-6 } else { 0. };
        let peers = |rank: Rank, is_close: bool| {
            group.clone().filter(move |&peer| peer != rank && (node(peer) == node(rank)) == is_close)
        };
        let near = |rank: Rank| time(self.cluster.node_link, peers(rank, true).map(|peer| bytes(rank, peer)).sum());
        let far = |at: usize| {
            let here = group.clone().filter(|&rank| node(rank) == at);
            time(
                self.cluster.network,
                here.flat_map(|rank| peers(rank, false).map(move |peer| (rank, peer))).map(|(a, b)| bytes(a, b)).sum(),
            )
        };
        let longest = group.clone().map(near).chain((0..self.cluster.num_nodes()).map(far)).fold(0., f64::max);
        ready + longest
    }
}

/// Simulates one pass of attention of one layer.
///
/// A rank's kernels run one after the other; its transfers run beside them, posted one step ahead into two
/// buffers. With `overlap` off a step's transfers start when all its kernels have ended.
#[must_use]
pub fn simulate(plan: &Plan, pass: Pass, cluster: &Cluster, scale: Scale, overlap: bool) -> Timeline {
    let run = |is_free| Simulator { plan, pass, cluster, scale, overlap }.run(is_free);
    let (compute_seconds, mut timeline) = (run(true).seconds, run(false));
    timeline.compute_seconds = compute_seconds;
    timeline
}

struct Simulator<'a> {
    plan: &'a Plan,
    pass: Pass,
    cluster: &'a Cluster,
    scale: Scale,
    overlap: bool,
}

impl Simulator<'_> {
    fn share(&self, rank: Rank) -> &HeadShare {
        &self.plan.shares()[rank % self.plan.head_ranks()]
    }

    /// As [`Schedule::label`], with rows of the sequence that the plan stands for.
    fn label(&self, pair: &Pair) -> String {
        let name = |prefix: &str, chunk: &Chunk| {
            let Chunk { owner, rows } = chunk;
            if *rows == (0..self.plan.sharded_mask().layout().shard_len(*owner)) {
                return format!("{prefix}{owner}");
            }
            let [start, end] = [rows.start, rows.end].map(|row| (row as f64 * self.scale.factor).round());
            format!("{prefix}{owner}[{start}..{end}]")
        };
        format!("{}·{}", name("q", &pair.query), name("kv", &pair.key_value))
    }

    /// Seconds of one block's kernels, one call for each of the share's blocks of heads.
    fn pair_seconds(&self, rank: Rank, pair: &Pair) -> f64 {
        let share = self.share(rank);
        let device = &self.cluster.device;
        let (rate, cost) = match self.pass {
            Pass::Forward => (&device.attention_forward, 4.),
            Pass::Backward => (&device.attention_backward, 10.),
        };
        let factor = self.scale.factor;
        let shape = self.plan.shape();
        let area = self.plan.sharded_mask().pair_area(pair) as f64 * factor * factor;
        let [rows, keys] = [&pair.query, &pair.key_value].map(|chunk| chunk.rows.len() as f64 * factor);
        // Kernels compute whole tiles: beside the unmasked pairs, about one tile's width more for every row.
        let visited = (area + TILE * rows).min(rows * keys);
        let operations = cost * visited * (shape.batch * share.heads().len() * shape.head_dim) as f64;
        // As a square block with as many pairs: short rows of a long block run at the rate of a short one.
        let len = visited.sqrt();
        share.blocks().len() as f64 * device.call_us * 1e-6 + operations / (rate.at(len) * 1e12)
    }

    fn bytes(&self, rank: Rank, transfer: &Transfer) -> f64 {
        let share = self.share(rank);
        let shape = burn_distflash::schedule::AttentionShape {
            heads: share.heads().len(),
            kv_heads: share.kv_heads().len(),
            ..*self.plan.shape()
        };
        shape.bytes(transfer, self.pass) as f64 * self.scale.factor
    }

    /// Merging a partial, or adding a gradient, reads two and writes one.
    fn merge_seconds(&self, bytes: f64) -> f64 {
        3. * bytes / (self.cluster.device.memory_gb_s * 1e9)
    }

    /// When all ranks have exchanged heads that they were ready to at `ready`; `operands` or results.
    fn head_exchange(&self, links: &Links, ready: &[f64], is_entry: bool, transfers: &mut Vec<Sent>) -> Vec<f64> {
        let (plan, shape) = (self.plan, self.plan.shape());
        let width = (shape.batch * shape.head_dim * shape.element_bytes) as f64;
        let lse = (shape.batch * shape.element_bytes.max(4)) as f64;
        let vectors = |share: &HeadShare, is_wide: bool| {
            (share.heads().len() + if is_wide { 2 * share.kv_heads().len() } else { 0 }) as f64
        };
        // Forward query, key and value come, `out` and `lse` go; backward `d_out` comes and three gradients go.
        let is_wide = is_entry == (self.pass == Pass::Forward);
        let has_lse = !is_entry && self.pass == Pass::Forward;
        let bytes = |from: Rank, to: Rank| {
            let (rows, share) = if is_entry {
                (plan.layout().shard_len(from), self.share(to))
            } else {
                (plan.layout().shard_len(to), self.share(from))
            };
            let per_row = vectors(share, is_wide) * width + if has_lse { lse * share.heads().len() as f64 } else { 0. };
            rows as f64 * self.scale.factor * per_row
        };
        let of = |rank: Rank| {
            let first = rank / plan.head_ranks() * plan.head_ranks();
            let group = first..first + plan.head_ranks();
            let start = ready[group.clone()].iter().copied().fold(0., f64::max);
            let end = links.all_to_all(group.clone(), bytes, start);
            let to_others = group.filter(|&to| to != rank);
            transfers.extend(to_others.map(|to| Sent { start, end, from: rank, to, bytes: bytes(rank, to) }));
            end
        };
        (0..ready.len()).map(of).collect()
    }

    fn run(&self, is_free: bool) -> Timeline {
        let schedule: &Schedule = self.plan.schedule(self.pass);
        let world = self.plan.layout().world_size();
        let head_ranks = self.plan.head_ranks();
        let mut links = Links::new(self.cluster, is_free);
        let mut ranks = vec![Vec::new(); world];
        let mut transfers = Vec::new();
        let entered = self.head_exchange(&links, &vec![0.; world], true, &mut transfers);
        if head_ranks > 1 && !is_free {
            for (rank, &end) in entered.iter().enumerate() {
                ranks[rank].push(Span { start: 0., end, activity: Activity::HeadExchange });
            }
        }
        // When what was posted for the coming step has arrived, and when the kernels of the last two have ended.
        let mut arrived = entered.clone();
        let mut ended = [entered.clone(), entered];
        let mut merging = vec![0.; world];
        for exchange in 0..schedule.num_steps() + 2 {
            let posted: Vec<f64> =
                (0..world)
                    .map(|rank| {
                        if self.overlap { arrived[rank].max(ended[0][rank]) } else { arrived[rank].max(ended[1][rank]) }
                    })
                    .collect();
            let inputs = schedule.inputs(exchange);
            let results = exchange.checked_sub(2).map_or_else(Vec::new, |step| schedule.results(step, self.pass));
            for (i, transfer) in inputs.iter().chain(&results).enumerate() {
                for place in 0..head_ranks {
                    let [from, to] = [transfer.from, transfer.to].map(|group| group * head_ranks + place);
                    let bytes = self.bytes(from, transfer);
                    // Two buffers: what arrives must not overwrite what the step before last still reads.
                    let ready = posted[from].max(posted[to]).max(if i < inputs.len() { 0. } else { ended[0][from] });
                    let (start, end) = links.send(from, to, bytes, ready);
                    arrived[to] = arrived[to].max(end);
                    if i >= inputs.len() {
                        merging[to] += self.merge_seconds(bytes);
                    }
                    transfers.push(Sent { start, end, from, to, bytes });
                }
            }
            let mut now_ended = ended[1].clone();
            for rank in 0..world {
                let group = rank / head_ranks;
                let pairs = schedule.pairs(exchange, group);
                let mut at = ended[1][rank].max(arrived[rank]) + std::mem::take(&mut merging[rank]);
                for pair in pairs {
                    let end = at + self.pair_seconds(rank, pair);
                    let label = self.label(pair);
                    let activity = if pair.query.owner == group { Activity::Own(label) } else { Activity::Help(label) };
                    ranks[rank].push(Span { start: at, end, activity });
                    at = end;
                }
                now_ended[rank] = at;
            }
            ended = [std::mem::take(&mut ended[1]), now_ended];
        }
        let left = self.head_exchange(&links, &ended[1], false, &mut transfers);
        if head_ranks > 1 && !is_free {
            for (rank, &end) in left.iter().enumerate() {
                ranks[rank].push(Span { start: ended[1][rank], end, activity: Activity::HeadExchange });
            }
        }
        let seconds = left.into_iter().fold(0., f64::max);
        Timeline { ranks, transfers, seconds, compute_seconds: seconds }
    }
}
