//! What moves between ranks, derived from the pairs they compute.

use super::{Chunk, Pair, Schedule};
use crate::layout::Rank;

/// Which half of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Computes `out` and `lse`.
    Forward,
    /// Computes the gradients of query, key and value.
    Backward,
}

/// What crosses the wire, each named for what the receiver does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// Keys and values, to attend to.
    KeyValue,
    /// Queries, for a helper to attend from; backward also what their gradients need.
    Query,
    /// A helper's `(out, lse)`, to merge.
    Partial,
    /// A helper's gradient of the queries, to add.
    QueryGradient,
    /// Gradients of keys and values, to add.
    KeyValueGradient,
}

/// In which precision a part travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// That of query, key and value.
    Operand,
    /// f32, or f64 where the operands are: partials and gradients are never rounded in between.
    Accumulator,
}

/// One tensor of a payload, `[batch, heads or kv_heads, rows, head_dim or 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Whether it has one head per key/value head rather than per query head.
    pub kv_heads: bool,
    /// Whether it has one number per row (`lse`, `delta`) rather than `head_dim`.
    pub per_row: bool,
    /// In which precision it travels.
    pub precision: Precision,
}

impl Payload {
    /// The tensors it consists of, in order.
    #[must_use]
    pub fn parts(self, pass: Pass) -> &'static [Part] {
        const fn part(kv_heads: bool, per_row: bool, precision: Precision) -> Part {
            Part { kv_heads, per_row, precision }
        }
        const KEY: Part = part(true, false, Precision::Operand);
        const QUERY: Part = part(false, false, Precision::Operand);
        const OUT: Part = part(false, false, Precision::Accumulator);
        const LSE: Part = part(false, true, Precision::Accumulator);
        const D_KEY: Part = part(true, false, Precision::Accumulator);
        match (self, pass) {
            (Payload::KeyValue, _) => &[KEY, KEY],
            (Payload::Query, Pass::Forward) => &[QUERY],
            // query, d_out, lse, delta
            (Payload::Query, Pass::Backward) => &[QUERY, QUERY, LSE, LSE],
            (Payload::Partial, _) => &[OUT, LSE],
            (Payload::QueryGradient, _) => &[OUT],
            (Payload::KeyValueGradient, _) => &[D_KEY, D_KEY],
        }
    }
}

/// One payload from one rank to another. A send and its receive are this one value seen from two
/// ranks, so they cannot disagree.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// Who sends.
    pub from: Rank,
    /// Who receives.
    pub to: Rank,
    /// What.
    pub payload: Payload,
    /// Of which rows.
    pub chunk: Chunk,
}

impl Schedule {
    /// What has to have arrived before `step` is computed, each once; nothing beyond the last step.
    #[must_use]
    pub fn inputs(&self, step: usize) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for (rank, pair) in self.slots(step) {
            for (chunk, payload) in [(&pair.key_value, Payload::KeyValue), (&pair.query, Payload::Query)] {
                let transfer = Transfer { from: chunk.owner, to: rank, payload, chunk: chunk.clone() };
                if chunk.owner != rank && !transfers.contains(&transfer) {
                    transfers.push(transfer);
                }
            }
        }
        transfers
    }

    /// What `step` computed for other ranks and returns to them, in the order of its pairs.
    #[must_use]
    pub fn results(&self, step: usize, pass: Pass) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for (rank, pair) in self.slots(step) {
            let mut give = |chunk: &Chunk, payload| {
                if chunk.owner != rank {
                    transfers.push(Transfer { from: rank, to: chunk.owner, payload, chunk: chunk.clone() });
                }
            };
            match pass {
                Pass::Forward => give(&pair.query, Payload::Partial),
                Pass::Backward => {
                    give(&pair.query, Payload::QueryGradient);
                    give(&pair.key_value, Payload::KeyValueGradient);
                }
            }
        }
        transfers
    }

    fn slots(&self, step: usize) -> impl Iterator<Item = (Rank, &Pair)> {
        (0..self.world_size()).flat_map(move |rank| self.pairs(step, rank).iter().map(move |pair| (rank, pair)))
    }
}
