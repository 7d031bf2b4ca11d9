//! Four layers of Llama-7B's shape, without embedding and head, forward and backward, by length and by what is kept for backward: time and device
//! memory, as `nvidia-smi` sees it. CubeCL's pool never gives back, so what the process holds at the end is what it held
//! at most.
//!
//! `cargo bench -p distflash-benches --features cuda --bench layers -- 8192 32768`
//!
//! `--policies boundary,keep-attention+offload`, `--layers 8`, `--mlp-tile 8192` (tokens of which an MLP's inner width
//! exists at a time; 0 for all) and `--steps 1` (timed, after one that is not).
#![allow(clippy::print_stdout, reason = "a table is what it is for")]

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_distflash::{Checkpointing, Context, Policy};
use distflash_benches::used_mib;
use distflash_models::llama::{Execution, Llama, LlamaConfig};
use distflash_tests::{Draw, device, kernel, takes};
use std::process::Command;
use std::time::{Duration, Instant};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [one, policy, numbers @ ..] = arguments.as_slice()
        && one == "--one"
    {
        let numbers: Vec<usize> = numbers.iter().map(|number| number.parse().expect("a number")).collect();
        let [len, layers, mlp_tile, steps] = numbers.try_into().expect("four numbers");
        return row(policy, Run { len, layers, mlp_tile, steps });
    }
    let value = |flag: &str| arguments.iter().position(|a| a == flag).map(|at| arguments[at + 1].clone());
    let number = |flag: &str, default: &str| value(flag).unwrap_or(default.into());
    let numbers @ [layers, mlp_tile, _] = &[number("--layers", "4"), number("--mlp-tile", "0"), number("--steps", "3")];
    let policies = value("--policies").unwrap_or("store,boundary,keep-attention,keep-attention+offload".into());
    println!("{:?}, kernels {}, {layers} layers of 4096, 32 heads, MLP 11008, tiles of {mlp_tile}", device(), kernel());
    println!("{:>8} {:>24} | {:>10} {:>10} | {:>10}", "N", "policy", "ms", "tokens/s", "peak MiB");
    let program = std::env::current_exe().expect("this program");
    // Numbers that are no flag's.
    let is_flag = |at: usize| at > 0 && arguments[at - 1].starts_with("--") && arguments[at - 1] != "--bench";
    let is_len = |(at, argument): &(usize, &String)| argument.parse::<usize>().is_ok() && !is_flag(*at);
    let mut lens: Vec<String> = arguments.iter().enumerate().filter(is_len).map(|(_, len)| len.clone()).collect();
    if lens.is_empty() {
        lens.push("64".to_string());
    }
    for len in &lens {
        for policy in policies.split(',') {
            // A process each: what one has taken, the next would find. One that runs out of memory is a row, too.
            let status =
                Command::new(&program).args(["--one", policy, len]).args(numbers).status().expect("this program");
            if !status.success() {
                println!("{len:>8} {policy:>24} | did not finish: {status}");
            }
        }
    }
}

fn policy(name: &str) -> Policy {
    let parse = |name: &str| name.parse::<Checkpointing>().expect("a policy");
    name.strip_suffix("+offload").map_or_else(|| parse(name).into(), |name| parse(name).offloaded())
}

/// Numbers of the right size, whatever they are: time does not depend on them.
struct Fill {
    drawn: Tensor<1>,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.shape();
        let (count, have) = (shape.num_elements(), self.drawn.dims()[0]);
        let values = self.drawn.clone().repeat_dim(0, count.div_ceil(have)).slice_dim(0, 0..count).reshape(shape);
        Param::initialized(param.id, values.require_grad())
    }
}

/// What is run.
struct Run {
    len: usize,
    layers: usize,
    mlp_tile: usize,
    steps: usize,
}

fn row(name: &str, Run { len, layers, mlp_tile, steps }: Run) {
    let dtype = if takes(DType::BF16) { DType::BF16 } else { DType::F32 };
    let is_small = len < 1024;
    let device: Device = device().autodiff();
    let config = LlamaConfig {
        hidden_size: if is_small { 64 } else { 4096 },
        intermediate_size: if is_small { 176 } else { 11_008 },
        num_hidden_layers: layers,
        num_attention_heads: if is_small { 4 } else { 32 },
        num_key_value_heads: if is_small { 4 } else { 32 },
        head_dim: if is_small { 16 } else { 128 },
        ..LlamaConfig::default()
    };
    let drawn = TensorData::new(Draw::new(1).uniform(1_000_003, 0.02), [1_000_003]).convert_dtype(dtype);
    let drawn = Tensor::<1>::from_data(drawn, (&device, dtype));
    let model = Llama::empty(&config, &device).map(&mut Fill { drawn });
    let context = Context::solo(len);
    let mut execution = Execution::checkpointed(policy(name));
    execution.attention.kernel = kernel();
    execution.mlp_tile = (mlp_tile > 0).then_some(mlp_tile);
    let width = config.hidden_size;
    let x = TensorData::new(Draw::new(2).uniform(len * width, 1.), [1, len, width]).convert_dtype(dtype);
    let x = Tensor::<3>::from_data(x, (&device, dtype));
    let step = || {
        let x = x.clone().require_grad();
        let out = model.decode(x, &execution, &context).expect("a valid problem");
        let loss = out.cast(DType::F32).square().sum();
        let grads = context.backward(&loss).expect("one rank loses nobody");
        drop(grads);
        device.sync().expect("a device that works");
    };
    step();
    let mut times: Vec<Duration> = (0..steps)
        .map(|_| {
            let start = Instant::now();
            step();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    let seconds = times[steps / 2].as_secs_f64();
    let used = used_mib().map_or("-".to_string(), |mib| mib.to_string());
    println!("{len:>8} {name:>24} | {:>10.1} {:>10.0} | {used:>10}", 1e3 * seconds, len as f64 / seconds);
}
