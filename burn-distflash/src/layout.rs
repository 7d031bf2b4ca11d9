//! Who owns which tokens.

use burn::tensor::kind::Basic;
use burn::tensor::{Device, Int, Tensor, TensorData};
use distflash_kernels::RowIntervals;
use std::ops::Range;

/// A member of the context-parallel group, and the shard of the sequence it owns.
pub type Rank = usize;

/// The positions `start, start + step, …`, `len` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// First position.
    pub start: usize,
    /// Number of positions.
    pub len: usize,
    /// Distance between neighbours, at least 1.
    pub step: usize,
}

impl Span {
    fn positions(self) -> impl Iterator<Item = usize> {
        (0..self.len).map(move |i| self.start + i * self.step)
    }

    /// How many of its positions come before `position`.
    fn count_before(self, position: usize) -> usize {
        position.saturating_sub(self.start).div_ceil(self.step).min(self.len)
    }
}

/// Which global token positions each rank owns. Every position of the sequence belongs to exactly
/// one rank, and a rank holds its tokens in the order of their positions. A rank may own nothing.
///
/// ```
/// use burn_distflash::Layout;
///
/// let zigzag = Layout::zigzag(10, 2); // chunks of 3, 3, 2, 2 tokens
/// assert_eq!(zigzag.positions(0), [0, 1, 2, 8, 9]);
/// assert_eq!(zigzag.positions(1), [3, 4, 5, 6, 7]);
/// let letters: Vec<char> = "abcdefghij".chars().collect();
/// let shards = vec![zigzag.shard_slice(&letters, 0), zigzag.shard_slice(&letters, 1)];
/// assert_eq!(zigzag.unshard_slices(&shards), letters);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    seq_len: usize,
    ranks: Vec<Vec<Span>>,
}

/// The bounds of part `index` of `len` items cut into `parts`, the longer parts first.
pub(crate) fn cut(len: usize, parts: usize, index: usize) -> Range<usize> {
    let at = |i: usize| i * (len / parts) + i.min(len % parts);
    at(index)..at(index + 1)
}

impl Layout {
    /// Rank `r` owns the `r`-th of `world_size` consecutive runs, whose lengths differ by at most one.
    #[must_use]
    pub fn contiguous(seq_len: usize, world_size: usize) -> Self {
        Self::from_runs(seq_len, world_size, |rank| vec![cut(seq_len, world_size, rank)])
    }

    /// `2 · world_size` consecutive runs; rank `r` owns the `r`-th from the front and the `r`-th from
    /// the back, so that all ranks do the same causal work.
    #[must_use]
    pub fn zigzag(seq_len: usize, world_size: usize) -> Self {
        let runs = 2 * world_size;
        Self::from_runs(seq_len, world_size, |rank| vec![cut(seq_len, runs, rank), cut(seq_len, runs, runs - 1 - rank)])
    }

    /// Rank `r` owns the positions `r, r + world_size, …`.
    #[must_use]
    pub fn striped(seq_len: usize, world_size: usize) -> Self {
        let span =
            |rank: Rank| Span { start: rank, len: seq_len.saturating_sub(rank).div_ceil(world_size), step: world_size };
        let ranks = (0..world_size).map(|rank| vec![span(rank)]).collect();
        Self { seq_len, ranks }.without_empty_spans()
    }

    /// Each rank of this layout becomes `parts` ranks: rank `r · parts + p` owns the `p`-th of `parts` runs of
    /// the tokens of `r`, whose lengths differ by at most one.
    #[must_use]
    pub fn split(&self, parts: usize) -> Self {
        let of = |rank: Rank, part| {
            let Range { start, end } = cut(self.shard_len(rank), parts, part);
            let mut at = 0;
            let mut spans = Vec::new();
            for span in self.spans(rank) {
                let (from, to) = (start.clamp(at, at + span.len) - at, end.clamp(at, at + span.len) - at);
                spans.push(Span { start: span.start + from * span.step, len: to - from, step: span.step });
                at += span.len;
            }
            spans
        };
        let ranks = (0..self.world_size()).flat_map(|rank| (0..parts).map(move |part| of(rank, part))).collect();
        Self { seq_len: self.seq_len, ranks }.without_empty_spans()
    }

    /// Rank `r` owns the runs `runs[r]`, which together are the whole sequence.
    ///
    /// # Panics
    /// Unless every position is in exactly one run.
    #[must_use]
    pub fn from_rank_runs(seq_len: usize, mut runs: Vec<Vec<Range<usize>>>) -> Self {
        for owned in &mut runs {
            owned.sort_unstable_by_key(|run| run.start);
        }
        let mut all: Vec<_> = runs.iter().flatten().filter(|run| !run.is_empty()).collect();
        all.sort_unstable_by_key(|run| run.start);
        let end = all.iter().try_fold(0, |end, run| (run.start == end).then_some(run.end));
        assert_eq!(end, Some(seq_len), "runs that make up the sequence");
        Self::from_runs(seq_len, runs.len(), |rank| joined(&runs[rank]))
    }

    fn from_runs(seq_len: usize, world_size: usize, runs: impl Fn(Rank) -> Vec<Range<usize>>) -> Self {
        let span = |run: Range<usize>| Span { start: run.start, len: run.len(), step: 1 };
        let ranks = (0..world_size).map(|rank| runs(rank).into_iter().map(span).collect()).collect();
        Self { seq_len, ranks }.without_empty_spans()
    }

    fn without_empty_spans(mut self) -> Self {
        for spans in &mut self.ranks {
            spans.retain(|span| span.len > 0);
        }
        self
    }

    /// Tokens of the whole sequence.
    #[must_use]
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// What `rank` owns, in order of position.
    ///
    /// # Panics
    /// If there is no such rank; so do all methods that take one.
    #[must_use]
    pub fn spans(&self, rank: Rank) -> &[Span] {
        &self.ranks[rank]
    }

    /// Number of tokens `rank` owns.
    #[must_use]
    pub fn shard_len(&self, rank: Rank) -> usize {
        self.ranks[rank].iter().map(|span| span.len).sum()
    }

    /// The global positions `rank` owns, ascending: what rotary embeddings need.
    #[must_use]
    pub fn positions(&self, rank: Rank) -> Vec<usize> {
        self.ranks[rank].iter().flat_map(|span| span.positions()).collect()
    }

    /// How many of `rank`'s tokens come before global `position`.
    #[must_use]
    pub fn count_before(&self, rank: Rank, position: usize) -> usize {
        self.ranks[rank].iter().map(|span| span.count_before(position)).sum()
    }

    /// [`count_before`](Self::count_before) of positions that never decrease.
    pub(crate) fn counts_before<'a>(&'a self, rank: Rank, positions: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
        let (mut spans, mut passed) = (&self.ranks[rank][..], 0);
        positions.iter().map(move |&position| {
            let position = position as usize;
            while let [span, rest @ ..] = spans
                && span.count_before(position) == span.len
            {
                passed += span.len;
                spans = rest;
            }
            passed + spans.first().map_or(0, |span| span.count_before(position))
        })
    }

    /// `rank`'s part of one value per token, such as token ids or labels.
    ///
    /// Labels are the tokens shifted by one *before* they are sharded: shifting a shard would lose the
    /// label at each boundary.
    ///
    /// # Panics
    /// If there is not one value per token.
    #[must_use]
    pub fn shard_slice<T: Clone>(&self, values: &[T], rank: Rank) -> Vec<T> {
        assert_eq!(values.len(), self.seq_len, "one value per token");
        self.positions(rank).into_iter().map(|position| values[position].clone()).collect()
    }

    /// Undoes [`shard_slice`](Self::shard_slice): all ranks' parts, back in order of position.
    ///
    /// # Panics
    /// Unless there is one shard per rank, of its own length.
    #[must_use]
    pub fn unshard_slices<T: Clone>(&self, shards: &[Vec<T>]) -> Vec<T> {
        assert_eq!(shards.len(), self.world_size(), "one shard per rank");
        let joined: Vec<&T> = shards.iter().flatten().collect();
        assert_eq!(joined.len(), self.seq_len, "the shards hold the whole sequence");
        self.order().into_iter().map(|at| joined[at].clone()).collect()
    }

    /// Where each position lies once all shards are joined in order of rank.
    fn order(&self) -> Vec<usize> {
        let mut order = vec![0; self.seq_len];
        let owned = (0..self.world_size()).flat_map(|rank| self.positions(rank));
        for (at, position) in owned.enumerate() {
            order[position] = at;
        }
        order
    }

    /// `rank`'s part of a tensor whose dimension `dim` runs over the tokens. Differentiable.
    ///
    /// # Panics
    /// If `dim` is not as long as the sequence.
    #[must_use]
    pub fn shard<const D: usize, K: Basic>(&self, tensor: Tensor<D, K>, dim: usize, rank: Rank) -> Tensor<D, K> {
        assert_eq!(tensor.dims()[dim], self.seq_len, "dimension {dim} runs over the tokens");
        match *self.spans(rank) {
            [] => tensor.slice_dim(dim, 0..0),
            [Span { start, len, step: 1 }] => tensor.slice_dim(dim, start..start + len),
            _ => {
                let device = tensor.device();
                tensor.select(dim, indices(self.positions(rank), &device))
            }
        }
    }

    /// Undoes [`shard`](Self::shard) from all ranks' parts, in order of rank. Differentiable.
    ///
    /// # Panics
    /// Unless there is one shard per rank, of its own length.
    #[must_use]
    pub fn unshard<const D: usize, K: Basic>(&self, shards: Vec<Tensor<D, K>>, dim: usize) -> Tensor<D, K> {
        assert_eq!(shards.len(), self.world_size(), "one shard per rank");
        for (rank, shard) in shards.iter().enumerate() {
            assert_eq!(shard.dims()[dim], self.shard_len(rank), "tokens of rank {rank}");
        }
        let (device, first) = (shards[0].device(), shards[0].clone());
        let filled: Vec<_> = shards.into_iter().filter(|shard| shard.dims()[dim] > 0).collect();
        let joined = if filled.is_empty() { first } else { Tensor::cat(filled, dim) };
        let order = self.order();
        if order.is_sorted() { joined } else { joined.select(dim, indices(order, &device)) }
    }

    /// The rows of `mask` that `rank` owns, over global keys.
    ///
    /// # Panics
    /// If `mask` does not have one row per token.
    #[must_use]
    pub fn shard_mask(&self, mask: &RowIntervals, rank: Rank) -> RowIntervals {
        let lo = self.shard_slice(mask.lo(), rank);
        let hi = self.shard_slice(mask.hi(), rank);
        RowIntervals::new(lo, hi, mask.num_keys()).expect("a subsequence of monotone rows is monotone")
    }

    /// Undoes [`shard_mask`](Self::shard_mask) from all ranks' rows.
    ///
    /// # Panics
    /// Unless the shards are those of one mask over this layout.
    #[must_use]
    pub fn unshard_masks(&self, shards: &[RowIntervals]) -> RowIntervals {
        let bound = |of: fn(&RowIntervals) -> &[u32]| {
            self.unshard_slices(&shards.iter().map(|shard| of(shard).to_vec()).collect::<Vec<_>>())
        };
        RowIntervals::new(bound(RowIntervals::lo), bound(RowIntervals::hi), self.seq_len)
            .expect("the shards of one mask")
    }
}

/// `runs` in order, with neighbours that touch made one.
fn joined(runs: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for run in runs.iter().filter(|run| !run.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => joined.push(run.clone()),
        }
    }
    joined
}

fn indices(of: Vec<usize>, device: &Device) -> Tensor<1, Int> {
    let len = of.len();
    let data: Vec<i64> = of.into_iter().map(|i| i as i64).collect();
    Tensor::from_data(TensorData::new(data, [len]), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layouts(seq_len: usize, world_size: usize) -> [Layout; 3] {
        [Layout::contiguous, Layout::zigzag, Layout::striped].map(|make| make(seq_len, world_size))
    }

    proptest! {
        #[test]
        fn every_position_belongs_to_exactly_one_rank(seq_len in 0usize..200, world_size in 1usize..34) {
            for layout in layouts(seq_len, world_size) {
                let mut owned: Vec<usize> = (0..world_size).flat_map(|rank| layout.positions(rank)).collect();
                owned.sort_unstable();
                prop_assert_eq!(owned, (0..seq_len).collect::<Vec<_>>());
                for rank in 0..world_size {
                    let positions = layout.positions(rank);
                    prop_assert!(positions.is_sorted());
                    prop_assert_eq!(positions.len(), layout.shard_len(rank));
                    let even = seq_len.div_ceil(world_size);
                    prop_assert!(positions.len() <= even + 1 && positions.len() + 2 >= seq_len / world_size);
                    for position in 0..=seq_len {
                        let before = positions.iter().filter(|&&p| p < position).count();
                        prop_assert_eq!(layout.count_before(rank, position), before);
                    }
                }
            }
        }

        #[test]
        fn sharding_and_back_is_the_identity(seq_len in 0usize..120, world_size in 1usize..12) {
            for layout in layouts(seq_len, world_size) {
                let tokens: Vec<usize> = (0..seq_len).map(|i| i * 7 + 3).collect();
                let shards: Vec<_> = (0..world_size).map(|rank| layout.shard_slice(&tokens, rank)).collect();
                prop_assert_eq!(layout.unshard_slices(&shards), tokens);
                let mask = RowIntervals::causal(seq_len);
                let shards: Vec<_> = (0..world_size).map(|rank| layout.shard_mask(&mask, rank)).collect();
                prop_assert_eq!(layout.unshard_masks(&shards), mask);
            }
        }

        #[test]
        fn tensors_shard_and_unshard_exactly(seq_len in 0usize..40, world_size in 1usize..9) {
            for layout in layouts(seq_len, world_size) {
                let data: Vec<f32> = (0..2 * seq_len * 3).map(|i| i as f32).collect();
                let tensor = Tensor::<3>::from_data(TensorData::new(data, [2, seq_len, 3]), &Device::flex());
                let shards: Vec<_> = (0..world_size).map(|rank| layout.shard(tensor.clone(), 1, rank)).collect();
                for (rank, shard) in shards.iter().enumerate() {
                    prop_assert_eq!(shard.dims(), [2, layout.shard_len(rank), 3]);
                }
                prop_assert_eq!(layout.unshard(shards, 1).into_data(), tensor.into_data());
            }
        }
    }

    #[test]
    fn a_sequence_shorter_than_the_world_leaves_ranks_empty() {
        for layout in layouts(3, 8) {
            assert_eq!((0..8).map(|rank| layout.shard_len(rank)).sum::<usize>(), 3);
            assert!((0..8).any(|rank| layout.shard_len(rank) == 0));
        }
    }
}
