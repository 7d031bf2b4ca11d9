//! The steps of autodiff that a segment is made of.
//!
//! Burn's steps have one output and a number of inputs fixed at compile time; a segment has any number of both. So it
//! is a chain: one link for each input and parameter, the hub, and one step for each output.
//!
//! ```text
//! input 0 ─ link ─ link ─ … ─ hub ─ output 0
//!                   │          └─── output 1
//!               input 1
//! ```
//!
//! Backward, outputs leave their gradients in slots, the hub replays the segment and fills the slots of the inputs,
//! and the links hand those on. What runs along the chain itself is a tensor of one element that nobody reads.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, BackendTensor, DispatchKindConversion, DispatchTensor, Flex, backend_extension,
};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A place for one gradient.
#[derive(Clone, Debug, Default)]
pub struct Slot(Arc<Mutex<Option<DispatchTensor>>>);

impl Slot {
    pub(crate) fn put(&self, tensor: DispatchTensor) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(tensor);
    }

    pub(crate) fn take(&self) -> Option<DispatchTensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Whether a tensor turned out to be tracked.
#[derive(Clone, Debug, Default)]
pub struct Flag(Arc<AtomicBool>);

impl Flag {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Runs a segment again and fills the slots of its inputs.
#[derive(Clone)]
pub struct Replay(pub(crate) Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Replay")
    }
}

/// The steps of a segment; see [`segment`](crate::segment()).
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff, Fusion: cfg(feature = "fusion"))]
pub trait SegmentOps: Backend {
    /// `tensor`; sets `flag` if autodiff tracks it.
    #[fusion(default)]
    fn segment_probe(tensor: FloatTensor<Self>, flag: Flag) -> FloatTensor<Self> {
        drop(flag);
        tensor
    }

    /// `link`, which from here on depends on `tensor` too; the gradient of `tensor` is what is in `slot` by then.
    #[fusion(default)]
    fn segment_link(tensor: FloatTensor<Self>, link: FloatTensor<Self>, slot: Slot) -> FloatTensor<Self> {
        drop((tensor, slot));
        link
    }

    /// `link`; backward calls `replay`.
    #[fusion(default)]
    fn segment_hub(link: FloatTensor<Self>, replay: Replay) -> FloatTensor<Self> {
        drop(replay);
        link
    }

    /// `value` as an output of `hub`; backward puts its gradient into `slot`.
    #[fusion(default)]
    fn segment_output(value: FloatTensor<Self>, hub: FloatTensor<Self>, slot: Slot) -> FloatTensor<Self> {
        drop((hub, slot));
        value
    }
}

impl SegmentOps for Flex {}

#[cfg(feature = "cube")]
impl SegmentOps for burn_cubecl::CubeBackend {}

#[derive(Debug)]
struct Probe;

impl<B: Backend> Backward<B, 1> for Probe {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
        unreachable!("a probe is never finished")
    }
}

#[derive(Debug)]
struct Link;

impl<B: Backend> Backward<B, 2> for Link
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Slot;

    fn backward(self, ops: Ops<Slot, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let passed = grads.consume::<B>(&ops.node);
        let [tensor, link] = ops.parents;
        if let Some(node) = tensor {
            let grad = ops.state.take().expect("the hub fills the slots of all that is tracked");
            let grad = <DispatchTensor as DispatchKindConversion<B>>::try_into_backend(grad);
            grads.register::<B>(node.id, grad.expect("a gradient of the tensor's own backend").float());
        }
        if let Some(node) = link {
            grads.register::<B>(node.id, passed);
        }
    }
}

#[derive(Debug)]
struct Hub;

impl<B: Backend> Backward<B, 1> for Hub {
    type State = Replay;

    fn backward(self, ops: Ops<Replay, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let passed = grads.consume::<B>(&ops.node);
        (ops.state.0)();
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, passed);
        }
    }
}

#[derive(Debug)]
struct Output;

impl<B: Backend> Backward<B, 1> for Output
where
    DispatchTensor: DispatchKindConversion<B>,
{
    /// And what to pass to the hub.
    type State = (Slot, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (slot, passed) = ops.state;
        slot.put(<DispatchTensor as DispatchKindConversion<B>>::from_backend(BackendTensor::Float(grad)));
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, passed);
        }
    }
}

impl<B: SegmentOps, C: CheckpointStrategy> SegmentOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn segment_probe(tensor: FloatTensor<Self>, flag: Flag) -> FloatTensor<Self> {
        if let OpsKind::Tracked(_) = Backward::<B, 1>::prepare::<C>(Probe, [tensor.node()]).compute_bound().stateful() {
            flag.0.store(true, Ordering::Relaxed);
        }
        tensor
    }

    fn segment_link(tensor: FloatTensor<Self>, link: FloatTensor<Self>, slot: Slot) -> FloatTensor<Self> {
        let passed = link.primitive().clone();
        match Link.prepare::<C>([tensor.node(), link.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(slot, passed),
            OpsKind::UnTracked(prepared) => prepared.finish(passed),
        }
    }

    fn segment_hub(link: FloatTensor<Self>, replay: Replay) -> FloatTensor<Self> {
        let passed = link.primitive().clone();
        match Backward::<B, 1>::prepare::<C>(Hub, [link.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(replay, passed),
            OpsKind::UnTracked(_) => <Self as AutodiffBackend>::from_inner(passed),
        }
    }

    fn segment_output(value: FloatTensor<Self>, hub: FloatTensor<Self>, slot: Slot) -> FloatTensor<Self> {
        let value = value.into_primitive();
        let passed = hub.primitive().clone();
        match Output.prepare::<C>([hub.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((slot, passed), value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        }
    }
}
