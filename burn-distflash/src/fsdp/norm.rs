//! Gradients of parameters that are spread over ranks.

use crate::comm::{CommError, Communicator};
use crate::gradients::square_sum;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

/// Scales gradients of parts down so that their norm *over all ranks* is at most `max_norm`, and returns what it was: the
/// norm of the whole module's gradient.
///
/// # Errors
/// See [`CommError`].
pub fn clip_shards<M: Module>(
    module: &M,
    grads: GradientsParams,
    max_norm: f64,
    comm: &dyn Communicator,
) -> Result<(GradientsParams, f64), CommError> {
    let mut squares = Squares { grads: &grads, sum: 0., device: None };
    module.visit(&mut squares);
    let Some(device) = squares.device else { return Ok((grads, 0.)) };
    let own = Tensor::from_data([squares.sum as f32], &device);
    let norm = comm.all_reduce(own)?.into_scalar::<f64>().sqrt();
    if norm <= max_norm {
        return Ok((grads, norm));
    }
    Ok((scale_gradients(module, grads, max_norm / norm), norm))
}

/// All gradients there are of a module's parameters, times `factor`.
#[must_use]
pub fn scale_gradients<M: Module>(module: &M, grads: GradientsParams, factor: f64) -> GradientsParams {
    let mut scale = Scale { grads, factor };
    module.visit(&mut scale);
    scale.grads
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    sum: f64,
    /// Of the gradients there are.
    device: Option<Device>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.device = Some(grad.device());
            self.sum += square_sum(grad.flatten(0, D - 1));
        }
    }
}

struct Scale {
    grads: GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register::<D>(param.id, grad.mul_scalar(self.factor));
        }
    }
}
