//! The schedules themselves.

use super::{Chunk, Pair, Schedule, ShardedMask};
use crate::layout::Rank;
use std::collections::HashSet;

impl Schedule {
    /// Every rank computes its own queries; at step `t` it attends to the keys of the rank `t` before
    /// it, counted around the ring (Liu et al., *Ring Attention*, arXiv 2310.01889).
    ///
    /// Keys come from their owners, not from the neighbour that had them before: within a node that is the same, across
    /// nodes [`double_ring`](Self::double_ring) sends less.
    ///
    /// On a contiguous layout and a causal mask half of all slots are idle; on zigzag and striped
    /// layouts none are. Pairs of which the mask leaves nothing are not in the schedule.
    #[must_use]
    pub fn ring(mask: &ShardedMask) -> Self {
        let world = mask.layout().world_size();
        let own = |t: usize, rank: Rank| mask.pairs(rank, (rank + world - t) % world);
        Self::from_steps(mask, (0..world).map(|t| (0..world).map(|rank| own(t, rank)).collect()))
    }

    /// Every rank computes its own queries, first over its own keys and then over those of all others, which
    /// are gathered meanwhile: one exchange, in which all keys arrive at once.
    #[must_use]
    pub fn all_gather(mask: &ShardedMask) -> Self {
        let world = mask.layout().world_size();
        let others = |rank: Rank| (1..world).flat_map(move |t| mask.pairs(rank, (rank + world - t) % world)).collect();
        let own = |rank: Rank| mask.pairs(rank, rank);
        Self::from_steps(mask, [(0..world).map(own).collect(), (0..world).map(others).collect()])
    }

    /// A ring of rings, for nodes whose ranks are joined by a faster link than the nodes are. While a node's
    /// ranks pass keys around, the next node's are on their way; under causal and full masks each key crosses to
    /// another node once, to the rank with the same place there, and is handed on from it (LoongTrain, arXiv
    /// 2406.18485). Gradients of what came from another node are added up within the node before they go back. Where a
    /// mask leaves a rank of the node nothing to do with a key, the next asks its owner again.
    ///
    /// # Panics
    /// Unless `ranks_per_node` divides the world.
    #[must_use]
    pub fn double_ring(mask: &ShardedMask, ranks_per_node: usize) -> Self {
        let world = mask.layout().world_size();
        assert!(ranks_per_node > 0 && world.is_multiple_of(ranks_per_node), "whole nodes");
        let nodes = world / ranks_per_node;
        let ranks_of = |node: usize| node * ranks_per_node..(node + 1) * ranks_per_node;
        // All ranks of a node ask for the same rows of a distant chunk, so that one copy serves them all.
        let widened = |mut pair: Pair| {
            let node = pair.query.owner / ranks_per_node;
            if node != pair.key_value.owner / ranks_per_node {
                let seen = ranks_of(node).filter_map(|rank| mask.pair(rank, pair.key_value.owner));
                let rows = seen.map(|pair| pair.key_value.rows);
                let hull = rows.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
                pair.key_value.rows = hull.expect("at least this pair");
            }
            pair
        };
        let step = |outer: usize, inner: usize| {
            let own = |rank: Rank| {
                let node = (rank / ranks_per_node + nodes - outer) % nodes;
                let place = (rank % ranks_per_node + ranks_per_node - inner) % ranks_per_node;
                mask.pair(rank, node * ranks_per_node + place).map(widened).into_iter().collect()
            };
            (0..world).map(own).collect()
        };
        let steps = (0..nodes).flat_map(|outer| (0..ranks_per_node).map(move |inner| (outer, inner)));
        Self { ranks_per_node, ..Self::from_steps(mask, steps.map(|(outer, inner)| step(outer, inner))) }
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
                if new { mask.pairs(query, key_value) } else { Vec::new() }
            };
            let mut step: Vec<Vec<Pair>> = (0..world).map(|rank| take(rank, before(rank, t))).collect();
            let idle: Vec<Rank> = (0..world).filter(|&rank| step[rank].is_empty()).collect();
            for helper in idle {
                let helped = before(helper, t);
                if 2 * t < world {
                    step[helper] = take(helped, helper);
                } else if 2 * t == world
                    && let [pair] = step[helped].as_slice()
                    && let Some((first, second)) = mask.cut(pair, mask.pair_area(pair) / 2)
                {
                    step[helped] = vec![first];
                    step[helper] = vec![second];
                }
            }
            steps.push(step);
        }
        Self::from_steps(mask, steps)
    }

    /// The ring, with work moved from ranks that have most to ranks that own its other side and have less: they are
    /// sent queries and return partials. Half the difference moves at a time, so that what one rank takes it may
    /// pass on, until the slowest rank is within 1 % of the mean or nobody can help it.
    #[must_use]
    pub fn leveled(mask: &ShardedMask) -> Self {
        let mut schedule = Self::ring(mask);
        let world = schedule.world_size();
        let mut loads = vec![0; world];
        for (_, rank, pair) in schedule.iter() {
            loads[rank] += mask.pair_area(pair);
        }
        let mean = loads.iter().sum::<u64>() / world as u64;
        // Of which every pair is too small to be shared.
        let mut is_stuck = vec![false; world];
        for _ in 0..16 * world {
            let rank = (0..world).filter(|&rank| !is_stuck[rank]).max_by_key(|&rank| (loads[rank], rank));
            let Some(rank) = rank else { break };
            if loads[rank] <= mean + mean / 100 {
                break;
            }
            let mut shareable: Vec<(Rank, usize, usize)> = (0..schedule.num_steps())
                .flat_map(|step| (0..schedule.pairs(step, rank).len()).map(move |at| (step, at)))
                .map(|(step, at)| (other_owner(&schedule.pairs(step, rank)[at], rank), step, at))
                .filter(|&(helper, ..)| loads[helper] < loads[rank])
                .collect();
            shareable.sort_unstable_by_key(|&(helper, step, at)| (loads[helper], step, at));
            let share = |&(helper, step, at): &(Rank, usize, usize)| {
                let most = (loads[rank] - loads[helper]) / 2;
                let pair = &schedule.pairs(step, rank)[at];
                let area = mask.pair_area(pair);
                if area <= most {
                    return Some((helper, step, at, None, pair.clone()));
                }
                mask.cut(pair, area - most).map(|(stays, moves)| (helper, step, at, Some(stays), moves))
            };
            let Some((helper, step, at, stays, moved)) = shareable.iter().find_map(share) else {
                is_stuck[rank] = true;
                continue;
            };
            match stays {
                Some(stays) => schedule.steps[step][rank][at] = stays,
                None => drop(schedule.steps[step][rank].remove(at)),
            }
            let area = mask.pair_area(&moved);
            loads[rank] -= area;
            loads[helper] += area;
            is_stuck.fill(false);
            schedule.steps[step][helper].push(moved);
        }
        schedule
    }

    /// One rank and one block of `num_rows` queries over `num_keys` keys.
    pub(crate) fn solo(num_rows: usize, num_keys: usize) -> Self {
        let chunk = |len| Chunk { owner: 0, rows: 0..len };
        let pair = Pair { query: chunk(num_rows), key_value: chunk(num_keys) };
        Self { steps: vec![vec![vec![pair]]], shard_lens: vec![num_keys], ranks_per_node: 1 }
    }

    fn from_steps(mask: &ShardedMask, steps: impl IntoIterator<Item = Vec<Vec<Pair>>>) -> Self {
        let layout = mask.layout();
        let busy = |step: &Vec<Vec<Pair>>| step.iter().any(|pairs| !pairs.is_empty());
        Self {
            steps: steps.into_iter().filter(busy).collect(),
            shard_lens: (0..layout.world_size()).map(|rank| layout.shard_len(rank)).collect(),
            ranks_per_node: layout.world_size(),
        }
    }
}

/// Who could compute `pair` instead of `rank`: `rank` itself if it owns both sides.
pub(super) fn other_owner(pair: &Pair, rank: Rank) -> Rank {
    if pair.query.owner == rank { pair.key_value.owner } else { pair.query.owner }
}
