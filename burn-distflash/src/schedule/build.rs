//! The schedules themselves.

use super::{Chunk, Pair, Schedule, ShardedMask};
use crate::layout::Rank;
use std::collections::HashSet;

impl Schedule {
    /// Every rank computes its own queries; at step `t` it attends to the keys of the rank `t` before
    /// it, counted around the ring (Liu et al., *Ring Attention*, arXiv 2310.01889).
    ///
    /// On a contiguous layout and a causal mask half of all slots are idle; on zigzag and striped
    /// layouts none are. Pairs of which the mask leaves nothing are not in the schedule.
    #[must_use]
    pub fn ring(mask: &ShardedMask) -> Self {
        let world = mask.layout().world_size();
        let own = |t: usize, rank: Rank| mask.pair(rank, (rank + world - t) % world).into_iter().collect();
        Self::from_steps(mask, (0..world).map(|t| (0..world).map(|rank| own(t, rank)).collect()))
    }

    /// The load-balanced schedule of DistFlashAttn (Li et al., arXiv 2310.03294, §3.2), right for
    /// every world size: `world_size / 2 + 1` steps under a causal mask on a contiguous layout.
    ///
    /// At step `t` a rank attends to the keys of the rank `t` before its own, as in [`ring`](Self::ring).
    /// A rank for which the mask leaves nothing there helps: it takes the queries of the rank `t`
    /// before it around the ring, attends to its own keys, and returns the partial. In the last step
    /// of an even world each remaining pair belongs to a rank and its idle counterpart, and is split
    /// between the two. Where no rank is idle, as under a full mask, this is the ring.
    #[must_use]
    pub fn balanced(mask: &ShardedMask) -> Self {
        let world = mask.layout().world_size();
        let before = |rank: Rank, t: usize| (rank + world - t) % world;
        let mut done = HashSet::new();
        let mut steps = Vec::new();
        for t in 0..world {
            let mut take = |query: Rank, key_value: Rank| -> Vec<Pair> {
                let new = done.insert((query, key_value));
                new.then(|| mask.pair(query, key_value)).flatten().into_iter().collect()
            };
            let mut step: Vec<Vec<Pair>> = (0..world).map(|rank| take(rank, before(rank, t))).collect();
            let idle: Vec<Rank> = (0..world).filter(|&rank| step[rank].is_empty()).collect();
            for helper in idle {
                let helped = before(helper, t);
                if 2 * t < world {
                    step[helper] = take(helped, helper);
                } else if 2 * t == world
                    && let [pair] = step[helped].as_slice()
                    && let Some((first, second)) = mask.halve(pair)
                {
                    step[helped] = vec![first];
                    step[helper] = vec![second];
                }
            }
            steps.push(step);
        }
        Self::from_steps(mask, steps)
    }

    /// One rank and one block of `num_rows` queries over `num_keys` keys.
    pub(crate) fn solo(num_rows: usize, num_keys: usize) -> Self {
        let chunk = |len| Chunk { owner: 0, rows: 0..len };
        let pair = Pair { query: chunk(num_rows), key_value: chunk(num_keys) };
        Self { steps: vec![vec![vec![pair]]], shard_lens: vec![num_keys] }
    }

    fn from_steps(mask: &ShardedMask, steps: impl IntoIterator<Item = Vec<Vec<Pair>>>) -> Self {
        let layout = mask.layout();
        let busy = |step: &Vec<Vec<Pair>>| step.iter().any(|pairs| !pairs.is_empty());
        Self {
            steps: steps.into_iter().filter(busy).collect(),
            shard_lens: (0..layout.world_size()).map(|rank| layout.shard_len(rank)).collect(),
        }
    }
}
