//! The attentions compared.

use crate::{Inputs, Pass};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Tensor};
use burn_distflash::{AttentionOptions, flash_attention};
use std::fmt;

/// Whose attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// [`flash_attention`]: tiled, forward and backward.
    Ours,
    /// [`attention`]: the backend's own kernel without autodiff, the whole score matrix with it.
    Burn,
}

impl Subject {
    /// Both.
    pub const ALL: [Subject; 2] = [Subject::Ours, Subject::Burn];

    fn attend(self, query: Tensor<4>, key: Tensor<4>, value: Tensor<4>) -> Tensor<4> {
        match self {
            Subject::Ours => {
                flash_attention(query, key, value, &AttentionOptions::default()).expect("operands of one shape").0
            }
            Subject::Burn => {
                let causal = AttentionModuleOptions { is_causal: true, ..AttentionModuleOptions::default() };
                attention(query, key, value, None, None, causal)
            }
        }
    }

    /// What `pass` gives: the output alone, or the output and the gradients of query, key and value.
    ///
    /// # Panics
    /// If `inputs` are not tracked where gradients are asked for.
    #[must_use]
    pub fn run(self, pass: Pass, inputs: &[Tensor<4>; 4]) -> Vec<Tensor<4>> {
        let [query, key, value, d_out] = inputs.clone();
        let out = self.attend(query, key, value);
        match pass {
            Pass::Forward => vec![out],
            Pass::ForwardBackward => {
                let grads = (out.clone() * d_out).sum().backward();
                let grad = |operand: &Tensor<4>| operand.grad(&grads).expect("operands are tracked");
                let [query, key, value, _] = inputs;
                vec![out.inner(), grad(query), grad(key), grad(value)]
            }
        }
    }

    /// `inputs` where `pass` needs them.
    #[must_use]
    pub fn tensors(pass: Pass, inputs: &Inputs) -> [Tensor<4>; 4] {
        inputs.tensors(&match pass {
            Pass::Forward => Device::flex(),
            Pass::ForwardBackward => Device::flex().autodiff(),
        })
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Subject::Ours => "distflash",
            Subject::Burn => "burn",
        })
    }
}
