//! Who computes which block of the score matrix, and when: a table, built and checked without a device.
//!
//! `README.md` beside this file derives the schedules.

mod build;
mod check;
mod sharded_mask;
mod simulate;
mod transfer;

pub use check::ScheduleError;
pub use sharded_mask::ShardedMask;
pub use simulate::{AttentionShape, Simulation};
pub use transfer::{Part, Pass, Payload, Precision, Transfer};

use crate::layout::Rank;
use std::fmt;
use std::ops::Range;

/// Consecutive rows of one rank's shard, counted from the shard's own start.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// The rank that owns them.
    pub owner: Rank,
    /// Which of its rows.
    pub rows: Range<usize>,
}

/// One block of the score matrix: the queries of one chunk over the keys and values of another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    /// Whose queries.
    pub query: Chunk,
    /// Whose keys and values.
    pub key_value: Chunk,
}

/// Which pairs each rank computes at each step. What has to move follows from it
/// ([`inputs`](Self::inputs), [`results`](Self::results)).
///
/// ```
/// use burn_distflash::{Mask, Sequence, schedule::Schedule};
///
/// let sharded = Sequence::Balanced.shard(&Mask::causal(), 20, 5)?;
/// let schedule = Schedule::balanced(&sharded);
/// schedule.check(&sharded).unwrap();
/// assert_eq!(schedule.to_string(), "\
/// step 0:  q0·kv0  q1·kv1  q2·kv2  q3·kv3  q4·kv4
/// step 1:  q4·kv0  q1·kv0  q2·kv1  q3·kv2  q4·kv3
/// step 2:  q3·kv0  q4·kv1  q2·kv0  q3·kv1  q4·kv2
/// ");
/// # Ok::<(), burn_distflash::MaskError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// `steps[t][rank]`, empty where the rank is idle.
    steps: Vec<Vec<Vec<Pair>>>,
    shard_lens: Vec<usize>,
    /// Ranks `0..n`, `n..2n`, … sit close together, and hand on to each other what came from afar.
    ranks_per_node: usize,
}

impl Schedule {
    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.shard_lens.len()
    }

    /// Number of steps.
    #[must_use]
    pub fn num_steps(&self) -> usize {
        self.steps.len()
    }

    /// Whether two ranks sit on one node.
    fn are_close(&self, a: Rank, b: Rank) -> bool {
        a / self.ranks_per_node == b / self.ranks_per_node
    }

    /// What `rank` computes at `step`; nothing beyond the last step.
    #[must_use]
    pub fn pairs(&self, step: usize, rank: Rank) -> &[Pair] {
        self.steps.get(step).map_or(&[], |step| &step[rank])
    }

    /// Every pair with the step and rank that computes it.
    pub fn iter(&self) -> impl Iterator<Item = (usize, Rank, &Pair)> {
        self.steps.iter().enumerate().flat_map(|(t, step)| {
            step.iter().enumerate().flat_map(move |(rank, pairs)| pairs.iter().map(move |pair| (t, rank, pair)))
        })
    }

    /// The same pairs at the same steps, each computed by the rank that owns its other side: what rotated
    /// keys and values rotates queries, and the reverse.
    ///
    /// Backward, queries with `d_out` go out and an f32 `d_query` comes back, where keys and values cost an
    /// f32 `d_key` and `d_value`: 8 bytes a token and head in bf16, against 12 for each key/value head
    /// (BurstAttention, arXiv 2403.09347).
    #[must_use]
    pub fn transposed(&self) -> Self {
        let mut steps = vec![vec![Vec::new(); self.world_size()]; self.num_steps()];
        for (step, rank, pair) in self.iter() {
            steps[step][build::other_owner(pair, rank)].push(pair.clone());
        }
        Self { steps, shard_lens: self.shard_lens.clone(), ranks_per_node: self.ranks_per_node }
    }

    fn name(&self, prefix: &str, chunk: &Chunk) -> String {
        let whole = 0..self.shard_lens[chunk.owner];
        let Chunk { owner, rows } = chunk;
        if *rows == whole {
            format!("{prefix}{owner}")
        } else {
            format!("{prefix}{owner}[{}..{}]", rows.start, rows.end)
        }
    }

    /// `q3·kv1`, with the rows of a chunk that is not its whole shard: `q3[0..8]·kv1`.
    #[must_use]
    pub fn label(&self, pair: &Pair) -> String {
        format!("{}·{}", self.name("q", &pair.query), self.name("kv", &pair.key_value))
    }
}

impl fmt::Display for Schedule {
    /// One line a step, one column a rank.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cell = |pairs: &Vec<Pair>| match pairs.as_slice() {
            [] => "idle".to_string(),
            pairs => pairs.iter().map(|pair| self.label(pair)).collect::<Vec<_>>().join(" + "),
        };
        let table: Vec<Vec<String>> = self.steps.iter().map(|step| step.iter().map(cell).collect()).collect();
        let widths: Vec<usize> = (0..self.world_size())
            .map(|rank| table.iter().map(|row| row[rank].chars().count()).max().unwrap_or(0))
            .collect();
        for (t, row) in table.iter().enumerate() {
            let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            writeln!(f, "step {t}:  {}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}
