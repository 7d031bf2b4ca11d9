//! Forward: attend to what is here while the next keys are on their way.

use super::AttentionCall;
use super::exchange::{Exchanges, Mail, cut, unpack};
use crate::attention::{ChunkAttention, Previous, ops};
use crate::comm::CommError;
use crate::schedule::{Chunk, Pass, Payload};
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;

type Partial<B> = (FloatTensor<B>, FloatTensor<B>);

/// This rank's `(out, lse)` so far, in the accumulator's dtype; nothing until there is something.
struct Partials<B: ChunkAttention> {
    query: FloatTensor<B>,
    state: Option<Partial<B>>,
}

impl<B: ChunkAttention> Partials<B> {
    fn rows(&self, chunk: &Chunk) -> Previous<B> {
        let Some((out, lse)) = &self.state else {
            return Previous::Nothing;
        };
        let [out, lse] = unpack::<B, 2>(cut::<B>(&[out, lse], chunk));
        Previous::Partial { out, lse }
    }

    fn set(&mut self, chunk: &Chunk, (out, lse): Partial<B>) {
        if chunk.rows == (0..self.query.shape()[2]) {
            self.state = Some((out, lse));
            return;
        }
        let (whole_out, whole_lse) = self.state.take().unwrap_or_else(|| self.empty());
        let out = ops::set_rows::<B>(whole_out, &chunk.rows, out);
        self.state = Some((out, ops::set_rows::<B>(whole_lse, &chunk.rows, lse)));
    }

    fn merge(&mut self, chunk: &Chunk, other: Partial<B>) {
        let merged = match self.rows(chunk) {
            Previous::Nothing => other,
            Previous::Partial { out, lse } => B::chunk_merge(out, lse, other.0, other.1),
        };
        self.set(chunk, merged);
    }

    fn empty(&self) -> Partial<B> {
        let [batch, heads, rows, head_dim] = self.query.shape().dims();
        let full = |width, value| {
            let shape = [batch, heads, rows, width];
            ops::full::<B>(shape, value, &self.query.device(), ops::accumulator(self.query.dtype()))
        };
        (full(head_dim, 0.), full(1, f64::NEG_INFINITY))
    }

    fn finish(mut self) -> Partial<B> {
        self.state.take().unwrap_or_else(|| self.empty())
    }
}

/// `(out, lse)` of this rank's queries over all keys, in the accumulator's dtype.
pub(crate) fn forward<B: ChunkAttention>(
    query: &FloatTensor<B>,
    key: &FloatTensor<B>,
    value: &FloatTensor<B>,
    call: &AttentionCall,
) -> Result<(FloatTensor<B>, FloatTensor<B>), CommError> {
    let exchanges = Exchanges::new::<B>(call, Pass::Forward, query, key);
    let rank = exchanges.rank();
    let heads = query.shape()[0] * query.shape()[1];
    let mut partials = Partials::<B> { query: query.clone(), state: None };
    let own = |payload: Payload, chunk: &Chunk| match payload {
        Payload::KeyValue => cut::<B>(&[key, value], chunk),
        Payload::Query => cut::<B>(&[query], chunk),
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
        posted = exchanges.post::<B>(t + 1, find, std::mem::take(&mut computed))?;
        for (transfer, parts) in &mail.results {
            let [out, lse] = unpack::<B, 2>(parts.clone());
            partials.merge(&transfer.chunk, (out, lse));
        }
        for (pair, seen) in exchanges.pairs(t) {
            let [q] = unpack::<B, 1>(find(Payload::Query, &pair.query));
            let [k, v] = unpack::<B, 2>(find(Payload::KeyValue, &pair.key_value));
            let is_own = pair.query.owner == rank;
            let previous = if is_own { partials.rows(&pair.query) } else { Previous::Nothing };
            call.tally.add(Pass::Forward, seen, heads);
            let partial = B::chunk_forward(q, k, v, previous, seen.clone(), call.options);
            if is_own {
                partials.set(&pair.query, partial);
            } else {
                computed.push(vec![partial.0, partial.1]);
            }
        }
    }
    Ok(partials.finish())
}
