//! Backward: the forward's steps again, with gradients going home where partials did.

use super::AttentionCall;
use super::exchange::{Exchanges, Mail, cut, unpack};
use crate::attention::{ChunkAttention, ChunkGradient, ops};
use crate::comm::CommError;
use crate::schedule::{Chunk, Pass, Payload, Transfer};
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

    fn finish(mut self) -> FloatTensor<B> {
        self.sum.take().unwrap_or_else(|| self.zeros())
    }
}

/// Gradients of this rank's query, key and value, in the accumulator's dtype.
pub(crate) fn backward<B: ChunkAttention>(
    saved: Saved<B>,
    call: &AttentionCall,
) -> Result<[FloatTensor<B>; 3], CommError> {
    let Saved { query, key, value, out, lse, d_out } = saved;
    let exchanges = Exchanges::new::<B>(call, Pass::Backward, &query, &key);
    let (rank, accumulator) = (exchanges.rank(), ops::accumulator(query.dtype()));
    let heads = query.shape()[0] * query.shape()[1];
    let delta = B::chunk_delta(out, d_out.clone());
    let like = |tensor: &FloatTensor<B>| Sum::<B> { like: tensor.clone(), dtype: accumulator, sum: None };
    let (mut d_query, mut d_key, mut d_value) = (like(&query), like(&key), like(&value));
    let own = |payload: Payload, chunk: &Chunk| match payload {
        Payload::KeyValue => cut::<B>(&[&key, &value], chunk),
        Payload::Query => cut::<B>(&[&query, &d_out, &lse, &delta], chunk),
        Payload::Partial | Payload::QueryGradient | Payload::KeyValueGradient => unreachable!("not an input"),
    };
    let find = |mail: &Mail<B>, payload, chunk: &Chunk| {
        if chunk.owner == rank { own(payload, chunk) } else { mail.input(payload, chunk) }
    };

    let mut posted = exchanges.post::<B>(0, |payload, chunk| find(&Mail::empty(), payload, chunk), vec![])?;
    let mut computed = vec![];
    for t in 0..exchanges.count() {
        let mail = exchanges.collect::<B>(posted)?;
        let find = |payload, chunk: &Chunk| find(&mail, payload, chunk);
        let (arrived, passing): (Vec<_>, Vec<_>) = mail.results.iter().partition(|(t, _)| t.chunk.owner == rank);
        if let Some(before) = t.checked_sub(1).filter(|_| !passing.is_empty()) {
            add_passing::<B>(&mut computed, &exchanges.returned(before), passing);
        }
        posted = exchanges.post::<B>(t + 1, find, std::mem::take(&mut computed))?;
        for (transfer, parts) in arrived {
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
        for (pair, seen) in exchanges.pairs(t) {
            let [query, d_out, lse, delta] = unpack::<B, 4>(find(Payload::Query, &pair.query));
            let [key, value] = unpack::<B, 2>(find(Payload::KeyValue, &pair.key_value));
            let inputs = ChunkGradient { query, key, value, lse, delta, d_out };
            call.tally.add(Pass::Backward, seen, heads);
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

/// Adds what a neighbour computed for a distant rank to what this rank computed for it one step later, to
/// be sent on as one.
fn add_passing<B: ChunkAttention>(
    computed: &mut [Vec<FloatTensor<B>>],
    returned: &[Transfer],
    passing: Vec<&(Transfer, Vec<FloatTensor<B>>)>,
) {
    for (transfer, parts) in passing {
        let same = |own: &Transfer| own.payload == transfer.payload && own.chunk == transfer.chunk;
        let at = returned.iter().position(same).expect("the schedule hands on only what is used next");
        for (own, part) in computed[at].iter_mut().zip(parts) {
            *own = B::float_add(own.clone(), part.clone());
        }
    }
}
