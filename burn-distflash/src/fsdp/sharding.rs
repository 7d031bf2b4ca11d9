//! What is spread over ranks.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What of a model's state is spread over ranks, and not on each of them (ZeRO, arXiv 1910.02054).
///
/// | | whole on every rank | ZeRO |
/// |---|---|---|
/// | `None` | parameters, gradients, optimizer state | |
/// | `Optimizer` | parameters during a step, gradients | 1 |
/// | `Gradients` | parameters during a step | 2 |
/// | `Full` | nothing; a layer's parameters while it is computed | 3 |
///
/// Parameters that an optimizer updates, its state, and sums of gradients are f32 under all four.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharding {
    /// Nothing.
    None,
    /// Parameters that are updated, and the optimizer's state.
    Optimizer,
    /// Sums of gradients as well: each layer's as soon as its backward is done.
    Gradients,
    /// Parameters as well, between uses.
    Full,
}

impl Sharding {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::None, Self::Optimizer, Self::Gradients, Self::Full];
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Optimizer => "optimizer",
            Self::Gradients => "gradients",
            Self::Full => "full",
        })
    }
}

/// A name that is no way of sharding.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown sharding `{0}`; expected none, optimizer, gradients or full")]
pub struct UnknownSharding(String);

impl FromStr for Sharding {
    type Err = UnknownSharding;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|sharding| sharding.to_string() == name);
        named.ok_or_else(|| UnknownSharding(name.to_string()))
    }
}
