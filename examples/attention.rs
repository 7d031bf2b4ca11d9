//! Attention inside a Burn module of one's own, sharded across ranks by three lines.
//!
//! `cargo run -p distflash-examples --example attention`
#![allow(clippy::print_stdout, reason = "printing is what an example is for")]

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_distflash::comm::local;
use burn_distflash::{AttentionError, AttentionOptions, Context, Sequence, dist_attention, flash_attention};
use std::error::Error;
use std::time::Duration;

/// Does not divide by 3: shards of 334, 333 and 333 tokens.
const SEQ_LEN: usize = 1000;
const WORLD_SIZE: usize = 3;
const STRATEGY: Sequence = Sequence::Balanced;
const MODEL_DIM: usize = 96;
const HEADS: usize = 6;
/// Each is read by a group of 3 query heads.
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = MODEL_DIM / HEADS;

/// Grouped-query self-attention, as any Burn model might have it.
#[derive(Module, Debug)]
struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
}

impl SelfAttention {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        Self {
            query: linear(MODEL_DIM, HEADS * HEAD_DIM),
            key: linear(MODEL_DIM, KV_HEADS * HEAD_DIM),
            value: linear(MODEL_DIM, KV_HEADS * HEAD_DIM),
            out: linear(HEADS * HEAD_DIM, MODEL_DIM),
        }
    }

    /// On one device: `x` is `[batch, SEQ_LEN, MODEL_DIM]`.
    fn forward(&self, x: Tensor<3>) -> Result<Tensor<3>, AttentionError> {
        let [query, key, value] = self.heads(x);
        let (out, _lse) = flash_attention(query, key, value, &AttentionOptions::default())?;
        Ok(self.join(out))
    }

    /// Across ranks: `x` is this rank's shard, `[batch, context.shard_len(), MODEL_DIM]`. Whatever works
    /// on each token by itself stays as it was; a rotary embedding would take `context.positions(…)`.
    fn forward_sharded(&self, x: Tensor<3>, context: &Context) -> Result<Tensor<3>, AttentionError> {
        let [query, key, value] = self.heads(x);
        // Adopt, line 3 of 3: instead of `flash_attention`. Keys stay at their 2 heads, unrepeated.
        let (out, _lse) = dist_attention(query, key, value, &AttentionOptions::default(), context)?;
        Ok(self.join(out))
    }

    /// `[batch, len, MODEL_DIM]` to three of `[batch, heads, len, HEAD_DIM]`.
    fn heads(&self, x: Tensor<3>) -> [Tensor<4>; 3] {
        let [batch, len, _] = x.dims();
        [(&self.query, HEADS), (&self.key, KV_HEADS), (&self.value, KV_HEADS)]
            .map(|(linear, heads)| linear.forward(x.clone()).reshape([batch, len, heads, HEAD_DIM]).swap_dims(1, 2))
    }

    fn join(&self, out: Tensor<4>) -> Tensor<3> {
        let [batch, heads, len, head_dim] = out.dims();
        self.out.forward(out.swap_dims(1, 2).reshape([batch, len, heads * head_dim]))
    }
}

/// Uniform in ±1, by SplitMix64: every rank can draw the same numbers, which Burn's process-wide seed
/// does not promise to threads.
fn draw(len: usize, mut state: u64) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    (0..len).map(|_| (next() >> 40) as f32 / (1 << 23) as f32 - 1.).collect()
}

fn input(device: &Device) -> Tensor<3> {
    Tensor::from_data(TensorData::new(draw(SEQ_LEN * MODEL_DIM, 1), [1, SEQ_LEN, MODEL_DIM]), device)
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(7);
    let module = SelfAttention::new(&device);
    // Burn draws weights at their first use: this also fixes them before there are threads to share them.
    let alone = module.forward(input(&device))?.inner();

    let shards = local::run(WORLD_SIZE, Duration::from_secs(30), move |comm| {
        // `clone` alone would share one autodiff graph, which a backward pass locks: ranks that wait for
        // each other inside it would never meet.
        let module = module.clone().fork(&device);

        // Adopt, line 1 of 3: one context per rank and sequence length, for all layers and steps.
        let context = Context::new(comm, STRATEGY, SEQ_LEN)?;
        // Adopt, line 2 of 3: each rank keeps its own tokens, here along dimension 1.
        let shard = context.shard(input(&device), 1);

        let out = module.forward_sharded(shard, &context)?;
        println!("rank {}: {} of {SEQ_LEN} tokens", context.rank(), context.shard_len());
        Ok::<_, AttentionError>(out.inner())
    })?;
    let sharded = STRATEGY.layout(SEQ_LEN, WORLD_SIZE).unshard(shards, 1);

    let largest = alone.clone().abs().max().into_scalar::<f32>();
    let difference = (sharded - alone).abs().max().into_scalar::<f32>();
    println!("largest output {largest:.3}, largest difference between 3 ranks and 1: {difference:.1e}");
    // The same sums in another order: a few roundings of the largest output, whatever the length.
    let bound = 8. * f32::EPSILON * largest;
    assert!(difference <= bound, "{difference:e} is more than {bound:e}");
    println!("within {bound:.1e}, 8 roundings of f32");
    Ok(())
}
