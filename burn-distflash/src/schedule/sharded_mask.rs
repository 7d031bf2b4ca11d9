//! A mask seen through a layout.

use super::{Chunk, Pair};
use crate::layout::{Layout, Rank};
use distflash_kernels::RowIntervals;

/// A mask over the whole sequence together with who owns which tokens: enough to tell what any rank's
/// queries see of any rank's keys, in the rows and keys of the two shards.
///
/// A shard holds its tokens in order of position, so the keys a row sees stay one interval whatever
/// the layout: the global bound `x` becomes the number of the shard's keys before `x`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardedMask {
    layout: Layout,
    /// Each rank's rows, over global keys.
    rows: Vec<RowIntervals>,
}

impl ShardedMask {
    /// # Panics
    /// If `mask` does not have one row and one key per token of `layout`.
    #[must_use]
    pub fn new(layout: Layout, mask: &RowIntervals) -> Self {
        assert_eq!((mask.num_rows(), mask.num_keys()), (layout.seq_len(), layout.seq_len()));
        let rows = (0..layout.world_size()).map(|rank| layout.shard_mask(mask, rank)).collect();
        Self { layout, rows }
    }

    /// Who owns which tokens.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of unmasked (query, key) pairs of the whole sequence.
    #[must_use]
    pub fn area(&self) -> u64 {
        self.rows.iter().map(RowIntervals::area).sum()
    }

    /// What the queries of `pair` see of its keys, counted from each chunk's first row.
    ///
    /// # Panics
    /// If a chunk reaches outside its shard.
    #[must_use]
    pub fn intervals(&self, pair: &Pair) -> RowIntervals {
        let (query, keys) = (&pair.query, &pair.key_value);
        let rows = &self.rows[query.owner];
        let bound = |of: &[u32]| -> Vec<u32> {
            let local = |&x: &u32| {
                let before = self.layout.count_before(keys.owner, x as usize);
                (before.clamp(keys.rows.start, keys.rows.end) - keys.rows.start) as u32
            };
            of[query.rows.clone()].iter().map(local).collect()
        };
        RowIntervals::new(bound(rows.lo()), bound(rows.hi()), keys.rows.len())
            .expect("counting keys before a monotone bound is monotone")
    }

    /// Number of unmasked (query, key) pairs in `pair`.
    #[must_use]
    pub fn pair_area(&self, pair: &Pair) -> u64 {
        self.intervals(pair).area()
    }

    /// The queries of rank `query` over the keys of rank `key_value`, trimmed to the rows that see a
    /// key and the keys that are seen, so that nothing else travels; `None` if the mask leaves nothing.
    #[must_use]
    pub fn pair(&self, query: Rank, key_value: Rank) -> Option<Pair> {
        let whole = |owner| Chunk { owner, rows: 0..self.layout.shard_len(owner) };
        let pair = Pair { query: whole(query), key_value: whole(key_value) };
        let seen = self.intervals(&pair);
        let first = (0..seen.num_rows()).find(|&row| !seen.row(row).is_empty())?;
        let last = (0..seen.num_rows()).rfind(|&row| !seen.row(row).is_empty())?;
        let rows = first..last + 1;
        Some(Pair {
            query: Chunk { owner: query, rows: rows.clone() },
            key_value: Chunk { owner: key_value, rows: seen.key_range(rows) },
        })
    }

    /// Cuts `pair` into two by query rows, as close to equal area as rows allow; `None` if one half
    /// would be empty.
    pub(super) fn halve(&self, pair: &Pair) -> Option<(Pair, Pair)> {
        let seen = self.intervals(pair);
        let half = seen.area() / 2;
        let mut above = 0;
        let cut = (0..seen.num_rows()).find(|&row| {
            let len = seen.row(row).len() as u64;
            // Stop where taking this row too would overshoot by more than leaving it falls short.
            let stop = above + len > half && above + len - half > half.saturating_sub(above);
            above += len;
            stop
        })?;
        let at = pair.query.rows.start + cut;
        let part = |rows| Pair { query: Chunk { owner: pair.query.owner, rows }, ..pair.clone() };
        let (first, second) = (part(pair.query.rows.start..at), part(at..pair.query.rows.end));
        (self.pair_area(&first) > 0 && self.pair_area(&second) > 0).then_some((first, second))
    }
}
