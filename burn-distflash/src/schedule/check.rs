//! The proof that a schedule computes attention: every unmasked pair of tokens exactly once.

use super::{Chunk, Pair, Schedule, ShardedMask};
use crate::layout::Rank;
use std::collections::HashMap;

/// Why a schedule does not compute attention under a mask.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A chunk reaches outside its owner's shard.
    #[error("step {step}, rank {rank}: {pair} reaches outside a shard")]
    OutOfShard {
        /// When.
        step: usize,
        /// Who.
        rank: Rank,
        /// What, as `q3·kv1`.
        pair: String,
    },
    /// A rank computes a block of which it owns neither side.
    #[error("step {step}, rank {rank}: {pair} is owned by neither side; expected the rank's own queries or keys")]
    Foreign {
        /// When.
        step: usize,
        /// Who.
        rank: Rank,
        /// What.
        pair: String,
    },
    /// Two pairs share a block.
    #[error("{first} and {second} overlap: some scores are computed twice")]
    Twice {
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// Unmasked pairs of tokens that no rank computes.
    #[error("{computed} of {expected} unmasked (query, key) pairs are computed")]
    Missing {
        /// Area the schedule covers.
        computed: u64,
        /// Area of the mask.
        expected: u64,
    },
}

fn overlap(a: &Chunk, b: &Chunk) -> bool {
    a.rows.start.max(b.rows.start) < a.rows.end.min(b.rows.end)
}

impl Schedule {
    /// Proves that every unmasked (query, key) pair of tokens is computed exactly once, by a rank that
    /// owns its query or its key.
    ///
    /// Blocks of the same two shards must not overlap, and the areas of all blocks must add up to the
    /// area of the mask; together these say "exactly once" without visiting single scores.
    ///
    /// # Errors
    /// The first violation found.
    pub fn check(&self, mask: &ShardedMask) -> Result<(), ScheduleError> {
        let mut by_shards: HashMap<(Rank, Rank), Vec<&Pair>> = HashMap::new();
        let mut computed = 0;
        for (step, rank, pair) in self.iter() {
            let label = || self.label(pair);
            let inside = |chunk: &Chunk| chunk.rows.end <= mask.layout().shard_len(chunk.owner);
            if !inside(&pair.query) || !inside(&pair.key_value) {
                return Err(ScheduleError::OutOfShard { step, rank, pair: label() });
            }
            if pair.query.owner != rank && pair.key_value.owner != rank {
                return Err(ScheduleError::Foreign { step, rank, pair: label() });
            }
            let same = by_shards.entry((pair.query.owner, pair.key_value.owner)).or_default();
            let twice =
                |other: &&&Pair| overlap(&other.query, &pair.query) && overlap(&other.key_value, &pair.key_value);
            if let Some(other) = same.iter().find(twice) {
                return Err(ScheduleError::Twice { first: self.label(other), second: label() });
            }
            same.push(pair);
            computed += mask.pair_area(pair);
        }
        let expected = mask.area();
        if computed == expected { Ok(()) } else { Err(ScheduleError::Missing { computed, expected }) }
    }
}
