//! The named ways to shard attention.

use crate::balance::balanced_layout;
use crate::layout::Layout;
use crate::mask::{Mask, MaskError};
use crate::schedule::{Schedule, ShardedMask};
use distflash_kernels::RowIntervals;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a sequence is shared: who owns which tokens, and who computes which block of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sequence {
    /// Contiguous shards, unbalanced ring: the plain Ring Attention. Half the work slots are idle
    /// under a causal mask.
    Ring,
    /// Contiguous shards, idle ranks help: DistFlashAttn. No rank idles under a causal mask, in half the
    /// ring's steps. A helper is sent queries and returns f32 partials, so with few key/value heads
    /// [`Zigzag`](Self::Zigzag) sends less.
    Balanced,
    /// Two runs a rank, one from each end of the sequence, in a ring.
    Zigzag,
    /// Every `world_size`-th token, in a ring.
    Striped,
    /// As zigzag, but all keys and values are gathered at once.
    AllGather,
    /// Runs dealt by what a mask really leaves of them, so that packed documents and windows cost all ranks
    /// the same.
    Adaptive,
    /// As zigzag, in a ring of rings for nodes of so many ranks: see [`Schedule::double_ring`].
    DoubleRing {
        /// Ranks `0..n`, `n..2n`, … sit on one node; in a hybrid, so many groups of ranks do.
        ranks_per_node: usize,
    },
}

/// Who owns which tokens, and who computes which heads of what. All give the same result.
///
/// Written and read as `zigzag`, `double-ring:8`, `ulysses`, `hybrid:4:zigzag` and the like.
///
/// ```
/// use burn_distflash::{Sequence, Strategy};
///
/// let strategy: Strategy = "hybrid:4:zigzag".parse()?;
/// assert_eq!(strategy, Strategy::Hybrid { head_ranks: 4, sequence: Sequence::Zigzag });
/// assert_eq!("ring".parse(), Ok(Strategy::from(Sequence::Ring)));
/// assert!("spiral".parse::<Strategy>().unwrap_err().to_string().contains("all-gather"));
/// # Ok::<(), burn_distflash::UnknownStrategy>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Strategy {
    /// The sequence alone is shared; every rank computes all heads.
    Sequence(Sequence),
    /// The heads alone are shared: an all-to-all gives each rank all tokens of some heads (Jacobs et al.,
    /// *DeepSpeed-Ulysses*, arXiv 2309.14509). Shares may be uneven, and key/value heads whose group is cut
    /// go to all who need them, so any number of heads will do; ranks beyond the heads get heads of zeros.
    Ulysses,
    /// As Ulysses, with heads of zeros added until the world divides them, which is what its own
    /// implementation needs: a baseline.
    PaddedUlysses,
    /// Groups of `head_ranks` consecutive ranks share heads, and the groups share the sequence (Fang and Zhao,
    /// *USP*, arXiv 2405.07719).
    Hybrid {
        /// Ranks of a group; must divide the world.
        head_ranks: usize,
        /// How the groups share the sequence.
        sequence: Sequence,
    },
    /// All keys and values are gathered and whole rows of scores are held in memory (Li et al., *Sequence
    /// Parallelism*, arXiv 2105.13120): a baseline that needs O(N²) memory.
    RingSelfAttention,
}

impl Sequence {
    /// All that fit any world.
    pub const ALL: [Sequence; 6] = [
        Sequence::Ring,
        Sequence::Balanced,
        Sequence::Zigzag,
        Sequence::Striped,
        Sequence::AllGather,
        Sequence::Adaptive,
    ];

    /// Who owns which tokens, for a causal mask.
    ///
    /// # Panics
    /// If `world_size` is 0.
    #[must_use]
    pub fn layout(self, seq_len: usize, world_size: usize) -> Layout {
        assert!(world_size > 0, "a group has at least one rank");
        match self {
            Sequence::Ring | Sequence::Balanced => Layout::contiguous(seq_len, world_size),
            Sequence::Striped => Layout::striped(seq_len, world_size),
            Sequence::Adaptive => balanced_layout(&RowIntervals::causal(seq_len), world_size),
            Sequence::Zigzag | Sequence::AllGather | Sequence::DoubleRing { .. } => Layout::zigzag(seq_len, world_size),
        }
    }

    /// Who owns which tokens, for `mask`: only [`Adaptive`](Self::Adaptive) looks at it.
    ///
    /// # Panics
    /// If `world_size` is 0.
    #[must_use]
    pub fn layout_for(self, mask: &RowIntervals, world_size: usize) -> Layout {
        match self {
            Sequence::Adaptive => balanced_layout(mask, world_size),
            _ => self.layout(mask.num_rows(), world_size),
        }
    }

    /// `mask` over its layout.
    ///
    /// # Errors
    /// If the mask does not fit the length.
    pub fn shard(self, mask: &Mask, seq_len: usize, world_size: usize) -> Result<ShardedMask, MaskError> {
        let rows = mask.intervals(seq_len, seq_len)?;
        Ok(ShardedMask::new(self.layout_for(&rows, world_size), &rows))
    }

    /// Who computes what.
    ///
    /// # Panics
    /// If whole nodes do not make up the world.
    #[must_use]
    pub fn schedule(self, mask: &ShardedMask) -> Schedule {
        match self {
            Sequence::Ring | Sequence::Zigzag | Sequence::Striped => Schedule::ring(mask),
            Sequence::Balanced => Schedule::balanced(mask),
            Sequence::AllGather => Schedule::all_gather(mask),
            Sequence::Adaptive => Schedule::leveled(mask),
            Sequence::DoubleRing { ranks_per_node } => Schedule::double_ring(mask, ranks_per_node),
        }
    }
}

/// Why a strategy cannot run on a group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("strategy {strategy} needs groups of {group} ranks, which {world_size} ranks do not divide into")]
pub struct StrategyError {
    /// As asked for.
    pub strategy: Strategy,
    /// Ranks of one of its groups.
    pub group: usize,
    /// Ranks there are.
    pub world_size: usize,
}

impl Strategy {
    /// All that fit any world and any length, [`Hybrid`](Self::Hybrid) in one example for worlds that 2 divides.
    #[must_use]
    pub fn all_for(world_size: usize) -> Vec<Self> {
        let mut all: Vec<Self> = Sequence::ALL.map(Self::from).into();
        all.extend([Strategy::Ulysses, Strategy::PaddedUlysses, Strategy::RingSelfAttention]);
        if world_size > 2 && world_size.is_multiple_of(2) {
            all.push(Sequence::DoubleRing { ranks_per_node: 2 }.into());
            all.push(Sequence::DoubleRing { ranks_per_node: world_size / 2 }.into());
            all.extend(Sequence::ALL.map(|sequence| Strategy::Hybrid { head_ranks: 2, sequence }));
            all.push(Strategy::Hybrid { head_ranks: world_size / 2, sequence: Sequence::Balanced });
        }
        all
    }

    /// How many consecutive ranks share heads, and how the groups of them share the sequence.
    #[must_use]
    pub fn axes(self, world_size: usize) -> (usize, Sequence) {
        match self {
            Strategy::Sequence(sequence) => (1, sequence),
            Strategy::RingSelfAttention => (1, Sequence::Ring),
            Strategy::Ulysses | Strategy::PaddedUlysses => (world_size, Sequence::Ring),
            Strategy::Hybrid { head_ranks, sequence } => (head_ranks, sequence),
        }
    }

    /// Whether it can run on `world_size` ranks.
    ///
    /// # Errors
    /// If its groups of ranks do not divide the world.
    pub fn check(self, world_size: usize) -> Result<(), StrategyError> {
        let refuse = |group| Err(StrategyError { strategy: self, group, world_size });
        let divides = |group: usize, world: usize| group > 0 && world.is_multiple_of(group);
        let (head_ranks, sequence) = self.axes(world_size);
        if !divides(head_ranks, world_size) {
            return refuse(head_ranks);
        }
        match sequence {
            Sequence::DoubleRing { ranks_per_node } if !divides(ranks_per_node, world_size / head_ranks) => {
                refuse(ranks_per_node.saturating_mul(head_ranks))
            }
            _ => Ok(()),
        }
    }

    /// Who owns which tokens, for a causal mask.
    ///
    /// # Panics
    /// If the strategy does not fit the world; see [`check`](Self::check).
    #[must_use]
    pub fn layout(self, seq_len: usize, world_size: usize) -> Layout {
        let (head_ranks, sequence) = self.axes(world_size);
        sequence.layout(seq_len, world_size / head_ranks).split(head_ranks)
    }

    /// Who owns which tokens, for `mask`.
    ///
    /// # Panics
    /// As [`layout`](Self::layout).
    #[must_use]
    pub fn layout_for(self, mask: &RowIntervals, world_size: usize) -> Layout {
        let (head_ranks, sequence) = self.axes(world_size);
        sequence.layout_for(mask, world_size / head_ranks).split(head_ranks)
    }
}

impl From<Sequence> for Strategy {
    fn from(sequence: Sequence) -> Self {
        Strategy::Sequence(sequence)
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sequence::Ring => f.pad("ring"),
            Sequence::Balanced => f.pad("balanced"),
            Sequence::Zigzag => f.pad("zigzag"),
            Sequence::Striped => f.pad("striped"),
            Sequence::AllGather => f.pad("all-gather"),
            Sequence::Adaptive => f.pad("adaptive"),
            Sequence::DoubleRing { ranks_per_node } => f.pad(&format!("double-ring:{ranks_per_node}")),
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Strategy::Sequence(sequence) => sequence.fmt(f),
            Strategy::Ulysses => f.pad("ulysses"),
            Strategy::PaddedUlysses => f.pad("padded-ulysses"),
            Strategy::Hybrid { head_ranks, sequence } => f.pad(&format!("hybrid:{head_ranks}:{sequence}")),
            Strategy::RingSelfAttention => f.pad("ring-self-attention"),
        }
    }
}

/// A name that is no strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown strategy `{0}`; expected ring, balanced, zigzag, striped, all-gather, adaptive, \
     double-ring:<ranks per node>, ulysses, padded-ulysses, hybrid:<ranks that share heads>:<one of the first>, \
     or ring-self-attention"
)]
pub struct UnknownStrategy(String);

impl FromStr for Sequence {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownStrategy(name.to_string());
        if let Some(ranks) = name.strip_prefix("double-ring:") {
            let ranks_per_node = ranks.parse().map_err(|_| unknown())?;
            return Ok(Sequence::DoubleRing { ranks_per_node });
        }
        Self::ALL.into_iter().find(|sequence| sequence.to_string() == name).ok_or_else(unknown)
    }
}

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownStrategy(name.to_string());
        if let Some(axes) = name.strip_prefix("hybrid:") {
            let (head_ranks, sequence) = axes.split_once(':').ok_or_else(unknown)?;
            let head_ranks = head_ranks.parse().map_err(|_| unknown())?;
            let sequence = sequence.parse().map_err(|_| unknown())?;
            return Ok(Strategy::Hybrid { head_ranks, sequence });
        }
        let whole = [Strategy::Ulysses, Strategy::PaddedUlysses, Strategy::RingSelfAttention];
        let named = whole.into_iter().find(|strategy| strategy.to_string() == name);
        named.map_or_else(|| name.parse().map(Strategy::Sequence).map_err(|_: UnknownStrategy| unknown()), Ok)
    }
}

impl TryFrom<String> for Strategy {
    type Error = UnknownStrategy;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        name.parse()
    }
}

impl From<Strategy> for String {
    fn from(strategy: Strategy) -> Self {
        strategy.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_strategy_is_read_as_it_is_written() {
        for strategy in Strategy::all_for(8) {
            assert_eq!(strategy.to_string().parse(), Ok(strategy));
            assert_eq!(strategy.check(8), Ok(()));
        }
        for name in ["", "Ring", "hybrid", "hybrid:2", "hybrid:x:ring", "hybrid:2:ulysses", "double-ring:-1"] {
            assert_eq!(name.parse::<Strategy>(), Err(UnknownStrategy(name.to_string())));
        }
    }

    #[test]
    fn groups_that_do_not_divide_the_world_are_refused_by_number() {
        let refused = |name: &str, world| name.parse::<Strategy>().unwrap().check(world).unwrap_err().to_string();
        let expected = "strategy hybrid:4:ring needs groups of 4 ranks, which 6 ranks do not divide into";
        assert_eq!(refused("hybrid:4:ring", 6), expected);
        assert!(refused("double-ring:0", 4).contains("groups of 0"));
        assert!(refused("hybrid:2:double-ring:4", 12).contains("groups of 8"));
    }
}
