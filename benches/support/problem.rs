//! What is computed.

use burn::tensor::{Device, Tensor, TensorData};
use distflash_tests::Draw;
use std::fmt;

/// Causal self-attention of one sequence in f32, as many key/value heads as query heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Heads.
    pub heads: usize,
    /// Tokens.
    pub seq_len: usize,
    /// Elements of one head's vector.
    pub head_dim: usize,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The output, without autodiff.
    Forward,
    /// The output and the gradients of query, key and value.
    ForwardBackward,
}

impl Pass {
    /// Both.
    pub const ALL: [Pass; 2] = [Pass::Forward, Pass::ForwardBackward];
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Pass::Forward => "forward",
            Pass::ForwardBackward => "forward+backward",
        })
    }
}

/// Operands, and a gradient of the output.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Query, key, value and the gradient of the output, dense `[1, heads, seq_len, head_dim]`.
    pub values: [Vec<f32>; 4],
    shape: [usize; 4],
}

impl Problem {
    /// Unmasked floating-point operations: two products of `head_dim` multiplications and additions per
    /// visible (query, key) pair forward, of which a causal mask leaves half, and five more backward.
    #[must_use]
    pub fn flops(&self, pass: Pass) -> f64 {
        let forward = 4. * self.heads as f64 * (self.seq_len as f64).powi(2) * self.head_dim as f64 / 2.;
        match pass {
            Pass::Forward => forward,
            Pass::ForwardBackward => 3.5 * forward,
        }
    }

    /// The same inputs for the same sizes, whatever the backend.
    #[must_use]
    pub fn inputs(&self) -> Inputs {
        let shape = [1, self.heads, self.seq_len, self.head_dim];
        let mut draw = Draw::new(self.seq_len as u64);
        Inputs { values: std::array::from_fn(|_| draw.uniform(shape.iter().product(), 2.)), shape }
    }
}

impl Inputs {
    /// Query, key, value and the gradient of the output on `device`; the first three tracked if it is an
    /// autodiff device.
    #[must_use]
    pub fn tensors(&self, device: &Device) -> [Tensor<4>; 4] {
        let tensor = |values: &Vec<f32>| Tensor::<4>::from_data(TensorData::new(values.clone(), self.shape), device);
        let [query, key, value, d_out] = self.values.each_ref().map(tensor);
        if !device.is_autodiff() {
            return [query, key, value, d_out];
        }
        [query.require_grad(), key.require_grad(), value.require_grad(), d_out]
    }
}
