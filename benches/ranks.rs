//! What each rank of a group would compute, one rank after the other on the device under test: how much faster the
//! slowest rank of each strategy is than that of the unbalanced ring, beside what the planner says of a cluster of such
//! devices.
//!
//! Kernels only; nothing travels.
//!
//! `cargo bench -p distflash-benches --features cuda --bench ranks -- --len 65536 --worlds 2,4,8 --cluster 8xh200`
#![allow(clippy::print_stdout, reason = "a table is what it is for")]

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};
use burn_distflash::schedule::{AttentionShape, Chunk, Pair, Pass};
use burn_distflash::{
    ChunkAttention, ChunkGradient, ChunkOptions, Mask, Plan, Previous, Rank, RowIntervals, Sequence, Strategy,
};
use distflash_benches::{drawn, median};
use distflash_models::planner::{Cluster, Scale, simulate};
use distflash_tests::{device, kernel, takes};
use std::time::Duration;

const HEAD_DIM: usize = 128;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |flag: &str| arguments.iter().position(|a| a == flag).map(|at| arguments[at + 1].as_str());
    let number = |flag: &str, default: usize| after(flag).map_or(default, |n| n.parse().expect("a number"));
    let is_test = arguments.iter().any(|a| a == "--test");
    let len = if is_test { 96 } else { number("--len", 2048) };
    let heads = number("--heads", 4);
    let worlds = if is_test { "2" } else { after("--worlds").unwrap_or("2,4,8") };
    let cluster = Cluster::load(after("--cluster").unwrap_or("cpu")).expect("a cluster");

    let device = device();
    let dtype = if takes(DType::BF16) { DType::BF16 } else { DType::F32 };
    println!("{device:?}, kernels {}, {dtype:?}, {heads} heads of {HEAD_DIM}, {len} tokens, batch 1", kernel());
    println!("planned for devices of: {}", cluster.name);
    // Query, key, value and the gradient of the output: ranks take what they own of it.
    let operands: [Tensor<4>; 4] = std::array::from_fn(|i| drawn([1, heads, len, HEAD_DIM], dtype, i as u64, &device));
    // Four in seven are one document; the rest are short.
    let cuts: Vec<usize> = [0, 1, 2, 3, 7, 8, 10, 14].iter().map(|share| share * len / 14).collect();
    let documents = Mask::causal().with_documents(&cuts).expect("cuts in order");
    for (name, mask) in [("causal", Mask::causal()), ("documents", documents)] {
        println!(
            "\n{name:>10} {:>6} {:>16} | {:>10} {:>10} {:>10} | {:>6} {:>8}",
            "ranks", "strategy", "slowest ms", "mean ms", "planned ms", "gain", "planned"
        );
        for world_size in worlds.split(',').map(|n| n.parse::<usize>().expect("a number")) {
            let cluster = cluster.clone().with_devices(world_size);
            let mut ring = None;
            for strategy in strategies(world_size) {
                let shape = AttentionShape {
                    batch: 1,
                    heads,
                    kv_heads: heads,
                    head_dim: HEAD_DIM,
                    element_bytes: dtype.size(),
                };
                let plan = Plan::new(strategy, &mask, len, world_size, shape).expect("a strategy that fits");
                let times: Vec<Duration> =
                    (0..world_size).map(|rank| Runner::new(&plan, rank, &operands, &device).time()).collect();
                let slowest = times.iter().max().expect("a rank").as_secs_f64();
                let mean = times.iter().sum::<Duration>().as_secs_f64() / world_size as f64;
                let planned = planned_seconds(&plan, &cluster);
                let (ring_time, ring_planned) = *ring.get_or_insert((slowest, planned));
                println!(
                    "{:>10} {world_size:>6} {:>16} | {:>10.3} {:>10.3} {:>10.3} | {:>6.2} {:>8.2}",
                    "",
                    strategy.to_string(),
                    1e3 * slowest,
                    1e3 * mean,
                    1e3 * planned,
                    ring_time / slowest,
                    ring_planned / planned
                );
            }
        }
    }
}

fn strategies(world_size: usize) -> Vec<Strategy> {
    let mut strategies: Vec<Strategy> =
        [Sequence::Ring, Sequence::Balanced, Sequence::Zigzag, Sequence::Striped, Sequence::Adaptive]
            .map(Strategy::from)
            .into();
    strategies.push(Strategy::Ulysses);
    if world_size > 2 && world_size.is_multiple_of(2) {
        strategies.push(Strategy::Hybrid { head_ranks: 2, sequence: Sequence::Zigzag });
    }
    strategies
}

/// Of the slowest rank's kernels, forward and backward.
fn planned_seconds(plan: &Plan, cluster: &Cluster) -> f64 {
    let timelines =
        [Pass::Forward, Pass::Backward].map(|pass| simulate(plan, pass, cluster, Scale { factor: 1. }, true));
    let computes = |rank: Rank| timelines.iter().map(|timeline| timeline.compute_seconds_of(rank)).sum();
    (0..plan.layout().world_size()).map(computes).fold(0., f64::max)
}

/// One rank's work, over operands drawn for it.
struct Runner<'a> {
    plan: &'a Plan,
    rank: Rank,
    device: &'a Device,
    /// Query, key, value and the gradient of the output: all of the longest shard, of the rank's own heads.
    operands: [Tensor<4>; 4],
    options: ChunkOptions,
}

impl<'a> Runner<'a> {
    fn new(plan: &'a Plan, rank: Rank, drawn: &[Tensor<4>; 4], device: &'a Device) -> Self {
        let groups = plan.sharded_mask().layout();
        let longest = (0..groups.world_size()).map(|group| groups.shard_len(group)).max().expect("a group");
        let share = &plan.shares()[rank % plan.head_ranks()];
        let heads = |i: usize| if i == 0 || i == 3 { share.heads().len() } else { share.kv_heads().len() };
        let operands = std::array::from_fn(|i| drawn[i].clone().slice([0..1, 0..heads(i).max(1), 0..longest]));
        let options = ChunkOptions { scale: 1. / (HEAD_DIM as f64).sqrt(), kernel: kernel() };
        Self { plan, rank, device, operands, options }
    }

    fn pairs(&self, pass: Pass) -> Vec<(Pair, RowIntervals)> {
        let group = self.rank / self.plan.head_ranks();
        let schedule = self.plan.schedule(pass);
        let pairs = (0..schedule.num_steps()).flat_map(|step| schedule.pairs(step, group));
        pairs.map(|pair| (pair.clone(), self.plan.sharded_mask().intervals(pair))).collect()
    }

    fn rows(&self, operand: usize, chunk: &Chunk) -> Tensor<4> {
        self.operands[operand].clone().slice_dim(2, chunk.rows.clone())
    }

    /// Forward and backward, in a row.
    fn time(&self) -> Duration {
        if self.plan.shares()[self.rank % self.plan.head_ranks()].heads().is_empty() {
            return Duration::ZERO;
        }
        let (forward, backward) = (self.pairs(Pass::Forward), self.pairs(Pass::Backward));
        median(self.device, || {
            forward.iter().for_each(|(pair, seen)| self.attend(pair, seen));
            backward.iter().for_each(|(pair, seen)| self.differentiate(pair, seen));
        })
    }

    fn attend(&self, pair: &Pair, seen: &RowIntervals) {
        let [query, key, value] = [(0, &pair.query), (1, &pair.key_value), (2, &pair.key_value)]
            .map(|(operand, chunk)| self.rows(operand, chunk).into_dispatch());
        let (out, lse) = Dispatch::chunk_forward(query, key, value, Previous::Nothing, seen.clone(), self.options);
        drop((Tensor::<4>::from_dispatch(out), Tensor::<4>::from_dispatch(lse)));
    }

    fn differentiate(&self, pair: &Pair, seen: &RowIntervals) {
        let rows = |operand, chunk| self.rows(operand, chunk).into_dispatch();
        let [_, heads, ..] = self.operands[0].dims();
        // As large as the weights they normalise.
        let lse = Tensor::<4>::full([1, heads, pair.query.rows.len(), 1], 9., (self.device, DType::F32));
        let delta = Tensor::<4>::full([1, heads, pair.query.rows.len(), 1], 0.1, (self.device, DType::F32));
        let inputs = ChunkGradient {
            query: rows(0, &pair.query),
            key: rows(1, &pair.key_value),
            value: rows(2, &pair.key_value),
            lse: lse.into_dispatch(),
            delta: delta.into_dispatch(),
            d_out: rows(3, &pair.query),
        };
        let (d_query, d_key, d_value) = Dispatch::chunk_backward(inputs, seen.clone(), self.options);
        for gradient in [d_query, d_key, d_value] {
            drop(Tensor::<4>::from_dispatch(gradient));
        }
    }
}
