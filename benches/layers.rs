//! Four layers of Llama-7B's shape, forward and backward, by length and by what is kept for backward: time and device
//! memory, as `nvidia-smi` sees it. CubeCL's pool never gives back, so what the process holds at the end is what it held
//! at most.
//!
//! `cargo bench -p distflash-benches --features cuda --bench layers -- 8192 32768`
#![allow(clippy::print_stdout, reason = "a table is what it is for")]

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_distflash::{Checkpointing, Context, Policy};
use distflash_benches::used_mib;
use distflash_models::llama::{Execution, Llama, LlamaConfig};
use distflash_tests::{Draw, device, kernel, takes};
use std::process::Command;
use std::time::{Duration, Instant};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [one, layers, policy, len] = arguments.as_slice()
        && one == "--one"
    {
        return row(layers.parse().expect("a number"), policy, len.parse().expect("a number"));
    }
    let value = |flag: &str| arguments.iter().position(|a| a == flag).map(|at| arguments[at + 1].clone());
    let layers = value("--layers").unwrap_or("4".into());
    let policies = value("--policies").unwrap_or("store,boundary,keep-attention,keep-attention+offload".into());
    println!("{:?}, kernels {}, {layers} layers of 4096, 32 heads, MLP 11008", device(), kernel());
    println!("{:>8} {:>24} | {:>10} {:>10} | {:>10}", "N", "policy", "ms", "tokens/s", "peak MiB");
    let program = std::env::current_exe().expect("this program");
    let is_len = |argument: &&String| argument.parse::<usize>().is_ok() && **argument != layers;
    let mut lens: Vec<String> = arguments.iter().filter(is_len).cloned().collect();
    if lens.is_empty() {
        lens.push("64".to_string());
    }
    for len in &lens {
        for policy in policies.split(',') {
            // A process each: what one has taken, the next would find. One that runs out of memory is a row, too.
            let status = Command::new(&program).args(["--one", &layers, policy, len]).status().expect("this program");
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

fn row(layers: usize, name: &str, len: usize) {
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
    let tokens: Vec<i64> = (0..len).map(|i| (i * 7 % 251) as i64).collect();
    let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [1, len]), &device);
    let step = || {
        let loss = model.loss([tokens.clone(), tokens.clone()], &execution, &context).expect("a valid problem");
        let grads = context.backward(&loss).expect("one rank loses nobody");
        drop(grads);
        device.sync().expect("a device that works");
    };
    step();
    let mut times: Vec<Duration> = (0..3)
        .map(|_| {
            let start = Instant::now();
            step();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    let seconds = times[1].as_secs_f64();
    let used = used_mib().map_or("-".to_string(), |mib| mib.to_string());
    println!("{len:>8} {name:>24} | {:>10.1} {:>10.0} | {used:>10}", 1e3 * seconds, len as f64 / seconds);
}
