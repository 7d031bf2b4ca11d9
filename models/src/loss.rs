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

    /// In f64, by the formula.
    fn oracle(logits: &[Vec<f64>], labels: &[i64], options: LossOptions) -> f64 {
        let of = |(row, &label): (&Vec<f64>, &i64)| {
            if label == IGNORED {
                return 0.;
            }
            let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
            let LossOptions { label_smoothing, z_loss } = options;
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            lse - (1. - label_smoothing) * row[label as usize] - label_smoothing * mean + z_loss * lse * lse
        };
        logits.iter().zip(labels).map(of).sum()
    }

    const WIDTH: usize = 6;
    const VOCAB: usize = 11;

    /// The loss and the gradients of `x` and the head's weight.
    fn run(len: usize, tile_len: Option<usize>, options: LossOptions) -> (f64, Vec<f64>, Vec<f64>, f64) {
        let device = Device::flex().autodiff();
        let drawn = |seed: usize, count: usize| -> Vec<f64> {
            (0..count).map(|i| ((i * 37 + seed * 101) % 64) as f64 / 32. - 1.).collect()
        };
        let tensor = |values: Vec<f64>, shape: Vec<usize>| burn::tensor::TensorData::new(values, shape);
        let weight = drawn(1, WIDTH * VOCAB);
        let head = burn::nn::Linear {
            weight: burn::module::Param::from_tensor(Tensor::from_data(
                tensor(weight.clone(), vec![WIDTH, VOCAB]),
                (&device, DType::F64),
            )),
            bias: None,
        };
        let values = drawn(2, 2 * len * WIDTH);
        let x =
            Tensor::<3>::from_data(tensor(values.clone(), vec![2, len, WIDTH]), (&device, DType::F64)).require_grad();
        let labels: Vec<i64> =
            (0..2 * len).map(|i| if i % 5 == 3 { IGNORED } else { (i * 7 % VOCAB) as i64 }).collect();
        let label_tensor =
            Tensor::<2, Int>::from_data(burn::tensor::TensorData::new(labels.clone(), [2, len]), &device);
        let loss = match tile_len {
            Some(tile_len) => {
                tiled_loss(&head, x.clone(), label_tensor, options, tile_len, |head: &burn::nn::Linear, x| {
                    Ok::<_, SegmentError>(head.forward(x))
                })
                .unwrap()
            }
            None => summed_loss(head.forward(x.clone()).flatten(0, 1), label_tensor.flatten(0, 1), options),
        };
        let grads = loss.backward();
        let read = |grad: Option<Vec<f64>>| grad.unwrap_or_default();
        let of_x = read(x.grad(&grads).map(|g| g.into_data().iter().collect()));
        let of_weight = read(head.weight.val().grad(&grads).map(|g| g.into_data().iter().collect()));
        let row = |token: usize| -> Vec<f64> {
            let x = &values[token * WIDTH..][..WIDTH];
            (0..VOCAB).map(|v| (0..WIDTH).map(|i| x[i] * weight[i * VOCAB + v]).sum()).collect()
        };
        let truth = oracle(&(0..2 * len).map(row).collect::<Vec<_>>(), &labels, options);
        (loss.into_scalar::<f64>(), of_x, of_weight, truth)
    }

    #[test]
    fn smoothing_and_z_loss_are_their_formulas_in_any_tiles() {
        for options in [
            LossOptions::default(),
            LossOptions { label_smoothing: 0.1, ..LossOptions::default() },
            LossOptions { label_smoothing: 0.3, z_loss: 0.01 },
        ] {
            for len in [0, 1, 4, 17] {
                let (whole, whole_x, whole_weight, truth) = run(len, None, options);
                assert!((whole - truth).abs() < 1e-12 * (1. + truth.abs()), "{whole} {truth}");
                for tile_len in [1, 3, 8, 1000] {
                    let (tiled, of_x, of_weight, _) = run(len, Some(tile_len), options);
                    assert!((tiled - truth).abs() < 1e-12 * (1. + truth.abs()), "{tiled} {truth}");
                    for (ours, plain) in of_x.iter().zip(&whole_x).chain(of_weight.iter().zip(&whole_weight)) {
                        assert!((ours - plain).abs() < 1e-12, "{len} in tiles of {tile_len}: {ours} {plain}");
                    }
                    assert_eq!((of_x.len(), of_weight.len()), (2 * len * WIDTH, WIDTH * VOCAB));
                }
            }
        }
    }

    /// A derivative by hand: the tests above would agree on a wrong gradient.
    #[test]
    fn gradients_are_differences_of_the_loss() {
        let options = LossOptions { label_smoothing: 0.2, z_loss: 0.05 };
        let device = Device::flex().autodiff();
        let at = |first: f64| {
            let row = vec![first, -0.3, 0.9];
            let data = burn::tensor::TensorData::new(row, [1, 3]);
            let logits = Tensor::<2>::from_data(data, (&device, DType::F64)).require_grad();
            let loss = summed_loss(logits.clone(), Tensor::from_ints([2], &device), options);
            let grad = logits.grad(&loss.backward()).unwrap().into_data().iter::<f64>().next().unwrap();
            (loss.into_scalar::<f64>(), grad)
        };
        let step = 1e-5;
        let difference = (at(0.4 + step).0 - at(0.4 - step).0) / (2. * step);
        assert!((difference - at(0.4).1).abs() < 1e-9, "{difference} {}", at(0.4).1);
    }
}
