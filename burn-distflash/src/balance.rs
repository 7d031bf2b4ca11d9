//! Who owns which tokens when a mask makes some cost more than others.

use crate::layout::{Layout, cut};
use distflash_kernels::RowIntervals;
use std::ops::Range;

/// The slowest rank may have this much more than the mean where that spares transfers.
const TOLERANCE: f64 = 0.01;

/// Runs a rank may own at most, in powers of two: more make more messages and smaller kernels.
const MOST_RUNS: usize = 64;

/// Shorter runs save no work: kernels compute whole tiles.
const SHORTEST_RUN: usize = 32;

/// A layout under which all ranks own equally many tokens, within one run, and see equally many keys.
///
/// The sequence is cut into equal runs, each weighed by the (query, key) pairs of its queries, and the
/// heaviest are dealt first, each to the rank with the least so far that still has room. Ranks that own the
/// run next door are preferred where that costs at most 1 %. Fewer runs a rank keep more of a document in one
/// place: contiguous shards are tried first, then 2 runs a rank (for a causal mask, zigzag), 4, 8, …,
/// until the slowest rank has at most 1 % more than the mean; if none does, the best is taken.
///
/// # Panics
/// If `world_size` is 0.
#[must_use]
pub fn balanced_layout(mask: &RowIntervals, world_size: usize) -> Layout {
    assert!(world_size > 0, "a group has at least one rank");
    let seq_len = mask.num_rows();
    let before = areas_before(mask);
    let weigh = |run: &Range<usize>| before[run.end] - before[run.start];
    let mean = before[seq_len] as f64 / world_size as f64;
    let mut best: Option<(u64, Deal)> = None;
    let mut runs_each = 1;
    while runs_each <= MOST_RUNS && (runs_each <= 2 || seq_len / (world_size * runs_each) >= SHORTEST_RUN) {
        let count = world_size * runs_each;
        let runs: Vec<_> = (0..count).map(|index| cut(seq_len, count, index)).collect();
        let deal = Deal::new(runs.iter().map(weigh).collect(), world_size, mean * TOLERANCE / 2.);
        let slowest = deal.slowest();
        if best.as_ref().is_none_or(|best| slowest < best.0) {
            best = Some((slowest, deal));
        }
        if slowest as f64 <= mean * (1. + TOLERANCE) {
            break;
        }
        runs_each *= 2;
    }
    let (_, deal) = best.expect("contiguous shards at least");
    let count = deal.owners.len();
    let mut runs = vec![Vec::new(); world_size];
    for (index, &owner) in deal.owners.iter().enumerate() {
        runs[owner].push(cut(seq_len, count, index));
    }
    Layout::from_rank_runs(seq_len, runs)
}

/// Unmasked pairs of all rows before each row, and of all rows last.
fn areas_before(mask: &RowIntervals) -> Vec<u64> {
    let rows = mask.lo().iter().zip(mask.hi()).scan(0, |sum, (&lo, &hi)| {
        *sum += u64::from(hi - lo);
        Some(*sum)
    });
    std::iter::once(0).chain(rows).collect()
}

/// Equal runs, each given to a rank, the same number to all.
struct Deal {
    weights: Vec<u64>,
    owners: Vec<usize>,
    loads: Vec<u64>,
}

impl Deal {
    fn new(weights: Vec<u64>, world_size: usize, slack: f64) -> Self {
        let runs_each = weights.len() / world_size;
        if runs_each == 1 {
            return Self { owners: (0..world_size).collect(), loads: weights.clone(), weights };
        }
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by_key(|&run| (std::cmp::Reverse(weights[run]), run));
        const NOBODY: usize = usize::MAX;
        let mut deal = Self { owners: vec![NOBODY; weights.len()], loads: vec![0; world_size], weights };
        let mut room = vec![runs_each; world_size];
        for run in order {
            let with_room = (0..world_size).filter(|&rank| room[rank] > 0);
            let least = with_room.min_by_key(|&rank| (deal.loads[rank], rank)).expect("as much room as runs");
            let next_door = [run.wrapping_sub(1), run + 1].map(|run| deal.owners.get(run).copied().unwrap_or(NOBODY));
            let is_fine = |&rank: &usize| {
                rank != NOBODY && room[rank] > 0 && deal.loads[rank] as f64 <= deal.loads[least] as f64 + slack
            };
            let owner = next_door.into_iter().find(is_fine).unwrap_or(least);
            deal.owners[run] = owner;
            deal.loads[owner] += deal.weights[run];
            room[owner] -= 1;
        }
        deal.improve();
        deal
    }

    fn slowest(&self) -> u64 {
        self.loads.iter().copied().max().unwrap_or(0)
    }

    /// Swaps runs of the slowest rank for lighter ones of others for as long as that makes it faster.
    fn improve(&mut self) {
        let mean = self.loads.iter().sum::<u64>() / self.loads.len() as u64;
        let mut owned: Vec<Vec<usize>> = vec![Vec::new(); self.loads.len()];
        for (run, &owner) in self.owners.iter().enumerate() {
            owned[owner].push(run);
        }
        for _ in 0..4 * self.loads.len() {
            let slowest = (0..self.loads.len()).max_by_key(|&rank| self.loads[rank]).expect("at least one rank");
            let excess = self.loads[slowest] - mean;
            if (excess as f64) < mean as f64 * TOLERANCE / 4. {
                return;
            }
            let mut best: Option<(u64, usize, usize)> = None;
            for other in (0..self.loads.len()).filter(|&rank| self.loads[rank] < mean) {
                for (i, &own) in owned[slowest].iter().enumerate() {
                    for (j, &their) in owned[other].iter().enumerate() {
                        let Some(moved) = self.weights[own].checked_sub(self.weights[their]) else { continue };
                        let after = (self.loads[slowest] - moved).max(self.loads[other] + moved);
                        if after < best.map_or(self.loads[slowest], |best| best.0) {
                            best = Some((after, i, other * self.owners.len() + j));
                        }
                    }
                }
            }
            let Some((_, i, place)) = best else { return };
            let (other, j) = (place / self.owners.len(), place % self.owners.len());
            let (own, their) = (owned[slowest][i], owned[other][j]);
            let moved = self.weights[own] - self.weights[their];
            self.loads[slowest] -= moved;
            self.loads[other] += moved;
            self.owners.swap(own, their);
            (owned[slowest][i], owned[other][j]) = (their, own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mask;

    #[test]
    fn a_causal_mask_gives_zigzag_and_a_full_one_contiguous_shards() {
        for world_size in 1..=9 {
            let len = 128 * world_size;
            assert_eq!(balanced_layout(&RowIntervals::full(len, len), world_size), Layout::contiguous(len, world_size));
            let causal = balanced_layout(&RowIntervals::causal(len), world_size);
            let owned = |layout: &Layout| {
                let mut owned: Vec<_> = (0..world_size).map(|rank| layout.positions(rank)).collect();
                owned.sort();
                owned
            };
            assert_eq!(owned(&causal), owned(&Layout::zigzag(len, world_size)));
        }
    }

    #[test]
    fn equal_documents_stay_whole() {
        let cuts: Vec<usize> = (0..=16).map(|i| i * 256).collect();
        let mask = Mask::causal().with_documents(&cuts).unwrap().intervals(4096, 4096).unwrap();
        assert_eq!(balanced_layout(&mask, 8), Layout::contiguous(4096, 8));
    }

    #[test]
    fn any_length_is_laid_out() {
        for (len, world_size) in [(0, 1), (0, 3), (1, 4), (5, 8), (1000, 7)] {
            let layout = balanced_layout(&RowIntervals::causal(len), world_size);
            assert_eq!((0..world_size).map(|rank| layout.shard_len(rank)).sum::<usize>(), len);
        }
    }
}
