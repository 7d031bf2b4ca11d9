//! The one mask every kernel reads: an interval of keys per query row.

use std::ops::Range;
use std::sync::Arc;

/// Which keys each query row sees: row `i` sees `lo(i)..hi(i)`, counted in the rows and keys of the
/// tensors the kernel is given.
///
/// Both bounds are non-decreasing in `i`. That is what makes a tile test two comparisons, and gives
/// every block of keys one contiguous block of query rows ([`query_range`](Self::query_range)),
/// which the backward pass walks.
///
/// Cloning shares the bounds.
///
/// ```
/// use distflash_kernels::{RowIntervals, Tile};
///
/// let causal = RowIntervals::causal(4);
/// assert_eq!(causal.row(2), 0..3);
/// assert_eq!(causal.tile(0..2, 2..4), Tile::Skip);
/// assert_eq!(causal.tile(2..4, 0..2), Tile::Full);
/// assert_eq!(causal.tile(0..2, 0..2), Tile::Partial);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowIntervals {
    lo: Arc<[u32]>,
    hi: Arc<[u32]>,
    num_keys: usize,
}

/// How much of a block of the score matrix the mask leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// No row sees a key: neither loaded nor computed.
    Skip,
    /// Every row sees every key: computed without masking.
    Full,
    /// Masked element by element.
    Partial,
}

/// Why bounds are not row intervals.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IntervalError {
    /// The two bounds describe a different number of rows.
    #[error("{lo} lower bounds but {hi} upper bounds; every row needs one of each")]
    UnequalLengths {
        /// Number of lower bounds.
        lo: usize,
        /// Number of upper bounds.
        hi: usize,
    },
    /// A row ends before it starts, or beyond the last key.
    #[error("row {row} sees keys {lo}..{hi}; expected start <= end <= {num_keys}, the number of keys")]
    OutOfRange {
        /// The offending row.
        row: usize,
        /// Its first key.
        lo: u32,
        /// One past its last key.
        hi: u32,
        /// How many keys there are.
        num_keys: usize,
    },
    /// A bound is smaller than the same bound of the row before.
    #[error("row {row} sees keys {lo}..{hi}, which step back from the row before it; bounds must not decrease")]
    Decreasing {
        /// The offending row.
        row: usize,
        /// Its first key.
        lo: u32,
        /// One past its last key.
        hi: u32,
    },
    /// Positions are stored in 32 bits.
    #[error("{len} tokens do not fit the 32-bit positions of row intervals")]
    TooLong {
        /// The offending length.
        len: usize,
    },
}

impl RowIntervals {
    /// Intervals from explicit bounds over `num_keys` keys.
    ///
    /// # Errors
    /// Unless there is one `lo <= hi <= num_keys` per row and neither bound ever decreases.
    pub fn new(lo: Vec<u32>, hi: Vec<u32>, num_keys: usize) -> Result<Self, IntervalError> {
        if u32::try_from(num_keys).is_err() {
            return Err(IntervalError::TooLong { len: num_keys });
        }
        if lo.len() != hi.len() {
            return Err(IntervalError::UnequalLengths { lo: lo.len(), hi: hi.len() });
        }
        let mut before = (0, 0);
        for (row, (&lo, &hi)) in lo.iter().zip(&hi).enumerate() {
            if lo > hi || hi as usize > num_keys {
                return Err(IntervalError::OutOfRange { row, lo, hi, num_keys });
            }
            if lo < before.0 || hi < before.1 {
                return Err(IntervalError::Decreasing { row, lo, hi });
            }
            before = (lo, hi);
        }
        Ok(Self { lo: lo.into(), hi: hi.into(), num_keys })
    }

    /// Row `i` of `len` sees keys `0..=i`.
    ///
    /// # Panics
    /// If `len` does not fit 32 bits.
    #[must_use]
    pub fn causal(len: usize) -> Self {
        let len32 = u32::try_from(len).expect("length fits 32 bits");
        Self { lo: vec![0; len].into(), hi: (1..=len32).collect(), num_keys: len }
    }

    /// Every one of `num_rows` rows sees all `num_keys` keys.
    ///
    /// # Panics
    /// If `num_keys` does not fit 32 bits.
    #[must_use]
    pub fn full(num_rows: usize, num_keys: usize) -> Self {
        let end = u32::try_from(num_keys).expect("length fits 32 bits");
        Self { lo: vec![0; num_rows].into(), hi: vec![end; num_rows].into(), num_keys }
    }

    /// Number of query rows.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.lo.len()
    }

    /// Number of keys.
    #[must_use]
    pub fn num_keys(&self) -> usize {
        self.num_keys
    }

    /// First key of every row.
    #[must_use]
    pub fn lo(&self) -> &[u32] {
        &self.lo
    }

    /// One past the last key of every row.
    #[must_use]
    pub fn hi(&self) -> &[u32] {
        &self.hi
    }

    /// The keys row `row` sees; empty if it sees none.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> Range<usize> {
        self.lo[row] as usize..self.hi[row] as usize
    }

    /// What the mask leaves of the block `rows` × `keys`. Exact, but for rows that see no key at all
    /// inside a block whose other rows do: such a block is `Partial` or `Skip`, never `Full`.
    #[must_use]
    pub fn tile(&self, rows: Range<usize>, keys: Range<usize>) -> Tile {
        let seen = self.query_range(keys.clone());
        if rows.is_empty() || keys.is_empty() || seen.start.max(rows.start) >= seen.end.min(rows.end) {
            return Tile::Skip;
        }
        // Monotone bounds: the last row starts latest, the first row ends earliest.
        let latest_start = self.lo[rows.end - 1] as usize;
        let earliest_end = self.hi[rows.start] as usize;
        if latest_start <= keys.start && earliest_end >= keys.end { Tile::Full } else { Tile::Partial }
    }

    /// The contiguous rows among which all rows that see any of `keys` lie.
    #[must_use]
    pub fn query_range(&self, keys: Range<usize>) -> Range<usize> {
        let start = self.hi.partition_point(|&hi| hi as usize <= keys.start);
        let end = self.lo.partition_point(|&lo| (lo as usize) < keys.end);
        start..end.max(start)
    }

    /// The contiguous keys among which all keys seen by any of `rows` lie.
    #[must_use]
    pub fn key_range(&self, rows: Range<usize>) -> Range<usize> {
        if rows.is_empty() {
            return 0..0;
        }
        let start = self.lo[rows.start] as usize;
        start..(self.hi[rows.end - 1] as usize).max(start)
    }

    /// Number of unmasked (query, key) pairs: the area of the score matrix that is really computed.
    #[must_use]
    pub fn area(&self) -> u64 {
        self.lo.iter().zip(self.hi.iter()).map(|(&lo, &hi)| u64::from(hi - lo)).sum()
    }

    /// The block `rows` × `keys`, counted from its own first row and key.
    ///
    /// # Panics
    /// If the block reaches outside.
    #[must_use]
    pub fn block(&self, rows: Range<usize>, keys: Range<usize>) -> Self {
        assert!(keys.end <= self.num_keys, "keys {keys:?} of {}", self.num_keys);
        let clip = |bound: &[u32]| {
            let clip = |&b: &u32| ((b as usize).clamp(keys.start, keys.end) - keys.start) as u32;
            bound[rows.clone()].iter().map(clip).collect()
        };
        Self { lo: clip(&self.lo), hi: clip(&self.hi), num_keys: keys.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Random monotone intervals over up to 40 keys, empty rows included.
    fn intervals() -> impl Strategy<Value = RowIntervals> {
        (1usize..40, prop::collection::vec((0u32..40, 0u32..40), 0..40)).prop_map(|(num_keys, rows)| {
            let clip = |x: u32| x.min(num_keys as u32);
            let mut lo: Vec<u32> = rows.iter().map(|r| clip(r.0)).collect();
            let mut hi: Vec<u32> = rows.iter().map(|r| clip(r.1)).collect();
            lo.sort_unstable();
            hi.sort_unstable();
            let lo = lo.iter().zip(&hi).map(|(&lo, &hi)| lo.min(hi)).collect();
            RowIntervals::new(lo, hi, num_keys).unwrap()
        })
    }

    proptest! {
        #[test]
        fn a_tile_is_what_counting_its_elements_says(mask in intervals(), r in 0usize..40, rl in 0usize..9, k in 0usize..40, kl in 0usize..9) {
            let rows = r.min(mask.num_rows())..(r + rl).min(mask.num_rows());
            let keys = k.min(mask.num_keys())..(k + kl).min(mask.num_keys());
            let seen: usize = rows.clone().map(|i| keys.clone().filter(|j| mask.row(i).contains(j)).count()).sum();
            let all = rows.len() * keys.len();
            let has_empty_row = rows.clone().any(|i| mask.row(i).is_empty());
            match mask.tile(rows, keys) {
                Tile::Skip => prop_assert_eq!(seen, 0),
                Tile::Full => prop_assert_eq!(seen, all),
                Tile::Partial => prop_assert!(seen < all && (seen > 0 || has_empty_row), "seen {} of {}", seen, all),
            }
        }

        #[test]
        fn the_query_range_of_keys_misses_no_row(mask in intervals(), k in 0usize..40, kl in 1usize..9) {
            let keys = k.min(mask.num_keys())..(k + kl).min(mask.num_keys());
            let range = mask.query_range(keys.clone());
            for i in 0..mask.num_rows() {
                if keys.clone().any(|j| mask.row(i).contains(&j)) {
                    prop_assert!(range.contains(&i), "row {} outside {:?}", i, range);
                }
            }
        }

        #[test]
        fn blocks_add_up_to_the_whole(mask in intervals(), cut in 0usize..40, key_cut in 0usize..40) {
            let (cut, key_cut) = (cut.min(mask.num_rows()), key_cut.min(mask.num_keys()));
            let mut area = 0;
            for rows in [0..cut, cut..mask.num_rows()] {
                for keys in [0..key_cut, key_cut..mask.num_keys()] {
                    area += mask.block(rows.clone(), keys).area();
                }
            }
            prop_assert_eq!(area, mask.area());
        }
    }

    #[test]
    fn bounds_that_step_back_are_rejected() {
        let error = RowIntervals::new(vec![0, 2, 1], vec![3, 3, 3], 4).unwrap_err();
        assert_eq!(error, IntervalError::Decreasing { row: 2, lo: 1, hi: 3 });
    }

    #[test]
    fn bounds_beyond_the_keys_are_rejected() {
        let error = RowIntervals::new(vec![0], vec![5], 4).unwrap_err();
        assert!(error.to_string().contains("0..5"), "{error}");
    }
}
