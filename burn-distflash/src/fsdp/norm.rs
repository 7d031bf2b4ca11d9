//! Gradients of parameters that are spread over ranks.

use crate::comm::{CommError, Communicator};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

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
    let mut squares = Squares { grads: &grads, sum: None };
    module.visit(&mut squares);
    let Some(own) = squares.sum else { return Ok((grads, 0.)) };
    let norm = comm.all_reduce(own)?.into_scalar::<f64>().sqrt();
    if norm <= max_norm {
        return Ok((grads, norm));
    }
    let mut scale = Scale { grads, by: max_norm / norm };
    drop(module.clone().map(&mut scale));
    Ok((scale.grads, norm))
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    sum: Option<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            let square = grad.square().sum();
            self.sum = Some(match self.sum.take() {
                Some(sum) => sum + square,
                None => square,
            });
        }
    }
}

struct Scale {
    grads: GradientsParams,
    by: f64,
}

impl ModuleMapper for Scale {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register::<D>(param.id, grad.mul_scalar(self.by));
        }
        param
    }
}
