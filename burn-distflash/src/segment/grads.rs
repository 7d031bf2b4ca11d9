//! Gradients on their way into a replay and out of it.

use super::leaves::{Chain, seed};
use super::op::Slot;
use super::tensors::TensorMapper;
use super::tiles::{Join, Slice, Tiles, concatenated};
use burn::backend::DispatchTensor;
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};
use std::ops::Range;

/// Hangs outputs that have a gradient on a chain, which is the nested backward's root.
pub(super) struct Root {
    pub chain: Option<Chain>,
    pub tiles: Option<Tiles>,
    pub range: Range<usize>,
    pub grads: std::vec::IntoIter<Option<DispatchTensor>>,
}

impl TensorMapper for Root {
    fn map<const D: usize>(&mut self, output: Tensor<D>) -> Tensor<D> {
        let Some(grad) = self.grads.next().expect("a gradient, or none, for each output") else { return output };
        let grad = Tensor::<D>::from_dispatch(grad);
        let grad = match self.tiles {
            Some(Tiles { dim, join: Join::Cat, .. }) => Slice { dim, range: self.range.clone() }.map(grad),
            _ => grad,
        };
        let slot = Slot::default();
        slot.put(grad.into_dispatch());
        self.chain.get_or_insert_with(|| Chain::new(seed(&output))).hang(output.clone(), slot);
        output
    }
}

/// Adds gradients of parameters to sums.
pub(super) struct Add<'a> {
    pub sums: &'a mut [Option<DispatchTensor>],
    pub found: std::vec::IntoIter<Option<DispatchTensor>>,
    pub at: usize,
    /// In f32, whatever the parameters' dtype.
    pub is_wide: bool,
}

impl ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        let at = self.at;
        self.at += 1;
        let Some(grad) = self.found.next().expect("one for each parameter") else { return };
        let grad = Tensor::<D>::from_dispatch(grad);
        let grad = if self.is_wide && grad.dtype().size() < 4 { grad.cast(DType::F32) } else { grad };
        let sum = match self.sums[at].take() {
            Some(sum) => Tensor::<D>::from_dispatch(sum) + grad,
            None => grad,
        };
        self.sums[at] = Some(sum.into_dispatch());
    }
}

/// Puts the gradients of all tiles one behind the other.
pub(super) struct JoinGrads {
    pub grads: std::vec::IntoIter<Vec<DispatchTensor>>,
    pub dim: usize,
    pub all: Vec<Option<DispatchTensor>>,
}

impl TensorMapper for JoinGrads {
    fn map<const D: usize>(&mut self, input: Tensor<D>) -> Tensor<D> {
        let grads = self.grads.next().expect("gradients, or none, for each input");
        let grads: Vec<Tensor<D>> = grads.into_iter().map(Tensor::from_dispatch).collect();
        self.all.push((!grads.is_empty()).then(|| concatenated(grads, self.dim).into_dispatch()));
        input
    }
}

/// Brings gradients back to the parameters' dtype.
pub(super) struct Narrow {
    pub grads: std::vec::IntoIter<Option<DispatchTensor>>,
    pub all: Vec<Option<DispatchTensor>>,
}

impl ModuleVisitor for Narrow {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = self.grads.next().expect("one for each parameter");
        let dtype = param.val().dtype();
        self.all.push(grad.map(|grad| Tensor::<D>::from_dispatch(grad).cast(dtype).into_dispatch()));
    }
}

/// NaN for all that is tracked.
pub(super) struct Nan<'a> {
    pub tracked: std::slice::Iter<'a, bool>,
    pub grads: Vec<Option<DispatchTensor>>,
}

impl TensorMapper for Nan<'_> {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let is_tracked = *self.tracked.next().expect("as many tensors as before");
        self.grads.push(is_tracked.then(|| tensor.clone().inner().mul_scalar(f64::NAN).into_dispatch()));
        tensor
    }
}

impl ModuleVisitor for Nan<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.map(param.val());
    }
}
