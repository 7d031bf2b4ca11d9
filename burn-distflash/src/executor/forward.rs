//! Forward: attend to what is here while the next keys are on their way.

use super::AttentionCall;
use super::exchange::{Exchanges, cut, unpack};
use crate::attention::{ChunkAttention, Previous, ops};
use crate::comm::CommError;
use crate::schedule::{Chunk, Pass, Payload};
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;

/// This rank's `(out, lse)` so far, in the accumulator's dtype.
struct Partials<B: ChunkAttention> {
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
}

impl<B: ChunkAttention> Partials<B> {
    fn rows(&self, chunk: &Chunk) -> Previous<B> {
        let [out, lse] = unpack::<B, 2>(cut::<B>(&[&self.out, &self.lse], chunk));
        Previous::Partial { out, lse }
    }

    fn set(&mut self, chunk: &Chunk, (out, lse): (FloatTensor<B>, FloatTensor<B>)) {
        self.out = ops::set_rows::<B>(self.out.clone(), &chunk.rows, out);
        self.lse = ops::set_rows::<B>(self.lse.clone(), &chunk.rows, lse);
    }

    /// Softmax over the union of the keys of two partials, relative to the larger lse so that nothing
    /// overflows: `lse = m + log(Σ exp(lseᵢ − m))`, `out = Σ exp(lseᵢ − lse) · outᵢ`.
    fn merge(&mut self, chunk: &Chunk, out: FloatTensor<B>, lse: FloatTensor<B>) {
        let [old_out, old_lse] = unpack::<B, 2>(cut::<B>(&[&self.out, &self.lse], chunk));
        self.set(chunk, merge::<B>((old_out, old_lse), (out, lse)));
    }
}

type Partial<B> = (FloatTensor<B>, FloatTensor<B>);

fn merge<B: ChunkAttention>(a: Partial<B>, b: Partial<B>) -> Partial<B> {
    let larger = B::float_max_dim(B::float_cat(vec![a.1.clone(), b.1.clone()], 3), 3);
    // Rows that neither saw: a finite m keeps -inf − m at -inf, and the weights at 0 rather than NaN.
    let m = B::float_clamp_min(larger, f32::MIN.into());
    let weight = |lse: FloatTensor<B>| B::float_exp(B::float_sub(lse, m.clone()));
    let (wa, wb) = (weight(a.1), weight(b.1));
    let sum = B::float_add(wa.clone(), wb.clone());
    let safe = ops::fill::<B>(sum.clone(), ops::equal::<B>(&sum, 0.), 1.);
    let out = B::float_add(B::float_mul(a.0, wa), B::float_mul(b.0, wb));
    (B::float_div(out, safe), B::float_add(m, B::float_log(sum)))
}

/// `(out, lse)` of this rank's queries over all keys, in the accumulator's dtype.
pub(crate) fn forward<B: ChunkAttention>(
    query: &FloatTensor<B>,
    key: &FloatTensor<B>,
    value: &FloatTensor<B>,
    call: &AttentionCall,
) -> Result<(FloatTensor<B>, FloatTensor<B>), CommError> {
    let exchanges = Exchanges::new::<B>(call, Pass::Forward, query, key);
    let (rank, shape) = (call.comm.rank(), query.shape());
    let empty = |width, value| {
        let shape = [shape[0], shape[1], shape[2], width];
        ops::full::<B>(shape, value, &query.device(), ops::accumulator(query.dtype()))
    };
    let mut partials = Partials::<B> { out: empty(shape[3], 0.), lse: empty(1, f64::NEG_INFINITY) };
    let own = |payload: Payload, chunk: &Chunk| match payload {
        Payload::KeyValue => cut::<B>(&[key, value], chunk),
        Payload::Query => cut::<B>(&[query], chunk),
        Payload::Partial | Payload::QueryGradient | Payload::KeyValueGradient => unreachable!("not an input"),
    };
    let post = |number, computed| exchanges.post::<B>(number, |t| own(t.payload, &t.chunk), computed);

    let mut posted = post(0, vec![])?;
    let mut computed = vec![];
    for t in 0..exchanges.count() {
        let mail = exchanges.collect::<B>(posted)?;
        posted = post(t + 1, std::mem::take(&mut computed))?;
        for (transfer, parts) in mail.results.iter() {
            let [out, lse] = unpack::<B, 2>(parts.clone());
            partials.merge(&transfer.chunk, out, lse);
        }
        let find = |payload, chunk: &Chunk| {
            if chunk.owner == rank { own(payload, chunk) } else { mail.input(payload, chunk) }
        };
        for (pair, seen) in call.plan.work(t) {
            let [q] = unpack::<B, 1>(find(Payload::Query, &pair.query));
            let [k, v] = unpack::<B, 2>(find(Payload::KeyValue, &pair.key_value));
            let is_own = pair.query.owner == rank;
            let previous = if is_own { partials.rows(&pair.query) } else { Previous::Nothing };
            let partial = B::chunk_forward(q, k, v, previous, seen.clone(), call.scale);
            if is_own {
                partials.set(&pair.query, partial);
            } else {
                computed.push(vec![partial.0, partial.1]);
            }
        }
    }
    Ok((partials.out, partials.lse))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::tensor::{Device, Tensor, TensorData};

    fn column(values: &[f32]) -> FloatTensor<Flex> {
        let data = TensorData::new(values.to_vec(), [1, 1, values.len(), 1]);
        let tensor = Tensor::<4>::from_data(data, &Device::flex());
        tensor.try_into_primitive::<Flex>().unwrap()
    }

    fn merged(a: (f32, f32), b: (f32, f32)) -> (f32, f32) {
        let partial = |(out, lse)| (column(&[out]), column(&[lse]));
        let (out, lse) = merge::<Flex>(partial(a), partial(b));
        let scalar = |x| Tensor::<4>::from_primitive::<Flex>(x).into_scalar::<f32>();
        (scalar(out), scalar(lse))
    }

    #[test]
    fn partials_far_apart_merge_without_overflow() {
        for far in [1e4, -1e4] {
            let (out, lse) = merged((1., far), (3., 0.));
            let expected = if far > 0. { (1., far) } else { (3., 0.) };
            assert_eq!((out, lse), expected);
        }
        let (out, lse) = merged((1., -100.), (3., 0.));
        assert_eq!((out, lse), (3., 0.));
    }

    #[test]
    fn two_partials_that_saw_nothing_merge_to_nothing() {
        assert_eq!(merged((0., f32::NEG_INFINITY), (0., f32::NEG_INFINITY)), (0., f32::NEG_INFINITY));
    }

    #[test]
    fn nothing_merged_into_a_partial_leaves_it_alone() {
        assert_eq!(merged((0., f32::NEG_INFINITY), (5., -7.5)), (5., -7.5));
        assert_eq!(merged((5., -7.5), (0., f32::NEG_INFINITY)), (5., -7.5));
    }
}
