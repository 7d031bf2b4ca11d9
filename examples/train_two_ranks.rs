//! A training loop of one's own over two ranks that share one sequence: a model learns to predict the
//! next byte of this very file.
//!
//! `cargo run -p distflash-examples --example train_two_ranks`
#![allow(clippy::print_stdout, reason = "printing is what an example is for")]

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_distflash::comm::{Communicator, local};
use burn_distflash::{AttentionError, AttentionOptions, Context, Sequence, dist_attention, sum_gradients};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

const TEXT: &[u8] = include_bytes!("train_two_ranks.rs");
/// Odd, so that the shards differ in length.
const SEQ_LEN: usize = 1025;
const VOCABULARY: usize = 256;
const DIM: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = DIM / HEADS;
const STEPS: usize = 60;
const LEARNING_RATE: f64 = 1e-2;
/// After which a rank gives up waiting for another.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// An embedding, one attention block, a head.
#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    head: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, DIM).init(device),
            norm: RmsNormConfig::new(DIM).init(device),
            query: linear(DIM, HEADS * HEAD_DIM),
            key: linear(DIM, KV_HEADS * HEAD_DIM),
            value: linear(DIM, KV_HEADS * HEAD_DIM),
            out: linear(HEADS * HEAD_DIM, DIM),
            head: linear(DIM, VOCABULARY),
        }
    }

    /// Logits `[shard_len, VOCABULARY]` of this rank's tokens, `[1, shard_len]`.
    fn forward(&self, tokens: Tensor<2, Int>, context: &Context) -> Result<Tensor<2>, AttentionError> {
        let len = context.shard_len();
        let x = self.embedding.forward(tokens);
        let normed = self.norm.forward(x.clone());
        let heads =
            |linear: &Linear, heads| linear.forward(normed.clone()).reshape([1, len, heads, HEAD_DIM]).swap_dims(1, 2);
        // Positions are those of the whole sequence, not of the shard.
        let positions = context.positions(&x.device());
        let query = rotate(heads(&self.query, HEADS), positions.clone());
        let key = rotate(heads(&self.key, KV_HEADS), positions);
        let value = heads(&self.value, KV_HEADS);
        let (out, _lse) = dist_attention(query, key, value, &AttentionOptions::default(), context)?;
        let out = out.swap_dims(1, 2).reshape([1, len, HEADS * HEAD_DIM]);
        Ok(self.head.forward(x + self.out.forward(out)).squeeze_dim(0))
    }
}

/// Rotary embedding (Su et al., arXiv 2104.09864) of `x`, `[1, heads, len, HEAD_DIM]`: pair `i` of each
/// vector turns by `position · 10000^(-2i / HEAD_DIM)`.
fn rotate(x: Tensor<4>, positions: Tensor<1, Int>) -> Tensor<4> {
    let speed = |i| 10_000f32.powf(-2. * i as f32 / HEAD_DIM as f32);
    let speeds: Vec<f32> = (0..HEAD_DIM / 2).map(speed).collect();
    let speeds = Tensor::<1>::from_floats(speeds.as_slice(), &x.device());
    let angles = (positions.float().unsqueeze_dim::<2>(1) * speeds.unsqueeze()).unsqueeze::<4>();
    let (sin, cos) = (angles.clone().sin(), angles.cos());
    let a = x.clone().slice_dim(3, 0..HEAD_DIM / 2);
    let b = x.slice_dim(3, HEAD_DIM / 2..HEAD_DIM);
    Tensor::cat(vec![a.clone() * cos.clone() - b.clone() * sin.clone(), a * sin + b * cos], 3)
}

/// What one rank takes home.
struct Trained {
    /// Of the whole sequence, before each step.
    losses: Vec<f32>,
    /// The bits of all weights.
    weights: Vec<u32>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    device.seed(1);
    let model = Model::new(&device);
    // Burn draws weights at their first use: use them once before there are threads to share them.
    println!("{} weights, {SEQ_LEN} bytes of text", weights(&model).len());

    let run = move |comm| train(model.clone(), &device, comm);
    let alone = local::run(1, TIME_LIMIT, run.clone())?.remove(0);
    let ranks = local::run(2, TIME_LIMIT, run)?;

    let [first, last] = [0, STEPS].map(|step| ranks[0].losses[step]);
    println!("loss {first:.3} before, {last:.3} after {STEPS} steps");
    assert!(last < first / 4., "the loss fell from {first} to {last} only");
    // Later steps amplify rounding, as they would between any two orders of summation.
    let pairs = alone.losses.iter().zip(&ranks[0].losses).take(20);
    let off = pairs.map(|(one, two)| (one - two).abs() / one).fold(0., f32::max);
    println!("one rank alone has the same losses: within {off:.0e} over the first 20 steps");
    assert!(off < 1e-5, "the losses of one rank and two differ by {off:e}");
    assert!(ranks[0].weights == ranks[1].weights, "the ranks have drifted apart");
    println!("both ranks end with the same {} weights, bit for bit", ranks[0].weights.len());
    Ok(())
}

/// What rank `comm.rank()` does. Any error here ends the other rank's waits with an error too.
fn train(model: Model, device: &Device, comm: Arc<dyn Communicator>) -> Result<Trained, AttentionError> {
    // `clone` alone would share one autodiff graph, and a backward pass locks its graph: each rank would
    // hold or want the lock while it waits for the other, until the time limit.
    let mut model = model.fork(device);
    let mut optimizer = AdamWConfig::new().init();
    let context = Context::new(comm.clone(), Sequence::Balanced, SEQ_LEN)?;

    // Shift, then shard: shifting a shard would lose the label at its end.
    let shard = |text: &[u8]| -> Tensor<1, Int> {
        let own: Vec<i64> = context.layout().shard_slice(text, context.rank()).into_iter().map(i64::from).collect();
        let len = own.len();
        Tensor::from_data(TensorData::new(own, [len]), device)
    };
    let tokens = shard(&TEXT[..SEQ_LEN]).unsqueeze::<2>();
    let labels = shard(&TEXT[1..=SEQ_LEN]).unsqueeze_dim::<2>(1);

    let mut losses = Vec::new();
    for step in 0..=STEPS {
        let logits = model.forward(tokens.clone(), &context)?;
        // The sum over own labels, divided by the count of all: shards differ in length, so a mean of
        // means would weigh their tokens differently. The loss is the sum over ranks of these.
        let loss = log_softmax(logits, 1).gather(1, labels.clone()).sum() / -(SEQ_LEN as f32);
        let mean = comm.all_reduce(loss.clone().detach())?.into_scalar::<f32>();
        losses.push(mean);
        if step % 10 == 0 && comm.rank() == 0 {
            println!("{} rank(s), step {step:2}: loss {mean:.4}", comm.world_size());
        }
        if step == STEPS {
            break;
        }

        // Not `loss.backward()`: a rank lost during the backward pass would go unnoticed.
        let grads = context.backward(&loss)?;
        let grads = sum_gradients(&model, grads, &*comm)?.clip(1.).into_params(&model);
        model = optimizer.step(LEARNING_RATE, model, grads);
    }
    Ok(Trained { losses, weights: weights(&model) })
}

/// The bits of all weights, for comparison.
fn weights(model: &Model) -> Vec<u32> {
    struct Bits(Vec<u32>);
    impl ModuleVisitor for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().into_data_as::<f32>().try_into_vec::<f32>().expect("asked for f32");
            self.0.extend(values.into_iter().map(f32::to_bits));
        }
    }
    let mut bits = Bits(Vec::new());
    model.visit(&mut bits);
    bits.0
}
