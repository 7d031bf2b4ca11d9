//! What moves between ranks, derived from the pairs they compute.

use super::{Chunk, Pair, Schedule};
use crate::layout::Rank;
use std::collections::HashSet;

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
    /// Of which rows. Neither side need own them: ranks of a node hand on what came from afar.
    pub chunk: Chunk,
}

impl Pair {
    /// Both sides, with what the queries of one and the keys of the other travel as.
    fn sides(&self) -> [(&Chunk, Payload); 2] {
        [(&self.key_value, Payload::KeyValue), (&self.query, Payload::Query)]
    }

    fn uses(&self, payload: Payload, chunk: &Chunk) -> bool {
        self.sides().contains(&(chunk, payload))
    }
}

impl Schedule {
    /// What has to have arrived before `step` is computed, each once; nothing beyond the last step.
    #[must_use]
    pub fn inputs(&self, step: usize) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        let mut known = HashSet::new();
        for (rank, pair) in self.slots(step) {
            for (chunk, payload) in pair.sides().into_iter().filter(|side| side.0.owner != rank) {
                let holder = step.checked_sub(1).and_then(|before| self.holder(before, rank, payload, chunk));
                let from = holder.unwrap_or(chunk.owner);
                let transfer = Transfer { from, to: rank, payload, chunk: chunk.clone() };
                if known.insert(transfer.clone()) {
                    transfers.push(transfer);
                }
            }
        }
        transfers
    }

    /// What `step` computed for other ranks and returns to them, in the order of its pairs. Gradients go
    /// through the next rank of the node that computes some of the same, which adds its own.
    #[must_use]
    pub fn results(&self, step: usize, pass: Pass) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        for (rank, pair) in self.slots(step) {
            let mut give = |chunk: &Chunk, input, payload| {
                if chunk.owner != rank {
                    let next = if pass == Pass::Backward { self.holder(step + 1, rank, input, chunk) } else { None };
                    let to = next.unwrap_or(chunk.owner);
                    transfers.push(Transfer { from: rank, to, payload, chunk: chunk.clone() });
                }
            };
            match pass {
                Pass::Forward => give(&pair.query, Payload::Query, Payload::Partial),
                Pass::Backward => {
                    give(&pair.query, Payload::Query, Payload::QueryGradient);
                    give(&pair.key_value, Payload::KeyValue, Payload::KeyValueGradient);
                }
            }
        }
        transfers
    }

    /// Who on the node of `rank` uses `chunk` at `step`, where its owner is on another node.
    fn holder(&self, step: usize, rank: Rank, payload: Payload, chunk: &Chunk) -> Option<Rank> {
        if self.are_close(rank, chunk.owner) {
            return None;
        }
        let start = rank / self.ranks_per_node * self.ranks_per_node;
        let node = (start..self.world_size().min(start + self.ranks_per_node)).filter(|&close| close != rank);
        let uses = |close: Rank| self.pairs(step, close).iter().any(|pair| pair.uses(payload, chunk));
        node.into_iter().find(|&close| uses(close))
    }

    fn slots(&self, step: usize) -> impl Iterator<Item = (Rank, &Pair)> {
        let ranks = 0..if step < self.num_steps() { self.world_size() } else { 0 };
        ranks.flat_map(move |rank| self.pairs(step, rank).iter().map(move |pair| (rank, pair)))
    }
}
