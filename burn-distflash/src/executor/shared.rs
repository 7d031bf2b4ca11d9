//! Attention whose heads, too, are shared: an all-to-all over heads around the two passes.
//!
//! All of it is one step of autodiff: cut and joined by Burn's own tensors, one step's gradient would be three padded
//! with zeros and added up, and ranks would have to come to several exchanges in the same order.

use super::backward::Saved;
use super::{AttentionCall, Direction, HeadExchange, backward, forward};
use crate::attention::{ChunkAttention, ops};
use crate::comm::CommError;
use crate::heads::HeadBlock;
use crate::layout::Rank;
use crate::plan::Plan;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use std::ops::Range;

/// One rank's part in sharing heads.
#[derive(Clone, Debug)]
pub struct SharedHeads {
    /// Query, key and value one after the other: from some tokens of all heads to all tokens of some.
    operands: HeadExchange,
    /// Query heads alone.
    results: HeadExchange,
    /// This rank's blocks, counted from its own first head and key/value head.
    blocks: Vec<HeadBlock>,
    /// Query and key/value heads of the model, and with those of zeros that were added.
    real: [usize; 2],
    padded: [usize; 2],
}

/// What the forward leaves for the backward: of all the group's tokens, and this rank's heads.
pub(crate) struct Scattered<B: Backend> {
    /// Query, key and value, one after the other along the heads.
    pub joined: FloatTensor<B>,
    pub out: FloatTensor<B>,
    pub lse: FloatTensor<B>,
}

/// `(out, lse)`, and what the backward needs.
pub(crate) type Attended<B> = (FloatTensor<B>, FloatTensor<B>, Scattered<B>);

impl SharedHeads {
    pub fn new(plan: &Plan, call: &AttentionCall, real: [usize; 2]) -> Self {
        let (heads, kv_heads) = (plan.shape().heads, plan.shape().kv_heads);
        let after = |range: Range<usize>, start: usize| start + range.start..start + range.end;
        let of_place = |place: usize| {
            let share = &plan.shares()[place];
            let (keys, values) = (after(share.kv_heads(), heads), after(share.kv_heads(), heads + kv_heads));
            vec![share.heads(), keys, values]
        };
        let rank = call.comm.rank();
        let peers: Vec<Rank> = plan.group(rank).collect();
        let exchange = |operation, heads: Vec<Vec<Range<usize>>>| HeadExchange {
            comm: call.comm.clone(),
            operation,
            number: call.number,
            place: rank - peers[0],
            heads,
            lens: peers.iter().map(|&peer| plan.layout().shard_len(peer)).collect(),
            peers: peers.clone(),
        };
        let operands = exchange("attention operands", (0..peers.len()).map(of_place).collect());
        let results = plan.shares().iter().map(|share| vec![share.heads()]).collect();
        let results = exchange("attention results", results);
        let share = &plan.shares()[operands.place];
        let before = |range: &Range<usize>, first: usize| range.start - first..range.end - first;
        let relative = |block: &HeadBlock| HeadBlock {
            heads: before(&block.heads, share.heads().start),
            kv_heads: before(&block.kv_heads, share.kv_heads().start),
        };
        let blocks = share.blocks().iter().map(relative).collect();
        Self { operands, results, blocks, real, padded: [heads, kv_heads] }
    }

    /// Query heads and key/value heads that this rank computes.
    fn own(&self) -> [usize; 2] {
        let last = self.blocks.last().expect("every rank has a head");
        [last.heads.end, last.kv_heads.end]
    }

    /// Query, key and value of one block, out of all that this rank has.
    fn operands_of<B: Backend>(&self, joined: &FloatTensor<B>, block: &HeadBlock) -> [FloatTensor<B>; 3] {
        let [heads, kv_heads] = self.own();
        let kv = |first: usize| heads_of::<B>(joined, first + block.kv_heads.start..first + block.kv_heads.end);
        [heads_of::<B>(joined, block.heads.clone()), kv(heads), kv(heads + kv_heads)]
    }

    /// Query heads that this rank computes, and rows of all its group's tokens.
    pub fn own_size(&self) -> [usize; 2] {
        [self.own()[0], self.operands.lens.iter().sum()]
    }

    /// `(out, lse)` of this rank's own tokens and all heads, `out` in the operands' dtype.
    pub fn forward<B: ChunkAttention>(
        &self,
        [query, key, value]: [FloatTensor<B>; 3],
        call: &AttentionCall,
    ) -> Result<Attended<B>, CommError> {
        let dtype = query.dtype();
        let joined = self.scatter::<B>([query, key, value])?;
        let (mut outs, mut lses) = (Vec::new(), Vec::new());
        for block in &self.blocks {
            let [query, key, value] = self.operands_of::<B>(&joined, block);
            let (out, lse) = forward::<B>(&query, &key, &value, call)?;
            outs.push(ops::cast::<B>(out, dtype));
            lses.push(lse);
        }
        self.gather(joined, ops::join::<B>(outs, 1), ops::join::<B>(lses, 1))
    }

    /// As [`forward`](Self::forward), where this rank's `out` and `lse` are known already: only the exchanges are made.
    pub fn again<B: ChunkAttention>(
        &self,
        operands: [FloatTensor<B>; 3],
        [out, lse]: [FloatTensor<B>; 2],
    ) -> Result<Attended<B>, CommError> {
        self.gather(self.scatter::<B>(operands)?, out, lse)
    }

    fn scatter<B: Backend>(&self, [query, key, value]: [FloatTensor<B>; 3]) -> Result<FloatTensor<B>, CommError> {
        let [heads, kv_heads] = self.padded;
        let all = [padded::<B>(query, heads), padded::<B>(key, kv_heads), padded::<B>(value, kv_heads)];
        self.operands.run::<B>(&all, Direction::Scatter)
    }

    fn gather<B: Backend>(
        &self,
        joined: FloatTensor<B>,
        out: FloatTensor<B>,
        lse: FloatTensor<B>,
    ) -> Result<Attended<B>, CommError> {
        let back = |tensor: &FloatTensor<B>| {
            let all = self.results.run::<B>(std::slice::from_ref(tensor), Direction::Gather)?;
            Ok::<_, CommError>(heads_of::<B>(&all, 0..self.real[0]))
        };
        Ok((back(&out)?, back(&lse)?, Scattered { joined, out, lse }))
    }

    /// Gradients of this rank's query, key and value, in their dtype.
    pub fn backward<B: ChunkAttention>(
        &self,
        saved: Scattered<B>,
        d_out: FloatTensor<B>,
        call: &AttentionCall,
    ) -> Result<[FloatTensor<B>; 3], CommError> {
        let Scattered { joined, out, lse } = saved;
        let dtype = joined.dtype();
        let d_out = self.results.run::<B>(&[padded::<B>(d_out, self.padded[0])], Direction::Scatter)?;
        let mut grads = [Vec::new(), Vec::new(), Vec::new()];
        for block in &self.blocks {
            let [query, key, value] = self.operands_of::<B>(&joined, block);
            let [out, lse, d_out] = [&out, &lse, &d_out].map(|tensor| heads_of::<B>(tensor, block.heads.clone()));
            let of_block = backward::<B>(Saved { query, key, value, out, lse, d_out }, call)?;
            for (grads, grad) in grads.iter_mut().zip(of_block) {
                grads.push(ops::cast::<B>(grad, dtype));
            }
        }
        let all = self.operands.run::<B>(&grads.map(|grads| ops::join::<B>(grads, 1)), Direction::Gather)?;
        let ([heads, kv_heads], [padded_heads, padded_kv]) = (self.real, self.padded);
        let keys = |first: usize| heads_of::<B>(&all, first..first + kv_heads);
        Ok([heads_of::<B>(&all, 0..heads), keys(padded_heads), keys(padded_heads + padded_kv)])
    }
}

/// Some heads; of a tensor without rows, without asking a backend to cut nothing out of nothing.
fn heads_of<B: Backend>(tensor: &FloatTensor<B>, heads: Range<usize>) -> FloatTensor<B> {
    let [batch, _, rows, width] = tensor.shape().dims();
    if rows == 0 {
        return ops::full::<B>([batch, heads.len(), 0, width], 0., &tensor.device(), tensor.dtype());
    }
    ops::block::<B>(tensor, &heads, &(0..rows))
}

/// With heads of zeros added up to `heads`.
fn padded<B: Backend>(tensor: FloatTensor<B>, heads: usize) -> FloatTensor<B> {
    let [batch, present, rows, width] = tensor.shape().dims();
    if present == heads {
        return tensor;
    }
    let zeros = |heads| ops::full::<B>([batch, heads, rows, width], 0., &tensor.device(), tensor.dtype());
    if rows == 0 { zeros(heads) } else { ops::join::<B>(vec![tensor.clone(), zeros(heads - present)], 1) }
}
