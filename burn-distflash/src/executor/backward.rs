//! Backward: the forward's steps again, with gradients going home where partials did.

use super::AttentionCall;
use super::exchange::{Exchanges, cut, unpack};
use crate::attention::{ChunkAttention, ChunkGradient, ops};
use crate::comm::CommError;
use crate::schedule::{Chunk, Pass, Payload};
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use std::ops::Range;

/// What the forward leaves for the backward, and the gradient that came in.
pub(crate) struct Saved<B: ChunkAttention> {
    pub query: FloatTensor<B>,
    pub key: FloatTensor<B>,
    pub value: FloatTensor<B>,
    pub out: FloatTensor<B>,
    pub lse: FloatTensor<B>,
    pub d_out: FloatTensor<B>,
}

/// A gradient as it adds up; nothing until there is something.
struct Sum<B: ChunkAttention> {
    like: FloatTensor<B>,
    dtype: DType,
    sum: Option<FloatTensor<B>>,
}

impl<B: ChunkAttention> Sum<B> {
    fn zeros(&self) -> FloatTensor<B> {
        B::float_zeros(self.like.shape(), &self.like.device(), self.dtype.into())
    }

    fn add(&mut self, rows: &Range<usize>, values: FloatTensor<B>) {
        let is_all = *rows == (0..self.like.shape()[2]);
        self.sum = Some(match self.sum.take() {
            None if is_all => values,
            sum => ops::add_rows::<B>(sum.unwrap_or_else(|| self.zeros()), rows, values),
        });
    }

    fn finish(self) -> FloatTensor<B> {
        let zeros = || self.zeros();
        self.sum.clone().unwrap_or_else(zeros)
    }
}

/// Gradients of this rank's query, key and value, in the accumulator's dtype.
pub(crate) fn backward<B: ChunkAttention>(
    saved: Saved<B>,
    call: &AttentionCall,
) -> Result<[FloatTensor<B>; 3], CommError> {
    let Saved { query, key, value, out, lse, d_out } = saved;
    let exchanges = Exchanges::new::<B>(call, Pass::Backward, &query, &key);
    let (rank, accumulator) = (call.comm.rank(), ops::accumulator(query.dtype()));
    let delta = B::chunk_delta(out, d_out.clone());
    let like = |tensor: &FloatTensor<B>| Sum::<B> { like: tensor.clone(), dtype: accumulator, sum: None };
    let (mut d_query, mut d_key, mut d_value) = (like(&query), like(&key), like(&value));
    let own = |payload: Payload, chunk: &Chunk| match payload {
        Payload::KeyValue => cut::<B>(&[&key, &value], chunk),
        Payload::Query => cut::<B>(&[&query, &d_out, &lse, &delta], chunk),
        Payload::Partial | Payload::QueryGradient | Payload::KeyValueGradient => unreachable!("not an input"),
    };
    let post = |number, computed| exchanges.post::<B>(number, |t| own(t.payload, &t.chunk), computed);

    let mut posted = post(0, vec![])?;
    let mut computed = vec![];
    for t in 0..exchanges.count() {
        let mail = exchanges.collect::<B>(posted)?;
        posted = post(t + 1, std::mem::take(&mut computed))?;
        for (transfer, parts) in mail.results.iter() {
            let rows = &transfer.chunk.rows;
            if transfer.payload == Payload::QueryGradient {
                let [d_q] = unpack::<B, 1>(parts.clone());
                d_query.add(rows, d_q);
            } else {
                let [d_k, d_v] = unpack::<B, 2>(parts.clone());
                d_key.add(rows, d_k);
                d_value.add(rows, d_v);
            }
        }
        let find = |payload, chunk: &Chunk| {
            if chunk.owner == rank { own(payload, chunk) } else { mail.input(payload, chunk) }
        };
        for (pair, seen) in call.plan.work(t) {
            let [query, d_out, lse, delta] = unpack::<B, 4>(find(Payload::Query, &pair.query));
            let [key, value] = unpack::<B, 2>(find(Payload::KeyValue, &pair.key_value));
            let inputs = ChunkGradient { query, key, value, lse, delta, d_out };
            let (d_q, d_k, d_v) = B::chunk_backward(inputs, seen.clone(), call.options);
            if pair.query.owner == rank {
                d_query.add(&pair.query.rows, d_q);
            } else {
                computed.push(vec![d_q]);
            }
            if pair.key_value.owner == rank {
                d_key.add(&pair.key_value.rows, d_k);
                d_value.add(&pair.key_value.rows, d_v);
            } else {
                computed.push(vec![d_k, d_v]);
            }
        }
    }
    Ok([d_query, d_key, d_value].map(Sum::finish))
}
