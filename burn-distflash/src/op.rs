//! The differentiable op as a Burn backend extension.

use crate::attention::{ChunkAttention, ops};
use crate::executor::{self, AttentionCall, Saved};
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Flex, TensorMetadata, backend_extension};

/// Attention over a whole sharded sequence; see [`dist_attention`](crate::dist_attention), which checks
/// its operands and reports its errors.
///
/// A backend method cannot return an error, nor can a step of Burn's backward pass. A failed exchange
/// therefore fails this rank's communicator, where the error stays for [`check`], and gives NaN: it
/// cannot be mistaken for a result.
///
/// [`check`]: crate::comm::Communicator::check
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff, Fusion: cfg(feature = "fusion"))]
pub trait DistAttention: ChunkAttention {
    /// `(out, lse)` of this rank's queries over all keys: `out` in the dtype of `query`, `lse` in the
    /// accumulator's and never tracked.
    // Its body runs on the caller's thread: a wait for peers on a fusion thread would block them all.
    #[fusion(default)]
    fn attention_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        call: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = query.dtype();
        match executor::forward::<Self>(&query, &key, &value, &call) {
            Ok((out, lse)) => (ops::cast::<Self>(out, dtype), lse),
            Err(error) => {
                call.comm.fail(&error);
                let [batch, heads, rows, _] = query.shape().dims();
                let nan =
                    |width, dtype| ops::full::<Self>([batch, heads, rows, width], f64::NAN, &query.device(), dtype);
                (nan(query.shape()[3], dtype), nan(1, ops::accumulator(dtype)))
            }
        }
    }

    /// Gradients of query, key and value, in their dtype.
    #[fusion(default)]
    fn attention_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        call: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = query.dtype();
        let saved = Saved { query: query.clone(), key: key.clone(), value: value.clone(), out, lse, d_out };
        let grads = executor::backward::<Self>(saved, &call).unwrap_or_else(|error| {
            call.comm.fail(&error);
            [query, key, value].map(|like| ops::scale::<Self>(like, f64::NAN))
        });
        let [d_query, d_key, d_value] = grads.map(|grad| ops::cast::<Self>(grad, dtype));
        (d_query, d_key, d_value)
    }
}

impl DistAttention for Flex {}

#[cfg(feature = "cube")]
impl DistAttention for burn_cubecl::CubeBackend {}

#[derive(Debug)]
struct AttentionBackward;

#[derive(Clone, Debug)]
struct AttentionState<B: DistAttention> {
    query: NodeId,
    key: NodeId,
    value: NodeId,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    call: AttentionCall,
}

impl<B: DistAttention> Backward<B, 3> for AttentionBackward {
    type State = AttentionState<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let AttentionState { query, key, value, out, lse, call } = ops.state;
        let [query, key, value] = [query, key, value].map(|node| checkpointer.retrieve_node_output(node));
        let (d_query, d_key, d_value) = B::attention_backward(query, key, value, out, lse, d_out, call);
        for (parent, grad) in ops.parents.into_iter().zip([d_query, d_key, d_value]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

impl<B: DistAttention, C: CheckpointStrategy> DistAttention for Autodiff<B, C> {
    fn attention_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        call: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let inner = |tensor: &FloatTensor<Self>| tensor.primitive().clone();
        let (out, lse) = B::attention_forward(inner(&query), inner(&key), inner(&value), call.clone());
        let untracked_lse = <Self as AutodiffBackend>::from_inner(lse.clone());
        let nodes = [query.node(), key.node(), value.node()];
        let out = match AttentionBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prepared) => {
                let state = AttentionState {
                    query: prepared.checkpoint(&query),
                    key: prepared.checkpoint(&key),
                    value: prepared.checkpoint(&value),
                    out: out.clone(),
                    lse,
                    call,
                };
                prepared.finish(state, out)
            }
            OpsKind::UnTracked(prepared) => prepared.finish(out),
        };
        (out, untracked_lse)
    }

    fn attention_backward(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        panic!("attention has no second derivative here")
    }
}
