//! How a whole model is shared among ranks.

use burn_distflash::{Sequence, Strategy, StrategyError, UnknownStrategy};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How a whole model is shared among ranks. Written and read by name: `balanced`, `hybrid:4:zigzag`, `megatron-lm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Method {
    /// The sequence, by a strategy of burn-distflash: every rank has all weights' work for its tokens.
    Context(Strategy),
    /// Heads and MLP over all ranks, norms and residuals over the sequence, heads of zeros added until the ranks
    /// divide them (Korthikanti et al., *Reducing Activation Recomputation*, arXiv 2205.05198): a baseline.
    MegatronLm,
}

impl Method {
    /// The strategy that says who owns which tokens: Megatron-LM's are contiguous.
    #[must_use]
    pub fn strategy(self) -> Strategy {
        match self {
            Method::Context(strategy) => strategy,
            Method::MegatronLm => Sequence::Ring.into(),
        }
    }

    /// Whether it can run on `world_size` ranks.
    ///
    /// # Errors
    /// If its groups of ranks do not divide the world.
    pub fn check(self, world_size: usize) -> Result<(), StrategyError> {
        self.strategy().check(world_size)
    }
}

impl From<Strategy> for Method {
    fn from(strategy: Strategy) -> Self {
        Method::Context(strategy)
    }
}

impl From<Sequence> for Method {
    fn from(sequence: Sequence) -> Self {
        Method::Context(sequence.into())
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::Context(strategy) => strategy.fmt(f),
            Method::MegatronLm => f.pad("megatron-lm"),
        }
    }
}

/// A name that is no method.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}, or megatron-lm")]
pub struct UnknownMethod(UnknownStrategy);

impl FromStr for Method {
    type Err = UnknownMethod;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        if name == "megatron-lm" {
            return Ok(Method::MegatronLm);
        }
        name.parse().map(Method::Context).map_err(UnknownMethod)
    }
}

impl TryFrom<String> for Method {
    type Error = UnknownMethod;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        name.parse()
    }
}

impl From<Method> for String {
    fn from(method: Method) -> Self {
        method.to_string()
    }
}
