//! From the residual stream to the loss.

use super::block::normed;
use super::execution::Execution;
use crate::loss::tiled_loss;
use burn::module::Module;
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::{Int, Tensor};
use burn_distflash::{AttentionError, linear};

/// The final norm, and what gives logits: one of the two.
#[derive(Module, Debug)]
pub struct Head {
    pub(super) norm: RmsNorm,
    pub(super) lm_head: Option<Linear>,
    pub(super) embedding: Option<Embedding>,
}

impl Head {
    /// Logits of `x`, `[…, hidden_size]`.
    ///
    /// # Panics
    /// If it has neither head nor embedding.
    #[must_use]
    pub fn logits<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let x = normed(&self.norm, x);
        match (&self.lm_head, &self.embedding) {
            (Some(head), _) => linear(x, head.weight.val()),
            (None, Some(embedding)) => x.matmul(embedding.weight.val().transpose().unsqueeze()),
            (None, None) => panic!("a head or an embedding to give logits"),
        }
    }

    /// The loss of this rank's tokens, summed; see [`tiled_loss`].
    ///
    /// # Errors
    /// If it fails in backward.
    pub fn loss(
        &self,
        x: Tensor<3>,
        labels: Tensor<2, Int>,
        execution: &Execution,
    ) -> Result<Tensor<1>, AttentionError> {
        let tile_len = execution.loss_tile;
        tiled_loss(self, x, labels, execution.loss, tile_len, |head: &Self, x| Ok(head.logits(x)))
    }
}
