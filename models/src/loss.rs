//! The loss of a language model over a sharded sequence.

use burn::tensor::{Int, Tensor, activation::log_softmax};

/// A label that counts for nothing, as in PyTorch.
pub const IGNORED: i64 = -100;

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
    let labels = labels.flatten::<1>(0, 1);
    let ignored = labels.clone().equal_scalar(IGNORED);
    let picked = labels.mask_fill(ignored.clone(), 0).unsqueeze_dim::<2>(1);
    let log_probabilities = log_softmax(logits.flatten::<2>(0, 1), 1);
    log_probabilities.gather(1, picked).squeeze_dim::<1>(1).mask_fill(ignored, 0.).sum().neg()
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
