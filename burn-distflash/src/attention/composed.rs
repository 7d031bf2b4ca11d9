//! Attention from a backend's own tensor operations, tile by tile: O(N) memory on any backend. The
//! fallback for backends without kernels of their own, and the one to read first.

use super::chunk::{ChunkGradient, Previous};
use super::ops;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::DType;
use distflash_kernels::{RowIntervals, Tile};
use std::ops::Range;

/// Rows and keys of one tile. 256 keeps a tile's scores near the cache on a CPU while the matrix
/// products stay large enough to run at full rate.
const TILE: usize = 256;

/// Stands for `-inf` where `-inf - -inf` would make a NaN, and its opposite; below every finite f32.
const LOWEST: f64 = f32::MIN as f64;

/// Sizes of a block, and how its query heads share key/value heads.
#[derive(Clone, Copy)]
struct Block {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: DType,
}

impl Block {
    fn of<B: Backend>(query: &FloatTensor<B>, key: &FloatTensor<B>) -> Self {
        let (q, k) = (query.shape(), key.shape());
        let dtype = ops::accumulator(query.dtype());
        Self { batch: q[0], heads: q[1], kv_heads: k[1], head_dim: q[3], dtype }
    }

    /// Folds the query heads of a group into rows, `[batch, kv_heads, group · rows, width]`: the group
    /// meets its one key/value head in a single product, and gradients of keys sum over it by the
    /// product's own contraction.
    fn fold<B: Backend>(&self, tile: FloatTensor<B>) -> FloatTensor<B> {
        let shape = tile.shape();
        let rows = self.heads / self.kv_heads * shape[2];
        B::float_reshape(ops::cast::<B>(tile, self.dtype), [self.batch, self.kv_heads, rows, shape[3]].into())
    }

    fn unfold<B: Backend>(&self, tile: FloatTensor<B>, rows: usize) -> FloatTensor<B> {
        let width = tile.shape()[3];
        B::float_reshape(tile, [self.batch, self.heads, rows, width].into())
    }

    /// `scale · q · kᵀ`, with `-inf` where `mask` hides a key.
    fn scores<B: Backend>(
        &self,
        q: &FloatTensor<B>,
        k: &FloatTensor<B>,
        scale: f64,
        mask: &Tiled,
        rows: &Range<usize>,
        keys: &Range<usize>,
    ) -> FloatTensor<B> {
        let s = B::float_matmul(ops::scale::<B>(q.clone(), scale), B::float_transpose(k.clone()));
        if mask.0.tile(rows.clone(), keys.clone()) == Tile::Full {
            return s;
        }
        let group = self.heads / self.kv_heads;
        let mut hidden = Vec::with_capacity(rows.len() * keys.len());
        for row in rows.clone() {
            let seen = mask.0.row(row);
            hidden.extend(keys.clone().map(|key| if seen.contains(&key) { 0. } else { f32::NEG_INFINITY }));
        }
        let shape = [1, 1, group * rows.len(), keys.len()];
        B::float_add(s, ops::from_f32::<B>(hidden.repeat(group), shape, &q.device(), self.dtype))
    }
}

/// A mask walked in tiles.
struct Tiled<'a>(&'a RowIntervals);

impl Tiled<'_> {
    fn row_tiles(&self) -> impl Iterator<Item = Range<usize>> {
        let len = self.0.num_rows();
        (0..len.div_ceil(TILE)).map(move |i| i * TILE..((i + 1) * TILE).min(len))
    }

    /// The tiles of keys that some of `rows` see.
    fn key_tiles(&self, rows: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let seen = self.0.key_range(rows.clone());
        let rows = rows.clone();
        let len = self.0.num_keys();
        let tiles = (seen.start / TILE..seen.end.div_ceil(TILE)).map(move |j| j * TILE..((j + 1) * TILE).min(len));
        tiles.filter(move |keys| self.0.tile(rows.clone(), keys.clone()) != Tile::Skip)
    }
}

fn pair_max<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    B::float_max_dim(B::float_cat(vec![a, b], 3), 3)
}

/// FlashAttention's recurrence (Dao et al., arXiv 2205.14135), for one tile of queries after another:
/// `m` is the running maximum of the scores, `l` the running sum of exponentials and `o` the running
/// product with the values, both relative to `m`.
pub fn forward<B: Backend>(
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    value: FloatTensor<B>,
    previous: Previous<B>,
    mask: &RowIntervals,
    scale: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let block = Block::of::<B>(&query, &key);
    let device = query.device();
    let num_rows = mask.num_rows();
    let (out, lse) = match previous {
        Previous::Partial { out, lse } => (out, lse),
        Previous::Nothing => {
            let whole = |width| [block.batch, block.heads, num_rows, width];
            let out = ops::full::<B>(whole(block.head_dim), 0., &device, block.dtype);
            (out, ops::full::<B>(whole(1), f64::NEG_INFINITY, &device, block.dtype))
        }
    };
    let mask = Tiled(mask);
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for rows in mask.row_tiles() {
        let q = block.fold::<B>(ops::rows::<B>(&query, &rows));
        // A previous partial is a state of the recurrence: m = lse, l = 1, o = out; an empty one l = 0.
        let mut m = B::float_clamp_min(block.fold::<B>(ops::rows::<B>(&lse, &rows)), LOWEST.into());
        let mut l = B::float_exp(B::float_sub(block.fold::<B>(ops::rows::<B>(&lse, &rows)), m.clone()));
        let mut o = block.fold::<B>(ops::rows::<B>(&out, &rows));
        for keys in mask.key_tiles(&rows) {
            let k = ops::cast::<B>(ops::rows::<B>(&key, &keys), block.dtype);
            let v = ops::cast::<B>(ops::rows::<B>(&value, &keys), block.dtype);
            let s = block.scores::<B>(&q, &k, scale, &mask, &rows, &keys);
            let m_new = pair_max::<B>(m.clone(), B::float_max_dim(s.clone(), 3));
            let p = B::float_exp(B::float_sub(s, m_new.clone()));
            let shrink = B::float_exp(B::float_sub(m, m_new.clone()));
            l = B::float_add(B::float_mul(l, shrink.clone()), B::float_sum_dim(p.clone(), 3));
            o = B::float_add(B::float_mul(o, shrink), B::float_matmul(p, v));
            m = m_new;
        }
        // l = 0 only where nothing was seen; there o = 0 and log l = -inf are already the answer.
        let l_safe = ops::fill::<B>(l.clone(), ops::equal::<B>(&l, 0.), 1.);
        outs.push(block.unfold::<B>(B::float_div(o, l_safe), rows.len()));
        lses.push(block.unfold::<B>(B::float_add(m, B::float_log(l)), rows.len()));
    }
    if outs.is_empty() { (out, lse) } else { (B::float_cat(outs, 2), B::float_cat(lses, 2)) }
}

/// `P = exp(S − lse)`, `dV = Pᵀ·dO`, `dP = dO·Vᵀ`, `dS = scale · P ∘ (dP − delta)`, `dQ = dS·K`,
/// `dK = dSᵀ·Q`.
pub fn backward<B: Backend>(
    inputs: ChunkGradient<B>,
    mask: &RowIntervals,
    scale: f64,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let ChunkGradient { query, key, value, lse, delta, d_out } = inputs;
    let block = Block::of::<B>(&query, &key);
    let device = query.device();
    let keys_shape = [block.batch, block.kv_heads, mask.num_keys(), block.head_dim];
    let mut d_key = ops::full::<B>(keys_shape, 0., &device, block.dtype);
    let mut d_value = d_key.clone();
    let mask = Tiled(mask);
    let mut d_queries = Vec::new();
    for rows in mask.row_tiles() {
        let tile = |of: &FloatTensor<B>| block.fold::<B>(ops::rows::<B>(of, &rows));
        let (q, g, delta) = (tile(&query), tile(&d_out), tile(&delta));
        let lse = tile(&lse);
        // Rows that saw nothing: a highest lse makes their P zero, where -inf − -inf would be NaN.
        let lse = ops::fill::<B>(lse.clone(), ops::equal::<B>(&lse, f64::NEG_INFINITY), -LOWEST);
        let mut d_q = ops::scale::<B>(q.clone(), 0.);
        for keys in mask.key_tiles(&rows) {
            let k = ops::cast::<B>(ops::rows::<B>(&key, &keys), block.dtype);
            let v = ops::cast::<B>(ops::rows::<B>(&value, &keys), block.dtype);
            let s = block.scores::<B>(&q, &k, scale, &mask, &rows, &keys);
            let p = B::float_exp(B::float_sub(s, lse.clone()));
            let d_p = B::float_matmul(g.clone(), B::float_transpose(v));
            let d_s = B::float_mul(p.clone(), B::float_sub(d_p, delta.clone()));
            let d_s = ops::scale::<B>(d_s, scale);
            d_value = ops::add_rows::<B>(d_value, &keys, B::float_matmul(B::float_transpose(p), g.clone()));
            d_key = ops::add_rows::<B>(d_key, &keys, B::float_matmul(B::float_transpose(d_s.clone()), q.clone()));
            d_q = B::float_add(d_q, B::float_matmul(d_s, k));
        }
        d_queries.push(block.unfold::<B>(d_q, rows.len()));
    }
    let d_query = if d_queries.is_empty() {
        ops::full::<B>([block.batch, block.heads, 0, block.head_dim], 0., &device, block.dtype)
    } else {
        B::float_cat(d_queries, 2)
    };
    (d_query, d_key, d_value)
}

/// `Σ out · d_out` over each row's elements.
pub fn delta<B: Backend>(out: FloatTensor<B>, d_out: FloatTensor<B>) -> FloatTensor<B> {
    let accumulator = ops::accumulator(out.dtype());
    let in_full = |tensor| ops::cast::<B>(tensor, accumulator);
    B::float_sum_dim(B::float_mul(in_full(out), in_full(d_out)), 3)
}

type Partial<B> = (FloatTensor<B>, FloatTensor<B>);

/// Softmax over the union of the keys of two partials, relative to the larger lse so that nothing
/// overflows: `lse = m + log(Σ exp(lseᵢ − m))`, `out = Σ exp(lseᵢ − lse) · outᵢ`.
pub fn merge<B: Backend>(a: Partial<B>, b: Partial<B>) -> Partial<B> {
    let larger = pair_max::<B>(a.1.clone(), b.1.clone());
    // Rows that neither saw: a finite m keeps -inf − m at -inf, and the weights at 0 rather than NaN.
    let m = B::float_clamp_min(larger, f32::MIN.into());
    let weight = |lse: FloatTensor<B>| B::float_exp(B::float_sub(lse, m.clone()));
    let (wa, wb) = (weight(a.1), weight(b.1));
    let sum = B::float_add(wa.clone(), wb.clone());
    let safe = ops::fill::<B>(sum.clone(), ops::equal::<B>(&sum, 0.), 1.);
    let out = B::float_add(B::float_mul(a.0, wa), B::float_mul(b.0, wb));
    (B::float_div(out, safe), B::float_add(m, B::float_log(sum)))
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
