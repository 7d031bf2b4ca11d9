//! What a schedule costs, without a device.

use super::{Pass, Precision, Schedule, ShardedMask, Transfer};
use crate::layout::Rank;

/// The sizes that turn a schedule into bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head's vector.
    pub head_dim: usize,
    /// Bytes of one element of query, key and value: 2 for bf16, 4 for f32.
    pub element_bytes: usize,
}

impl AttentionShape {
    /// Bytes that `transfer` carries. Accumulators are f32, or f64 where the operands are.
    #[must_use]
    pub fn bytes(&self, transfer: &Transfer, pass: Pass) -> u64 {
        let part_bytes = |part: &super::Part| {
            let heads = if part.kv_heads { self.kv_heads } else { self.heads };
            let width = if part.per_row { 1 } else { self.head_dim };
            let element = match part.precision {
                Precision::Operand => self.element_bytes,
                Precision::Accumulator => self.element_bytes.max(4),
            };
            (self.batch * heads * transfer.chunk.rows.len() * width * element) as u64
        };
        transfer.payload.parts(pass).iter().map(part_bytes).sum()
    }
}

/// What each rank does in one pass: work as unmasked (query, key) pairs, traffic as bytes sent. Backward a
/// pair is about 2.5 times as costly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Simulation {
    work: Vec<Vec<u64>>,
    bytes: Vec<u64>,
}

impl Schedule {
    /// Counts work, in pairs of tokens, and traffic.
    #[must_use]
    pub fn simulate(&self, mask: &ShardedMask, shape: &AttentionShape, pass: Pass) -> Simulation {
        let mut work = vec![vec![0; self.world_size()]; self.num_steps()];
        for (step, rank, pair) in self.iter() {
            work[step][rank] += mask.pair_area(pair);
        }
        Simulation { work, bytes: self.bytes_sent(shape, pass) }
    }

    /// Bytes each rank sends in one pass.
    #[must_use]
    pub fn bytes_sent(&self, shape: &AttentionShape, pass: Pass) -> Vec<u64> {
        let mut bytes = vec![0; self.world_size()];
        for step in 0..self.num_steps() {
            for transfer in self.inputs(step).iter().chain(&self.results(step, pass)) {
                bytes[transfer.from] += shape.bytes(transfer, pass);
            }
        }
        bytes
    }
}

impl Simulation {
    pub(crate) fn new(work: Vec<Vec<u64>>, bytes: Vec<u64>) -> Self {
        Self { work, bytes }
    }

    /// `work()[step][rank]`: unmasked (query, key) pairs computed.
    #[must_use]
    pub fn work(&self) -> &[Vec<u64>] {
        &self.work
    }

    /// Unmasked (query, key) pairs `rank` computes in all.
    #[must_use]
    pub fn rank_work(&self, rank: Rank) -> u64 {
        self.work.iter().map(|step| step[rank]).sum()
    }

    /// Share of all compute slots spent waiting for the slowest rank of each step:
    /// `1 − Σ work / (world_size · Σ_steps max_ranks work)`. 0 if nothing is computed.
    #[must_use]
    pub fn idle_share(&self) -> f64 {
        let done: u64 = self.work.iter().flatten().sum();
        let slots: u64 = self.work.iter().map(|step| step.iter().max().copied().unwrap_or(0) * step.len() as u64).sum();
        if slots == 0 { 0. } else { (slots - done) as f64 / slots as f64 }
    }

    /// How much more than the mean the rank with most work has: `max / mean − 1` over whole passes. 0 if nothing
    /// is computed.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        let ranks = 0..self.bytes.len();
        let most = ranks.clone().map(|rank| self.rank_work(rank)).max().unwrap_or(0) as f64;
        let all: u64 = ranks.map(|rank| self.rank_work(rank)).sum();
        if all == 0 { 0. } else { most * self.bytes.len() as f64 / all as f64 - 1. }
    }

    /// Bytes `rank` sends.
    #[must_use]
    pub fn bytes_sent(&self, rank: Rank) -> u64 {
        self.bytes[rank]
    }
}
