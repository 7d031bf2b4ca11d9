//! Gradients of parameters, summed over ranks.

use crate::comm::{CommError, Communicator};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Gradients, Tensor, TensorData};

/// The sum over all ranks of a module's gradients: the same bits on every rank.
#[derive(Clone, Debug)]
pub struct SummedGradients {
    /// All gradients in one row, in the order the module's parameters are visited.
    row: Tensor<1>,
}

/// Sums `module`'s gradients over all ranks of `comm`, in one reduction. A parameter that got no
/// gradient on some rank counts as zeros there.
///
/// If each rank's loss is a sum over its own tokens divided by the number of tokens of *all* ranks, the
/// result is the gradient of the mean loss, whatever the number of ranks.
///
/// # Errors
/// See [`CommError`].
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_distflash::comm::local;
/// use burn_distflash::{CommError, sum_gradients};
/// use std::time::Duration;
///
/// let model = LinearConfig::new(4, 2).init(&Device::flex());
/// local::run(2, Duration::from_secs(10), move |comm| {
///     let device = Device::flex().autodiff();
///     let model = model.clone().fork(&device).train();
///     let grads = model.forward(Tensor::<2>::ones([3, 4], &device)).sum().backward();
///     let grads = sum_gradients(&model, grads, &*comm)?;
///     let clipped = grads.clip(1.);
///     AdamWConfig::new().init().step(1e-3, model.clone(), clipped.into_params(&model));
///     Ok::<_, CommError>(())
/// })?;
/// # use burn::module::Module;
/// # Ok::<(), local::RunError>(())
/// ```
pub fn sum_gradients<M: Module>(
    module: &M,
    mut grads: Gradients,
    comm: &dyn Communicator,
) -> Result<SummedGradients, CommError> {
    Ok(SummedGradients { row: comm.all_reduce(flat_gradients(module, &mut grads))? })
}

/// All gradients of a module's parameters in one row, in the order they are visited; zeros where there is none.
pub(crate) fn flat_gradients<M: Module>(module: &M, grads: &mut Gradients) -> Tensor<1> {
    let mut flatten = Flatten { grads, rows: Vec::new() };
    module.visit(&mut flatten);
    Tensor::cat(flatten.rows, 0)
}

impl SummedGradients {
    /// Euclidean norm over all parameters.
    #[must_use]
    pub fn norm(&self) -> f64 {
        square_sum(self.row.clone()).sqrt()
    }

    /// Scaled down to a norm of at most `max_norm`; unchanged if it is not above it.
    #[must_use]
    pub fn clip(self, max_norm: f64) -> Self {
        let norm = self.norm();
        if norm > max_norm { Self { row: self.row.mul_scalar(max_norm / norm) } } else { self }
    }

    /// As an optimizer takes them.
    ///
    /// # Panics
    /// If `module` does not have the parameters of the module the gradients are of.
    #[must_use]
    pub fn into_params<M: Module>(self, module: &M) -> GradientsParams {
        let mut restore = Restore { row: self.row, at: 0, grads: GradientsParams::new() };
        module.visit(&mut restore);
        restore.grads
    }
}

/// The sum of all squares: of blocks of about √len on the device, of the blocks in f64 on the host. One running sum of a
/// million squares in f32 is off by a thousandth (Flex), and would clip differently from sums of parts.
pub(crate) fn square_sum(row: Tensor<1>) -> f64 {
    let [len] = row.dims();
    let block = len.isqrt().max(1);
    let even = len / block * block;
    let squares = row.square();
    let sum = |sums: TensorData| sums.iter::<f64>().sum::<f64>();
    let mut total = 0.;
    if even > 0 {
        let blocks = squares.clone().slice_dim(0, 0..even).reshape([even / block, block]);
        total += sum(blocks.sum_dim(1).into_data());
    }
    if even < len {
        total += sum(squares.slice_dim(0, even..len).sum().into_data());
    }
    total
}

struct Flatten<'a> {
    grads: &'a mut Gradients,
    rows: Vec<Tensor<1>>,
}

impl ModuleVisitor for Flatten<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let grad = value.grad_remove(self.grads).unwrap_or_else(|| value.inner().zeros_like());
        self.rows.push(grad.flatten(0, D - 1));
    }
}

struct Restore {
    row: Tensor<1>,
    at: usize,
    grads: GradientsParams,
}

impl ModuleVisitor for Restore {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.val().shape();
        let end = self.at + shape.num_elements();
        let grad = self.row.clone().slice_dim(0, self.at..end).reshape(shape);
        self.grads.register::<D>(param.id, grad);
        self.at = end;
    }
}
