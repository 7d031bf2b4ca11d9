//! Which heads each rank computes where heads, too, are shared.

use crate::layout::cut;
use std::ops::Range;

/// Query heads that all have equally many neighbours on their key/value head, so that one call of a
/// kernel computes them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HeadBlock {
    /// Query heads.
    pub heads: Range<usize>,
    /// The key/value heads they read: head `i` of the block reads key/value head
    /// `i / (heads.len() / kv_heads.len())` of it.
    pub kv_heads: Range<usize>,
}

/// The consecutive query heads one rank computes, and the key/value heads it needs for them.
///
/// ```
/// use burn_distflash::HeadShare;
///
/// // 9 query heads in groups of 3, over 2 ranks: the group in the middle is cut, its keys go to both.
/// let [first, second] = HeadShare::cut(9, 3, 2).try_into().unwrap();
/// assert_eq!((first.heads(), first.kv_heads()), (0..5, 0..2));
/// assert_eq!((second.heads(), second.kv_heads()), (5..9, 1..3));
/// assert_eq!(first.blocks().len(), 2); // 3 heads on key/value head 0, 2 on key/value head 1
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HeadShare {
    blocks: Vec<HeadBlock>,
    first: (usize, usize),
}

impl HeadShare {
    /// `heads` query heads over `num_ranks` ranks in shares that differ by at most one head. A group that
    /// two ranks share costs its key/value head twice; no other is replicated. With more ranks than
    /// heads, some get none; a [`Plan`](crate::Plan) adds heads of zeros instead.
    ///
    /// # Panics
    /// Unless `kv_heads` divides `heads` and there is a rank.
    #[must_use]
    pub fn cut(heads: usize, kv_heads: usize, num_ranks: usize) -> Vec<Self> {
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{kv_heads} key/value heads divide {heads} heads");
        (0..num_ranks).map(|index| Self::of(cut(heads, num_ranks, index), heads / kv_heads)).collect()
    }

    fn of(heads: Range<usize>, group: usize) -> Self {
        let mut blocks = Vec::new();
        let mut start = heads.start;
        while start < heads.end {
            let whole_groups = heads.end / group * group;
            let is_aligned = start.is_multiple_of(group) && whole_groups > start;
            let end = if is_aligned { whole_groups } else { heads.end.min((start / group + 1) * group) };
            blocks.push(HeadBlock { heads: start..end, kv_heads: start / group..end.div_ceil(group) });
            start = end;
        }
        Self { blocks, first: (heads.start, heads.start / group) }
    }

    /// Its heads in blocks that one call each computes; nothing for a rank without heads.
    #[must_use]
    pub fn blocks(&self) -> &[HeadBlock] {
        &self.blocks
    }

    /// All its query heads.
    #[must_use]
    pub fn heads(&self) -> Range<usize> {
        self.first.0..self.blocks.last().map_or(self.first.0, |block| block.heads.end)
    }

    /// All key/value heads it needs.
    #[must_use]
    pub fn kv_heads(&self) -> Range<usize> {
        self.first.1..self.blocks.last().map_or(self.first.1, |block| block.kv_heads.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_head_belongs_to_one_rank_and_finds_its_key_value_head(
            kv_heads in 1usize..9, group in 1usize..9, num_ranks in 1usize..20,
        ) {
            let heads = kv_heads * group;
            let shares = HeadShare::cut(heads, kv_heads, num_ranks);
            let mut next = 0;
            for share in &shares {
                prop_assert_eq!(share.heads().start, next);
                prop_assert!(share.heads().len() <= heads.div_ceil(num_ranks));
                prop_assert!(share.blocks().len() <= 3);
                let mut next_kv = share.kv_heads().start;
                for block in share.blocks() {
                    prop_assert_eq!(block.heads.start, next);
                    // Key/value heads of a share follow each other, each once.
                    prop_assert_eq!(block.kv_heads.start, next_kv);
                    let own_group = block.heads.len() / block.kv_heads.len();
                    prop_assert_eq!(own_group * block.kv_heads.len(), block.heads.len());
                    for (i, head) in block.heads.clone().enumerate() {
                        prop_assert_eq!(block.kv_heads.start + i / own_group, head / group);
                    }
                    next = block.heads.end;
                    next_kv = block.kv_heads.end;
                }
                prop_assert_eq!(share.heads().end, next);
            }
            prop_assert_eq!(next, heads);
            let replicated: usize = shares.iter().map(|share| share.kv_heads().len()).sum();
            prop_assert!(replicated < kv_heads + num_ranks.min(heads));
        }
    }
}
