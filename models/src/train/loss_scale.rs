//! Keeping f16 gradients from vanishing.

use serde::{Deserialize, Serialize};

/// What the loss is multiplied by before backward, and gradients are divided by in f32: as large as f16 allows
/// (Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740, §3.2).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    factor: f64,
    /// Steps since it last changed.
    steady: u32,
}

/// Steps without overflow after which a larger factor is tried, PyTorch's default.
const PATIENCE: u32 = 2000;

impl Default for LossScale {
    fn default() -> Self {
        Self { factor: 65_536., steady: 0 }
    }
}

impl LossScale {
    /// The factor of the next step, a power of two.
    #[must_use]
    pub fn factor(self) -> f64 {
        self.factor
    }

    /// What it is after a step whose gradients were finite, or were not.
    #[must_use]
    pub fn after(self, is_finite: bool) -> Self {
        match (is_finite, self.steady + 1) {
            (false, _) => Self { factor: self.factor / 2., steady: 0 },
            (true, PATIENCE) => Self { factor: self.factor * 2., steady: 0 },
            (true, steady) => Self { steady, ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_at_once_and_doubles_with_patience() {
        let first = LossScale::default();
        assert_eq!(first.after(false).factor(), first.factor() / 2.);
        let steady = (1..PATIENCE).fold(first, |scale, _| scale.after(true));
        assert_eq!(steady.factor(), first.factor());
        assert_eq!(steady.after(true).factor(), 2. * first.factor());
        assert_eq!(steady.after(false).after(true).factor(), first.factor() / 2., "patience begins anew");
    }
}
