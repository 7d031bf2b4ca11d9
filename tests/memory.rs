//! What lives when, in real allocations beside the planner's arithmetic.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_distflash::comm::local;
use burn_distflash::{Checkpointing, Context, KeptBytes, Mesh, Sequence, Sharding, kept_by_segments};
use distflash_models::Counting;
use distflash_models::data::{Batches, Text};
use distflash_models::llama::{Execution, Llama, LlamaConfig};
use distflash_models::planner::{kept_bytes, state_bytes};
use distflash_models::train::{RankError, TrainConfig, Trainer};
use distflash_tests::TIME_LIMIT;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// The allocator counts for the whole process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What lives once the threads of earlier runs, which end by themselves, have given back theirs.
fn settled() -> usize {
    let mut before = ALLOCATOR.live();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = ALLOCATOR.live();
        if now == before {
            return now;
        }
        before = now;
    }
}

fn model() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 1024,
        hidden_size: 64,
        intermediate_size: 160,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        ..LlamaConfig::default()
    }
}

fn tokens(len: usize, device: &Device) -> [Tensor<2, Int>; 2] {
    let ids: Vec<i64> = (0..=len as i64).map(|i| i * 7 % 251).collect();
    let row = |ids: &[i64]| Tensor::<1, Int>::from_data(ids, device).unsqueeze::<2>();
    [row(&ids[..len]), row(&ids[1..])]
}

/// What lives between forward and backward, and what segments say they keep of it.
fn kept(checkpointing: Checkpointing, num_hidden_layers: usize, len: usize) -> (usize, KeptBytes) {
    let device = Device::flex().autodiff();
    let config = LlamaConfig { hidden_size: 256, num_hidden_layers, head_dim: 64, ..model() };
    let llama = Llama::init(&config, 1, &Device::flex()).unwrap().fork(&device).train();
    let context = Context::solo(len);
    let execution = Execution { loss_tile: 64, ..Execution::checkpointed(checkpointing) };
    let [tokens, labels] = tokens(len, &device);
    let step = || llama.loss([tokens.clone(), labels.clone()], &execution, &context).unwrap();
    context.backward(&step()).unwrap();
    let before = ALLOCATOR.live();
    let loss = step();
    let found = (ALLOCATOR.live() - before, kept_by_segments());
    context.backward(&loss).unwrap();
    assert_eq!(kept_by_segments(), KeptBytes::default(), "all is given back");
    found
}

#[test]
fn a_layer_keeps_what_the_planner_says() {
    let _alone = alone();
    let config = LlamaConfig { hidden_size: 256, head_dim: 64, ..model() };
    let len = 2048;
    for checkpointing in [Checkpointing::Boundary, Checkpointing::KeepAttention] {
        let [(few, _), (many, counted)] = [2, 6].map(|layers| kept(checkpointing, layers, len));
        let planned = kept_bytes(&config, checkpointing, 4., 1.) * len as f64;
        let real = (many - few) as f64 / 4.;
        assert!((real - planned).abs() < 0.1 * planned, "{checkpointing}: {real} real, {planned} planned");
        // The last segment is the head's, whose input is the residual stream.
        let head = len * config.hidden_size * 4;
        assert_eq!((counted.inputs + counted.attention - head) as f64, 6. * planned, "{checkpointing}: {counted:?}");
    }
}

#[test]
fn offloaded_tensors_are_counted_on_the_host() {
    let _alone = alone();
    let (device, len) = (Device::flex().autodiff(), 100);
    let llama = Llama::init(&model(), 1, &Device::flex()).unwrap().fork(&device).train();
    let execution = Execution::checkpointed(Checkpointing::KeepAttention.offloaded());
    let loss = llama.loss(tokens(len, &device), &execution, &Context::solo(len)).unwrap();
    let kept = kept_by_segments();
    // The head's segment stays on the device.
    assert_eq!((kept.inputs, kept.attention), (len * model().hidden_size * 4, 0), "{kept:?}");
    let planned = 6. * kept_bytes(&model(), Checkpointing::KeepAttention, 4., 1.) * len as f64;
    assert_eq!(kept.on_host as f64, planned);
    drop(loss);
}

#[test]
fn logits_never_exist_all_at_once() {
    let _alone = alone();
    let (device, len) = (Device::flex().autodiff(), 4096);
    let config = LlamaConfig { vocab_size: 8192, num_hidden_layers: 1, ..model() };
    let llama = Llama::init(&config, 1, &Device::flex()).unwrap().fork(&device).train();
    let context = Context::solo(len);
    let peak = |loss_tile| {
        let execution = Execution { loss_tile, ..Execution::checkpointed(Checkpointing::KeepAttention) };
        let step = || {
            let loss = llama.loss(tokens(len, &device), &execution, &context).unwrap();
            drop(context.backward(&loss).unwrap());
        };
        ALLOCATOR.peak_above(step).1
    };
    let logits = len * config.vocab_size * 4;
    let (tiled, whole) = (peak(128), peak(len));
    assert!(whole > 2 * logits, "{whole} of {logits}");
    assert!(tiled < logits / 2, "{tiled} of {logits}");
}

fn batches(config: &TrainConfig) -> Batches {
    Text::excerpt().batches(config.seq_len, config.batch_size, config.model.vocab_size, config.seed).unwrap()
}

/// Trains on `ranks` ranks, and calls `look` on rank 0 after each step, when all others wait.
fn train(config: TrainConfig, look: impl Fn(usize) + Send + Sync + 'static) {
    let config = Arc::new(config);
    let model = Llama::init(&config.model, 1, &Device::flex()).unwrap();
    let batches = batches(&config);
    local::run(config.ranks, TIME_LIMIT, move |comm| {
        let mesh = Mesh::new(comm.clone(), config.data_parallel).expect("a mesh");
        let context = Context::new(mesh.context().clone(), config.strategy.strategy(), config.seq_len)?;
        let mut trainer = Trainer::new(config.clone(), &model, context, mesh, Device::flex().autodiff())?;
        for step in 0..config.steps {
            trainer.step(step, &batches)?;
            comm.barrier()?;
            if comm.rank() == 0 {
                look(step);
            }
            comm.barrier()?;
        }
        Ok::<_, RankError>(())
    })
    .unwrap();
}

#[test]
fn state_is_spread_as_the_planner_says() {
    let _alone = alone();
    // Large beside what every thread and the text take.
    let config = LlamaConfig { hidden_size: 320, intermediate_size: 880, head_dim: 80, ..model() };
    for sharding in [Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Full] {
        let ranks = 4;
        let train_config = TrainConfig {
            ranks,
            sharding,
            strategy: Sequence::Zigzag.into(),
            checkpointing: Checkpointing::Boundary,
            seq_len: 16,
            batch_size: 1,
            steps: 3,
            model: config.clone(),
            ..TrainConfig::default()
        };
        let before = settled();
        let real = Arc::new(Mutex::new(0));
        let seen = real.clone();
        train(train_config, move |_| *seen.lock().unwrap() = ALLOCATOR.live());
        // All ranks are threads of this process, and the model they start from is there as well.
        let real = (*real.lock().unwrap() - before) as f64;
        let planned = ranks as f64 * state_bytes(&config, sharding, ranks) + 4. * config.num_parameters() as f64;
        assert!((real - planned).abs() < 0.1 * planned, "{sharding}: {real} real, {planned} planned");
    }
}

#[test]
fn three_hundred_steps_take_no_more_than_twenty() {
    let _alone = alone();
    let config = TrainConfig {
        ranks: 2,
        sharding: Sharding::Full,
        checkpointing: Checkpointing::KeepAttention,
        seq_len: 24,
        batch_size: 1,
        steps: 300,
        mlp_tile: 5,
        loss_tile: 7,
        model: LlamaConfig { num_hidden_layers: 2, vocab_size: 256, ..model() },
        ..TrainConfig::default()
    };
    let live = Arc::new(Mutex::new(Vec::new()));
    let seen = live.clone();
    train(config, move |_| seen.lock().unwrap().push(ALLOCATOR.live()));
    let live = live.lock().unwrap();
    let most = |steps: &[usize]| *steps.iter().max().unwrap();
    let (early, late) = (most(&live[10..30]), most(&live[280..]));
    assert!(late <= early + early / 50, "{early} bytes after 20 steps, {late} after 300");
}
