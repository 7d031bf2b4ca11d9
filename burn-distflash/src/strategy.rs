//! The named ways to shard attention.

use crate::layout::Layout;
use crate::mask::{Mask, MaskError};
use crate::schedule::{Schedule, ShardedMask};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Who owns which tokens, and who computes what: a layout and a schedule. All give the same result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
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
}

impl Strategy {
    /// All of them.
    pub const ALL: [Strategy; 4] = [Strategy::Ring, Strategy::Balanced, Strategy::Zigzag, Strategy::Striped];

    /// Its name, as on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Ring => "ring",
            Strategy::Balanced => "balanced",
            Strategy::Zigzag => "zigzag",
            Strategy::Striped => "striped",
        }
    }

    /// Who owns which tokens.
    ///
    /// # Panics
    /// If `world_size` is 0.
    #[must_use]
    pub fn layout(self, seq_len: usize, world_size: usize) -> Layout {
        assert!(world_size > 0, "a group has at least one rank");
        match self {
            Strategy::Ring | Strategy::Balanced => Layout::contiguous(seq_len, world_size),
            Strategy::Zigzag => Layout::zigzag(seq_len, world_size),
            Strategy::Striped => Layout::striped(seq_len, world_size),
        }
    }

    /// `mask` over its layout.
    ///
    /// # Errors
    /// If the mask does not fit the length.
    pub fn shard(self, mask: &Mask, seq_len: usize, world_size: usize) -> Result<ShardedMask, MaskError> {
        Ok(ShardedMask::new(self.layout(seq_len, world_size), &mask.intervals(seq_len, seq_len)?))
    }

    /// Who computes what.
    #[must_use]
    pub fn schedule(self, mask: &ShardedMask) -> Schedule {
        match self {
            Strategy::Ring | Strategy::Zigzag | Strategy::Striped => Schedule::ring(mask),
            Strategy::Balanced => Schedule::balanced(mask),
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown strategy `{0}`; expected ring, balanced, zigzag or striped")]
pub struct UnknownStrategy(String);

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|strategy| strategy.name() == name);
        named.ok_or_else(|| UnknownStrategy(name.to_string()))
    }
}
