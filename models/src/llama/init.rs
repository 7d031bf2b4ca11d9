//! Initial weights.

use super::config::LlamaConfig;
use burn::module::{Param, ParamId};
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::{Device, Tensor, TensorData};
use rand::SeedableRng;
use rand_distr::{Distribution, Normal};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Draws weights on the host, so that a seed gives the same model on every backend, and whatever else
/// the process draws: Burn's own seed is shared by all of its threads.
pub(super) struct Init<'a> {
    /// `None` for zeros.
    normal: Option<(Normal<f32>, Xoshiro256PlusPlus)>,
    device: &'a Device,
}

impl<'a> Init<'a> {
    pub fn new(config: &LlamaConfig, seed: u64, device: &'a Device) -> Self {
        let normal = Normal::new(0., config.initializer_range as f32).expect("a validated standard deviation");
        Self { normal: Some((normal, Xoshiro256PlusPlus::seed_from_u64(seed))), device }
    }

    pub fn zeros(device: &'a Device) -> Self {
        Self { normal: None, device }
    }

    fn matrix(&mut self, rows: usize, columns: usize) -> Param<Tensor<2>> {
        let Some((normal, source)) = &mut self.normal else {
            let zeros = move |device: &Device, is_tracked: bool| {
                Tensor::zeros([rows, columns], device).set_require_grad(is_tracked)
            };
            return Param::uninitialized(ParamId::new(), zeros, self.device.clone(), true, [rows, columns].into());
        };
        let draw = |_| normal.sample(source);
        let data = TensorData::new((0..rows * columns).map(draw).collect::<Vec<f32>>(), [rows, columns]);
        Param::from_tensor(Tensor::from_data(data, self.device))
    }

    pub fn linear(&mut self, inputs: usize, outputs: usize) -> Linear {
        Linear { weight: self.matrix(inputs, outputs), bias: None }
    }

    pub fn embedding(&mut self, count: usize, width: usize) -> Embedding {
        Embedding { weight: self.matrix(count, width) }
    }

    pub fn norm(&mut self, config: &LlamaConfig) -> RmsNorm {
        let gamma = Param::from_tensor(Tensor::ones([config.hidden_size], self.device));
        RmsNorm { gamma, epsilon: config.rms_norm_eps }
    }
}
