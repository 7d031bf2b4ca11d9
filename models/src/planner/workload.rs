//! What is to be trained, and under which settings.

use crate::llama::LlamaConfig;
use burn_distflash::{Checkpointing, Mask, MaskError, Sharding};

/// Which tokens see which, in words that scale with the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskKind {
    /// Causal.
    Causal,
    /// Everything.
    Full,
    /// Causal, at most so many keys.
    Window(usize),
    /// Causal, in packed documents of so many tokens each.
    Documents(usize),
}

impl MaskKind {
    /// The mask over `len` tokens.
    ///
    /// # Errors
    /// If there is no such mask.
    pub fn build(self, len: usize) -> Result<Mask, MaskError> {
        match self {
            MaskKind::Causal => Ok(Mask::causal()),
            MaskKind::Full => Ok(Mask::full()),
            MaskKind::Window(keys) => Mask::causal().with_window(keys, 0),
            MaskKind::Documents(each) => {
                let cuts: Vec<usize> = (0..len).step_by(each.max(1)).chain([len]).collect();
                Mask::causal().with_documents(&cuts)
            }
        }
    }

    /// The shortest length that matters to it.
    pub(super) fn detail(self) -> Option<usize> {
        match self {
            MaskKind::Causal | MaskKind::Full => None,
            MaskKind::Window(len) | MaskKind::Documents(len) => Some(len),
        }
    }

    /// Keys that a token sees in the mean, of `len`.
    pub(super) fn mean_keys(self, len: f64) -> f64 {
        match self {
            MaskKind::Causal => len / 2.,
            MaskKind::Full => len,
            MaskKind::Window(keys) => {
                let keys = (keys as f64).min(len);
                keys - keys * keys / (2. * len)
            }
            MaskKind::Documents(each) => (each as f64).min(len) / 2.,
        }
    }
}

/// A training step to be estimated.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// The model.
    pub model: LlamaConfig,
    /// Tokens of the sequence, over all ranks.
    pub seq_len: usize,
    /// Who sees whom.
    pub mask: MaskKind,
    /// What is kept for backward.
    pub checkpointing: Checkpointing,
    /// Where the state is.
    pub sharding: Sharding,
    /// Whether transfers are posted ahead.
    pub overlap: bool,
}
