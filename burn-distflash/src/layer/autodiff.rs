//! Their gradients.
#![allow(clippy::type_complexity, reason = "a backend extension returns its tensors as a tuple")]

use super::op::LayerOps;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend};

#[derive(Debug)]
struct Norm;

impl<B: LayerOps> Backward<B, 2> for Norm {
    /// `x`, weight and scale.
    type State = [FloatTensor<B>; 3];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let [x, weight, scale] = ops.state;
        let (d_x, d_weight) = B::rms_norm_backward(x, weight, scale, d_out);
        for (node, grad) in ops.parents.into_iter().zip([d_x, d_weight]) {
            if let Some(node) = node {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

#[derive(Debug)]
struct Gate;

impl<B: LayerOps> Backward<B, 2> for Gate {
    /// Gate and up.
    type State = [FloatTensor<B>; 2];

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let [gate, up] = ops.state;
        let (d_gate, d_up) = B::swiglu_backward(gate, up, d_out);
        for (node, grad) in ops.parents.into_iter().zip([d_gate, d_up]) {
            if let Some(node) = node {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

#[derive(Debug)]
struct Turn;

impl<B: LayerOps> Backward<B, 1> for Turn {
    /// Cosines and sines, and whether forward turned back.
    type State = ([FloatTensor<B>; 2], bool);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let ([cos, sin], back) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::rotate(d_out, cos, sin, !back));
        }
    }
}

impl<B: LayerOps, C: CheckpointStrategy> LayerOps for Autodiff<B, C> {
    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let nodes = [x.node(), weight.node()];
        let (x, weight) = (x.into_primitive(), weight.into_primitive());
        let (out, scale) = B::rms_norm(x.clone(), weight.clone(), epsilon);
        let untracked = <Self as AutodiffBackend>::from_inner(scale.clone());
        let out = match Backward::<B, 2>::prepare::<C>(Norm, nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish([x, weight, scale], out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        };
        (out, untracked)
    }

    fn rms_norm_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        panic!("rms_norm has no second derivative here")
    }

    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let nodes = [gate.node(), up.node()];
        let (gate, up) = (gate.into_primitive(), up.into_primitive());
        let out = B::swiglu(gate.clone(), up.clone());
        match Backward::<B, 2>::prepare::<C>(Gate, nodes).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish([gate, up], out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        }
    }

    fn swiglu_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        panic!("swiglu has no second derivative here")
    }

    fn rotate(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>, back: bool) -> FloatTensor<Self> {
        let node = x.node();
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        let out = B::rotate(x.into_primitive(), cos.clone(), sin.clone(), back);
        match Backward::<B, 1>::prepare::<C>(Turn, [node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(([cos, sin], back), out),
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        }
    }
}
