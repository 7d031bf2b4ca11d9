//! Training a Llama over ranks: the same losses and weights as on one rank.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_distflash::comm::local;
use burn_distflash::{Checkpointing, Context, Mesh, Sequence, Sharding, Strategy};
use distflash_models::Method;
use distflash_models::data::{Batches, Text};
use distflash_models::llama::{Llama, LlamaConfig};
use distflash_models::train::{Precision, RankError, TrainConfig, Trainer, train_from};
use distflash_tests::TIME_LIMIT;
use rstest::rstest;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Instant;

/// Divides by none of 2, 3, 4 and 5.
const SEQ_LEN: usize = 61;

fn config(ranks: usize, strategy: impl Into<Method>, seq_len: usize) -> TrainConfig {
    let strategy = strategy.into();
    let model = LlamaConfig {
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        ..LlamaConfig::default()
    };
    TrainConfig { ranks, strategy, seq_len, steps: 20, warmup_steps: 3, model, ..TrainConfig::default() }
}

fn batches(config: &TrainConfig) -> Batches {
    Text::excerpt().batches(config.seq_len, config.batch_size, config.model.vocab_size, config.seed).unwrap()
}

/// All ways to share it that fit so many ranks.
fn methods(ranks: usize) -> Vec<Method> {
    let strategies = Strategy::all_for(ranks).into_iter().map(Method::Context);
    strategies.chain([Method::MegatronLm]).collect()
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0))
    }
}

struct Weights(Vec<f64>);

impl ModuleVisitor for Weights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data_as::<f64>().iter::<f64>());
    }
}

fn weights(model: &Llama) -> Vec<f64> {
    let mut weights = Weights(Vec::new());
    model.visit(&mut weights);
    weights.0
}

/// Losses of all steps, and the weights they lead to.
#[derive(Clone)]
struct Run {
    losses: Vec<f64>,
    weights: Vec<f64>,
}

fn train(config: TrainConfig, dtype: DType) -> Run {
    let model = Llama::init(&config.model, config.seed, &Device::flex()).unwrap().map(&mut Cast(dtype));
    let losses = Arc::new(Mutex::new(Vec::new()));
    let heard = losses.clone();
    let report = move |outcome: distflash_models::train::StepOutcome| heard.lock().unwrap().push(outcome.loss);
    let model = train_from(model, &Arc::new(config.clone()), &batches(&config), report).unwrap();
    let losses = losses.lock().unwrap().clone();
    Run { losses, weights: weights(&model) }
}

/// Root mean square of the difference: single weights may part ways where a gradient near zero changes
/// sign, because Adam divides it by its own size.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    (a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / a.len() as f64).sqrt()
}

/// One rank in f64, and how far one rank in f32 is from it: what summing in another order may cost.
static ALONE: LazyLock<(Run, Run)> = LazyLock::new(|| {
    let run = |dtype| train(config(1, Sequence::Ring, SEQ_LEN), dtype);
    (run(DType::F64), run(DType::F32))
});

#[rstest]
fn training_over_ranks_is_training_on_one(#[values(1, 2, 3, 4, 5)] ranks: usize) {
    for method in methods(ranks) {
        trains_as_one(ranks, method);
    }
}

fn trains_as_one(ranks: usize, strategy: Method) {
    trains_as(config(ranks, strategy, SEQ_LEN), &ALONE, &format!("{strategy} over {ranks}"));
}

/// `config` trains as one rank does, whose run in f64 and in the same precision are given.
fn trains_as(config: TrainConfig, (truth, naive): &(Run, Run), case: &str) {
    let run = train(config, DType::F32);
    assert!(run.losses[19] < run.losses[0] - 1., "it learns: {:?}", run.losses);
    for (what, run, naive, truth) in [
        ("losses", &run.losses, &naive.losses, &truth.losses),
        ("weights", &run.weights, &naive.weights, &truth.weights),
    ] {
        let rounding = f64::from(f32::EPSILON) * distance(truth, &vec![0.; truth.len()]);
        let (off, bound) = (distance(run, truth), 2. * distance(naive, truth) + rounding);
        assert!(off <= bound, "{case}: {what} are off by {off:e}, bound {bound:e}");
    }
}

/// Whatever is kept for backward, whatever is spread over ranks, in tiles that divide nothing.
#[rstest]
fn keeping_and_spreading_change_nothing(
    #[values(1, 2, 3, 4, 5)] ranks: usize,
    #[values(Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Full)] sharding: Sharding,
) {
    for checkpointing in Checkpointing::ALL {
        let config = TrainConfig {
            checkpointing,
            sharding,
            mlp_tile: if checkpointing == Checkpointing::Boundary { 7 } else { 0 },
            loss_tile: 13,
            ..config(ranks, Sequence::Balanced, SEQ_LEN)
        };
        trains_as(config, &ALONE, &format!("{sharding} with {checkpointing} over {ranks}"));
    }
}

/// Groups of ranks with sequences of their own: world = data parallel × context parallel.
#[rstest]
fn a_mesh_trains_as_one_rank(
    #[values((2, 2), (4, 1), (1, 4), (2, 1), (2, 3))] (data_parallel, context_parallel): (usize, usize),
    #[values(Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Full)] sharding: Sharding,
) {
    static FOUR: LazyLock<(Run, Run)> = LazyLock::new(|| {
        let run = |dtype| train(TrainConfig { batch_size: 4, ..config(1, Sequence::Ring, SEQ_LEN) }, dtype);
        (run(DType::F64), run(DType::F32))
    });
    let config = TrainConfig {
        data_parallel,
        sharding,
        batch_size: 4,
        checkpointing: Checkpointing::KeepAttention,
        ..config(data_parallel * context_parallel, Sequence::Zigzag, SEQ_LEN)
    };
    trains_as(config, &FOUR, &format!("{data_parallel} x {context_parallel}, {sharding}"));
}

/// Fewer tokens than ranks: some have no tile, and all gather and reduce alike.
#[rstest]
fn ranks_without_tokens_keep_step(
    #[values(Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Full)] sharding: Sharding,
) {
    let short = |ranks, sharding| TrainConfig {
        sharding,
        checkpointing: if ranks == 1 { Checkpointing::Store } else { Checkpointing::KeepAttention },
        loss_tile: 2,
        mlp_tile: 1,
        ..config(ranks, Sequence::Zigzag, 3)
    };
    let alone = train(short(1, Sharding::None), DType::F32);
    let run = train(short(5, sharding), DType::F32);
    assert!(distance(&run.losses, &alone.losses) < 1e-3, "{:?} {:?}", run.losses, alone.losses);
}

/// 16-bit layers with f32 parameters: the same as one rank's, within twice what 16 bits cost one rank.
#[rstest]
fn layers_of_16_bits_train_f32_parameters(#[values(Precision::Bf16, Precision::F16)] precision: Precision) {
    let spread = |ranks, sharding| TrainConfig {
        precision,
        sharding,
        checkpointing: Checkpointing::KeepAttention,
        ..config(ranks, Sequence::Balanced, SEQ_LEN)
    };
    let truth = &ALONE.0;
    let alone = train(spread(1, Sharding::Full), DType::F32);
    for sharding in [Sharding::Optimizer, Sharding::Gradients, Sharding::Full] {
        let run = train(spread(4, sharding), DType::F32);
        assert!(run.losses[19] < run.losses[0] - 1., "it learns: {:?}", run.losses);
        let (off, naive) = (distance(&run.losses, &truth.losses), distance(&alone.losses, &truth.losses));
        assert!(off <= 2. * naive, "{sharding}: {off:e}, one rank {naive:e}");
    }
}

/// Weights so large that gradients scaled by 65536 leave f16.
#[test]
fn f16_steps_that_overflow_are_skipped_and_the_scale_halved() {
    struct Times(f64);
    impl ModuleMapper for Times {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.mul_scalar(self.0))
        }
    }
    let config = TrainConfig {
        precision: Precision::F16,
        sharding: Sharding::Full,
        steps: 12,
        ..config(2, Sequence::Balanced, SEQ_LEN)
    };
    let model = Llama::init(&config.model, 1, &Device::flex()).unwrap().map(&mut Times(6.));
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let heard = outcomes.clone();
    let report = move |outcome: distflash_models::train::StepOutcome| heard.lock().unwrap().push(outcome);
    train_from(model, &Arc::new(config.clone()), &batches(&config), report).unwrap();
    let outcomes = outcomes.lock().unwrap();
    assert_eq!(outcomes[0].loss_scale, 65_536.);
    assert!(outcomes[0].is_skipped(), "{outcomes:?}");
    for pair in outcomes.windows(2) {
        let factor = if pair[0].is_skipped() { 0.5 } else { 1. };
        assert_eq!(pair[1].loss_scale, factor * pair[0].loss_scale, "{outcomes:?}");
    }
    let made: Vec<_> = outcomes.iter().filter(|outcome| !outcome.is_skipped()).collect();
    assert!(made.len() > 4, "{outcomes:?}");
    assert!(made[made.len() - 1].loss < made[0].loss, "{outcomes:?}");
}

/// Gradients that are no numbers end the run before they reach a weight.
#[test]
fn a_loss_that_is_no_number_ends_the_run_on_all_ranks() {
    struct Break;
    impl ModuleMapper for Break {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.mul_scalar(f64::NAN))
        }
    }
    for sharding in [Sharding::None, Sharding::Full] {
        let config = TrainConfig { sharding, ..config(3, Sequence::Balanced, SEQ_LEN) };
        let model = Llama::init(&config.model, 1, &Device::flex()).unwrap().map(&mut Break);
        let error = train_from(model, &Arc::new(config.clone()), &batches(&config), |_| {}).unwrap_err();
        assert_eq!(error.failures.len(), 3, "{error}");
        assert!(error.failures.iter().all(|(_, reason)| reason.contains("step 1: the loss is NaN")), "{error}");
    }
}

/// In f64 nothing hides behind rounding: a gradient scaled by the number of ranks, a position counted
/// from the shard's start or a lost boundary label would be off by far more.
#[rstest]
#[case::shorter_than_the_world(3, 5)]
#[case::one_token(1, 2)]
#[case::prime(61, 4)]
fn ranks_that_own_nothing_or_unequal_shares_train_alike(#[case] seq_len: usize, #[case] ranks: usize) {
    let alone = train(config(1, Sequence::Ring, seq_len), DType::F64);
    for strategy in methods(ranks) {
        let run = train(config(ranks, strategy, seq_len), DType::F64);
        assert!(distance(&run.losses, &alone.losses) < 1e-9, "{strategy}: {:?} {:?}", run.losses, alone.losses);
        assert!(distance(&run.weights, &alone.weights) < 1e-9, "{strategy}");
    }
}

#[test]
fn a_killed_rank_ends_the_run_with_its_name() {
    let start = Instant::now();
    let config = Arc::new(config(3, Sequence::Balanced, SEQ_LEN));
    let model = Llama::init(&config.model, 1, &Device::flex()).unwrap();
    let error = local::run(3, TIME_LIMIT, move |comm| {
        let device = Device::flex().autodiff();
        let context = Context::new(comm.clone(), config.strategy.strategy(), config.seq_len)?;
        let mesh = Mesh::new(comm.clone(), 1).expect("one group");
        let mut trainer = Trainer::new(config.clone(), &model, context, mesh, device)?;
        for step in 0..config.steps {
            assert!(step < 3 || comm.rank() != 1, "killed at step 3");
            trainer.step(step, &batches(&config))?;
        }
        Ok::<_, RankError>(())
    })
    .unwrap_err();
    assert!(error.stalled.is_empty(), "{error}");
    assert_eq!(error.failures.len(), 3, "{error}");
    for (rank, reason) in &error.failures {
        assert!(reason.contains("killed at step 3"), "rank {rank}: {reason}");
        assert!(*rank == 1 || reason.contains("rank 1"), "rank {rank}: {reason}");
    }
    assert!(start.elapsed() < TIME_LIMIT / 2);
}
