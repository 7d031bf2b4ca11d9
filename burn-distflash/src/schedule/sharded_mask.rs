//! A mask seen through a layout.

use super::{Chunk, Pair};
use crate::layout::{Layout, Rank};
use distflash_kernels::RowIntervals;
use std::ops::Range;

/// Keys that nobody needs are sent all the same where there are fewer than these: a call of a kernel and a
/// message each cost more.
pub(crate) const MIN_GAP: usize = 256;

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
            let before = self.layout.counts_before(keys.owner, &of[query.rows.clone()]);
            before.map(|count| (count.clamp(keys.rows.start, keys.rows.end) - keys.rows.start) as u32).collect()
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

    /// As [`pair`](Self::pair), cut wherever at least 256 keys in a row are seen by none of the
    /// queries: packed documents of one shard that have nothing in the other are neither sent nor
    /// visited.
    #[must_use]
    pub fn pairs(&self, query: Rank, key_value: Rank) -> Vec<Pair> {
        let Some(whole) = self.pair(query, key_value) else {
            return Vec::new();
        };
        let seen = self.intervals(&whole);
        let part = |rows: Range<usize>, keys: Range<usize>| {
            let chunk = |of: &Chunk, part: Range<usize>| Chunk {
                owner: of.owner,
                rows: of.rows.start + part.start..of.rows.start + part.end,
            };
            Pair { query: chunk(&whole.query, rows), key_value: chunk(&whole.key_value, keys) }
        };
        let mut parts = Vec::new();
        let (mut rows, mut keys) = (0..0, 0..0);
        for (row, seen) in (0..seen.num_rows()).map(|row| (row, seen.row(row))).filter(|row| !row.1.is_empty()) {
            if seen.start >= keys.end + MIN_GAP && !rows.is_empty() {
                parts.push(part(rows.clone(), keys.clone()));
                (rows, keys) = (row..row, seen.start..seen.start);
            }
            rows.end = row + 1;
            keys.end = keys.end.max(seen.end);
        }
        parts.push(part(rows, keys));
        parts
    }

    /// Cuts `pair` into two by query rows, the first with as close to `area` unmasked pairs of tokens as rows
    /// allow; `None` if one part would be empty.
    pub(super) fn cut(&self, pair: &Pair, area: u64) -> Option<(Pair, Pair)> {
        let seen = self.intervals(pair);
        let mut above = 0;
        let cut = (0..seen.num_rows()).find(|&row| {
            let len = seen.row(row).len() as u64;
            // Stop where taking this row too would overshoot by more than leaving it falls short.
            let stop = above + len > area && above + len - area > area.saturating_sub(above);
            above += len;
            stop
        })?;
        let at = pair.query.rows.start + cut;
        let part = |rows| Pair { query: Chunk { owner: pair.query.owner, rows }, ..pair.clone() };
        let (first, second) = (part(pair.query.rows.start..at), part(at..pair.query.rows.end));
        (self.pair_area(&first) > 0 && self.pair_area(&second) > 0).then_some((first, second))
    }
}
