//! The differentiable op as a Burn backend extension.
#![allow(clippy::type_complexity, reason = "a backend extension returns its tensors as a tuple")]

use crate::attention::{ChunkAttention, ops};
use crate::comm::CommError;
use crate::executor::{self, AttentionCall, Direction, HeadExchange, Saved, Scattered};
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, Flex, TensorMetadata, backend_extension};

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
    /// accumulator's and never tracked. Then what backward needs where ranks share heads: the operands, `out` and
    /// `lse` as this rank computed with them.
    // Its body runs on the caller's thread: a wait for peers on a fusion thread would block them all.
    #[fusion(default)]
    fn attention_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        call: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = query.dtype();
        let result = match &call.shared {
            Some(shared) => shared.forward::<Self>([query.clone(), key, value], &call).map(attended::<Self>),
            None => executor::forward::<Self>(&query, &key, &value, &call)
                .map(|(out, lse)| alone::<Self>(ops::cast::<Self>(out, dtype), lse)),
        };
        result.unwrap_or_else(|error| failed::<Self>(&query, &call, &error))
    }

    /// As [`attention_forward`](Self::attention_forward), where `own_out` and `own_lse` are what this rank computed with
    /// the same operands before: no kernel runs, and only what ranks that share heads need is exchanged.
    #[fusion(default)]
    fn attention_again(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        own_out: FloatTensor<Self>,
        own_lse: FloatTensor<Self>,
        call: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        match &call.shared {
            Some(shared) => shared
                .again::<Self>([query.clone(), key, value], [own_out, own_lse])
                .map_or_else(|error| failed::<Self>(&query, &call, &error), attended::<Self>),
            None => alone::<Self>(own_out, own_lse),
        }
    }

    /// Gradients of query, key and value, in their dtype. Where ranks share heads, `query`, `key` and `value` only say
    /// what is asked for: `joined` has what this rank computed with.
    #[fusion(default)]
    #[allow(clippy::too_many_arguments, reason = "tensors of a backend extension come one by one")]
    fn attention_backward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        joined: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
        call: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = query.dtype();
        let operands = [query.clone(), key.clone(), value.clone()];
        let grads = match &call.shared {
            Some(shared) => shared.backward::<Self>(Scattered { joined, out, lse }, d_out, &call),
            None => executor::backward::<Self>(Saved { query, key, value, out, lse, d_out }, &call),
        };
        let grads = grads.unwrap_or_else(|error| {
            call.comm.fail(&error);
            operands.map(|like| ops::scale::<Self>(like, f64::NAN))
        });
        let [d_query, d_key, d_value] = grads.map(|grad| ops::cast::<Self>(grad, dtype));
        (d_query, d_key, d_value)
    }

    /// An all-to-all over heads; its own transpose is its backward.
    #[fusion(default)]
    fn exchange_heads(tensor: FloatTensor<Self>, exchange: HeadExchange, direction: Direction) -> FloatTensor<Self> {
        exchanged::<Self>(&tensor, &exchange, direction)
    }
}

/// What [`DistAttention::attention_forward`] returns.
type Results<B> = (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>);

fn attended<B: Backend>((out, lse, saved): executor::Attended<B>) -> Results<B> {
    (out, lse, saved.joined, saved.out, saved.lse)
}

/// Of a rank that shares no heads.
fn alone<B: Backend>(out: FloatTensor<B>, lse: FloatTensor<B>) -> Results<B> {
    (out.clone(), lse.clone(), out.clone(), out, lse)
}

fn failed<B: Backend>(query: &FloatTensor<B>, call: &AttentionCall, error: &CommError) -> Results<B> {
    call.comm.fail(error);
    let ([batch, heads, rows, width], dtype) = (query.shape().dims(), query.dtype());
    let nan = |width, dtype| ops::full::<B>([batch, heads, rows, width], f64::NAN, &query.device(), dtype);
    alone::<B>(nan(width, dtype), nan(1, ops::accumulator(dtype)))
}

fn exchanged<B: Backend>(tensor: &FloatTensor<B>, exchange: &HeadExchange, direction: Direction) -> FloatTensor<B> {
    exchange.run::<B>(std::slice::from_ref(tensor), direction).unwrap_or_else(|error| {
        exchange.comm.fail(&error);
        let [batch, _, _, width] = tensor.shape().dims();
        let [heads, rows] = exchange.result_size(direction);
        ops::full::<B>([batch, heads, rows, width], f64::NAN, &tensor.device(), tensor.dtype())
    })
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
    joined: FloatTensor<B>,
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
    call: AttentionCall,
}

impl<B: DistAttention> Backward<B, 3> for AttentionBackward {
    type State = AttentionState<B>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let AttentionState { query, key, value, joined, out, lse, call } = ops.state;
        let [query, key, value] = [query, key, value].map(|node| checkpointer.retrieve_node_output(node));
        let (d_query, d_key, d_value) = B::attention_backward(query, key, value, joined, out, lse, d_out, call);
        for (parent, grad) in ops.parents.into_iter().zip([d_query, d_key, d_value]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

#[derive(Debug)]
struct ExchangeBackward;

impl<B: DistAttention> Backward<B, 1> for ExchangeBackward {
    type State = (HeadExchange, Direction);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let d_out = grads.consume::<B>(&ops.node);
        let (exchange, direction) = ops.state;
        let grad = B::exchange_heads(d_out, exchange, direction.reversed());
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, grad);
        }
    }
}

fn inner<B: Backend, C: CheckpointStrategy>(tensor: &FloatTensor<Autodiff<B, C>>) -> FloatTensor<B> {
    tensor.primitive().clone()
}

/// Makes `results` a step of autodiff.
fn tracked<B: DistAttention, C: CheckpointStrategy>(
    [query, key, value]: [FloatTensor<Autodiff<B, C>>; 3],
    (out, lse, joined, own_out, own_lse): Results<B>,
    call: AttentionCall,
) -> Results<Autodiff<B, C>> {
    let untracked = <Autodiff<B, C> as AutodiffBackend>::from_inner;
    let rest = (untracked(lse), untracked(joined.clone()), untracked(own_out.clone()), untracked(own_lse.clone()));
    let nodes = [query.node(), key.node(), value.node()];
    let out = match AttentionBackward.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(mut prepared) => {
            let state = AttentionState {
                query: prepared.checkpoint(&query),
                key: prepared.checkpoint(&key),
                value: prepared.checkpoint(&value),
                joined,
                out: own_out,
                lse: own_lse,
                call,
            };
            prepared.finish(state, out)
        }
        OpsKind::UnTracked(prepared) => prepared.finish(out),
    };
    (out, rest.0, rest.1, rest.2, rest.3)
}

impl<B: DistAttention, C: CheckpointStrategy> DistAttention for Autodiff<B, C> {
    fn attention_forward(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        call: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let results =
            B::attention_forward(inner::<B, C>(&query), inner::<B, C>(&key), inner::<B, C>(&value), call.clone());
        tracked::<B, C>([query, key, value], results, call)
    }

    fn attention_again(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        own_out: FloatTensor<Self>,
        own_lse: FloatTensor<Self>,
        call: AttentionCall,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (own_out, own_lse) = (own_out.into_primitive(), own_lse.into_primitive());
        let results = B::attention_again(
            inner::<B, C>(&query),
            inner::<B, C>(&key),
            inner::<B, C>(&value),
            own_out,
            own_lse,
            call.clone(),
        );
        tracked::<B, C>([query, key, value], results, call)
    }

    fn attention_backward(
        _: FloatTensor<Self>,
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

    fn exchange_heads(tensor: FloatTensor<Self>, exchange: HeadExchange, direction: Direction) -> FloatTensor<Self> {
        let moved = B::exchange_heads(tensor.primitive().clone(), exchange.clone(), direction);
        match ExchangeBackward.prepare::<C>([tensor.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((exchange, direction), moved),
            OpsKind::UnTracked(prepared) => prepared.finish(moved),
        }
    }
}
