//! The loss of a language model over a sharded sequence.

use burn::module::Module;
use burn::tensor::{DType, Int, Tensor};
use burn_distflash::{Checkpointing, Join, SegmentError, Tiles, tiled_segment};
use serde::{Deserialize, Serialize};

/// A label that counts for nothing, as in PyTorch.
pub const IGNORED: i64 = -100;

/// What is added to the plain loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossOptions {
    /// This share of the label's weight is spread evenly over the vocabulary (Szegedy et al., arXiv 1512.00567).
    pub label_smoothing: f64,
    /// Times the square of the softmax denominator's logarithm, which keeps logits from drifting (PaLM, arXiv
    /// 2204.02311).
    pub z_loss: f64,
}

/// Sum over this rank's labels of `−log softmax(logits)[label]`, in nats; labels that are [`IGNORED`]
/// count 0. Divide by the number of labels that are not, *of all ranks*: a mean over each rank's own
/// would weigh tokens by where they lie, and a rank without labels would divide by 0.
///
/// # Shapes
/// - `logits`: `[batch, shard_len, vocab_size]`
/// - `labels`: `[batch, shard_len]`
#[must_use]
pub fn summed_cross_entropy(logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<1> {
    // Flattened rather than reshaped: to Burn's reshape a 0 means "as before", and a shard may be empty.
    summed_loss(logits.flatten(0, 1), labels.flatten(0, 1), LossOptions::default())
}

/// As [`summed_cross_entropy`], of `[tokens, vocab_size]` logits and `[tokens]` labels, with `options`. In f32 whatever
/// the logits' dtype.
#[must_use]
pub fn summed_loss(logits: Tensor<2>, labels: Tensor<1, Int>, options: LossOptions) -> Tensor<1> {
    let logits = if logits.dtype().size() < 4 { logits.cast(DType::F32) } else { logits };
    let ignored = labels.clone().equal_scalar(IGNORED);
    let picked = labels.mask_fill(ignored.clone(), 0).unsqueeze_dim::<2>(1);
    let highest = logits.clone().detach().max_dim(1);
    let lse = (logits.clone() - highest.clone()).exp().sum_dim(1).log() + highest;
    let LossOptions { label_smoothing, z_loss } = options;
    let mut wanted = logits.clone().gather(1, picked);
    if label_smoothing > 0. {
        wanted = wanted.mul_scalar(1. - label_smoothing) + logits.mean_dim(1).mul_scalar(label_smoothing);
    }
    let mut losses = lse.clone() - wanted;
    if z_loss > 0. {
        losses = losses + lse.square().mul_scalar(z_loss);
    }
    losses.squeeze_dim::<1>(1).mask_fill(ignored, 0.).sum()
}

/// The summed loss of a head over `x`, `[batch, shard_len, width]`, of which no more than `tile_len` tokens' logits ever
/// exist, forward or backward: backward computes them again. `project` gives the logits of `[tokens, width]`.
///
/// # Errors
/// If the head fails in backward; see [`tiled_segment`].
pub fn tiled_loss<M, E, F>(
    head: &M,
    x: Tensor<3>,
    labels: Tensor<2, Int>,
    options: LossOptions,
    tile_len: usize,
    project: F,
) -> Result<Tensor<1>, E>
where
    M: Module + Sync + 'static,
    E: From<SegmentError> + std::fmt::Display + 'static,
    F: Fn(&M, Tensor<2>) -> Result<Tensor<2>, E> + Send + Sync + 'static,
{
    let tiles = Tiles { dim: 0, len: tile_len, join: Join::Sum };
    let labels: Tensor<1, Int> = labels.flatten(0, 1);
    tiled_segment(head, x.flatten::<2>(0, 1), tiles, Checkpointing::Boundary, move |head, x, tile| {
        let labels = if tile == (0..labels.dims()[0]) { labels.clone() } else { labels.clone().slice_dim(0, tile) };
        Ok(summed_loss(project(head, x)?, labels, options))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    fn logits(device: &Device) -> Tensor<3> {
        Tensor::from_floats([[[0., 1., 2.], [3., 0., -1.], [0.5, 0.5, 0.5]]], device)
    }

    #[test]
    fn it_is_the_sum_of_negative_log_likelihoods() {
        let device = Device::flex();
        let labels = Tensor::<2, Int>::from_ints([[2, 1, IGNORED]], &device);
        let loss = summed_cross_entropy(logits(&device), labels).into_scalar::<f32>();
        let log_sum = |row: [f64; 3]| row.iter().map(|x| x.exp()).sum::<f64>().ln();
        let expected = log_sum([0., 1., 2.]) - 2. + log_sum([3., 0., -1.]);
        assert!((f64::from(loss) - expected).abs() < 1e-6, "{loss} {expected}");
    }

    #[test]
    fn a_rank_whose_labels_are_all_ignored_has_loss_zero_and_gradient_zero() {
        let device = Device::flex().autodiff();
        let logits = logits(&device).require_grad();
        let labels = Tensor::<2, Int>::from_ints([[IGNORED; 3]], &device);
        let loss = summed_cross_entropy(logits.clone(), labels);
        let grads = loss.backward();
        assert_eq!(loss.into_scalar::<f32>(), 0.);
        assert!(logits.grad(&grads).unwrap().into_data().iter::<f32>().all(|g| g == 0.));
    }

    #[test]
    fn a_rank_without_tokens_has_loss_zero() {
        let device = Device::flex();
        let (logits, labels) = (Tensor::zeros([2, 0, 5], &device), Tensor::<2, Int>::zeros([2, 0], &device));
        assert_eq!(summed_cross_entropy(logits, labels).into_scalar::<f32>(), 0.);
    }
}
