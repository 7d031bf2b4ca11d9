//! Cutting tensors and modules out of one autodiff graph and into another.

use super::op::{Flag, SegmentOps, Slot};
use super::tensors::{TensorMapper, Tensors};
use burn::backend::{Dispatch, DispatchTensor};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor};

/// Whether autodiff tracks `tensor`.
pub(crate) fn is_tracked<const D: usize>(tensor: &Tensor<D>) -> bool {
    let flag = Flag::default();
    drop(Dispatch::segment_probe(tensor.clone().into_dispatch(), flag.clone()));
    flag.is_set()
}

/// Tells which tensors of inputs, then of a module, are tracked, and takes a seed from the first that is.
#[derive(Default)]
pub(super) struct Tracked {
    pub flags: Vec<bool>,
    pub seed: Option<Tensor<1>>,
}

impl TensorMapper for Tracked {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let is_tracked = is_tracked(&tensor);
        if is_tracked && self.seed.is_none() {
            self.seed = Some(seed(&tensor));
        }
        self.flags.push(is_tracked);
        tensor
    }
}

impl ModuleVisitor for Tracked {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.map(param.val());
    }
}

/// Cuts tensors off their graph.
pub(super) struct Detach;

impl TensorMapper for Detach {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        // A leaf that is detached is still a leaf.
        tensor.detach().set_require_grad(false)
    }
}

impl ModuleMapper for Detach {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, self.map(tensor), mapper)
    }
}

/// Makes those that are tracked outside leaves of a graph of their own.
pub(super) struct Leaves<'a> {
    tracked: std::slice::Iter<'a, bool>,
}

impl<'a> Leaves<'a> {
    pub fn new(tracked: &'a [bool]) -> Self {
        Self { tracked: tracked.iter() }
    }
}

impl TensorMapper for Leaves<'_> {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        tensor.detach().set_require_grad(*self.tracked.next().expect("as many tensors as before"))
    }
}

impl ModuleMapper for Leaves<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, self.map(tensor), mapper)
    }
}

/// Takes the gradients of leaves; zeros for leaves that got none.
pub(super) struct Collect<'a> {
    grads: Option<&'a mut Gradients>,
    tracked: std::slice::Iter<'a, bool>,
    pub found: Vec<Option<DispatchTensor>>,
}

impl<'a> Collect<'a> {
    pub fn new(grads: Option<&'a mut Gradients>, tracked: &'a [bool]) -> Self {
        Self { grads, tracked: tracked.iter(), found: Vec::new() }
    }

    fn take<const D: usize>(&mut self, leaf: &Tensor<D>) {
        let is_tracked = *self.tracked.next().expect("as many tensors as before");
        self.found.push(is_tracked.then(|| {
            let grad = self.grads.as_deref_mut().and_then(|grads| leaf.grad_remove(grads));
            grad.unwrap_or_else(|| leaf.clone().inner().zeros_like()).into_dispatch()
        }));
    }
}

impl TensorMapper for Collect<'_> {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.take(&tensor);
        tensor
    }
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.take(&param.val());
    }
}

/// Hangs tensors on a chain of links, one slot each.
pub(crate) struct Chain {
    pub link: Tensor<1>,
    pub slots: Vec<Slot>,
}

impl Chain {
    pub fn new(seed: Tensor<1>) -> Self {
        Self { link: seed, slots: Vec::new() }
    }

    pub fn hang<const D: usize>(&mut self, tensor: Tensor<D>, slot: Slot) {
        let link = self.link.clone().into_dispatch();
        self.link = Tensor::from_dispatch(Dispatch::segment_link(tensor.into_dispatch(), link, slot));
    }
}

impl TensorMapper for Chain {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let slot = Slot::default();
        self.hang(tensor.clone(), slot.clone());
        self.slots.push(slot);
        tensor
    }
}

impl ModuleVisitor for Chain {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.map(param.val());
    }
}

/// Both: inputs, then the module's parameters.
pub(super) fn visit<M: Module, I: Tensors, V: TensorMapper + ModuleVisitor>(module: &M, inputs: &I, visitor: &mut V) {
    drop(inputs.clone().map_tensors(visitor));
    module.visit(visitor);
}

/// What runs along a chain, in the graph of `like`: all tensors of a graph share device and settings.
pub(crate) fn seed<const D: usize>(like: &Tensor<D>) -> Tensor<1> {
    joining(Tensor::zeros([1], (&like.device(), like.dtype())), like)
}

/// `tensor` as a constant in the graph of `like`, which is under autodiff.
pub(crate) fn joining<const D: usize, const E: usize>(tensor: Tensor<D>, like: &Tensor<E>) -> Tensor<D> {
    let strategy = like.gradient_checkpointing_strategy().expect("under autodiff");
    tensor.autodiff().with_gradient_checkpointing_strategy(strategy)
}

/// Makes values outputs of a hub.
pub(crate) struct Outputs {
    hub: Tensor<1>,
    slots: std::vec::IntoIter<Slot>,
}

impl Outputs {
    /// With a slot for the gradient of each.
    pub fn new(hub: Tensor<1>, slots: Vec<Slot>) -> Self {
        Self { hub, slots: slots.into_iter() }
    }
}

impl TensorMapper for Outputs {
    fn map<const D: usize>(&mut self, value: Tensor<D>) -> Tensor<D> {
        let slot = self.slots.next().expect("a slot for each output");
        Tensor::from_dispatch(Dispatch::segment_output(value.into_dispatch(), self.hub.clone().into_dispatch(), slot))
    }
}

impl ModuleMapper for Outputs {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(id, self.map(value), mapper)
    }
}
