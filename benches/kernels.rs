//! How fast attention is on the device under test, by length and head_dim: TFLOP/s of the forward and of
//! the backward pass, after both are verified against the f64 oracle.
//!
//! `DISTFLASH_KERNEL` names the kernels.
//!
//! `cargo bench -p distflash-benches --features cuda --bench kernels -- --dtype bf16 --lens 1024,8192`
#![allow(clippy::print_stdout, reason = "a table is what it is for")]

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};
use burn_distflash::{AttentionOptions, ChunkAttention, ChunkGradient, ChunkOptions, Mask, flash_attention};
use distflash_benches::{drawn, median};
use distflash_kernels::reference::Dims;
use distflash_tests::{Problem, assert_within_bound, device, flash, kernel, naive};
use std::time::Duration;

struct Options {
    dtype: DType,
    lens: Vec<usize>,
    head_dims: Vec<usize>,
    heads: usize,
}

fn options() -> Options {
    let mut options = Options { dtype: DType::F32, lens: vec![512, 1024], head_dims: vec![64, 128], heads: 16 };
    let arguments: Vec<String> = std::env::args().collect();
    let after = |flag: &str| arguments.iter().position(|a| a == flag).map(|at| arguments[at + 1].as_str());
    let numbers = |text: &str| text.split(',').map(|n| n.parse().expect("a number")).collect();
    if let Some(name) = after("--dtype") {
        options.dtype = match name {
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            other => panic!("unknown dtype {other}; expected f32, f16 or bf16"),
        };
    }
    options.lens = after("--lens").map_or(options.lens, numbers);
    options.head_dims = after("--head-dims").map_or(options.head_dims, numbers);
    options.heads = after("--heads").map_or(options.heads, |n| n.parse().expect("a number"));
    // `cargo test --benches` and criterion's quick mode: once, small.
    if arguments.iter().any(|a| a == "--test") {
        options.lens = vec![128];
    }
    options
}

fn main() {
    let options = options();
    let device = device();
    println!("{:?}, kernels {}, {:?}, {} heads, batch 1", device, kernel(), options.dtype, options.heads);
    println!(
        "{:>8} {:>8} {:>7} | {:>11} {:>8} | {:>11} {:>8}",
        "head_dim", "mask", "N", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"
    );
    for &head_dim in &options.head_dims {
        for (name, mask) in [("causal", Mask::causal()), ("full", Mask::full())] {
            verify(head_dim, &mask, options.dtype, &device);
            for &len in &options.lens {
                let [forward, backward] = time(&options, head_dim, len, &mask, &device);
                let pairs = mask.intervals(len, len).expect("a mask that fits").area() as f64;
                let flops = 4. * options.heads as f64 * pairs * head_dim as f64;
                let rate = |of: Duration, factor: f64| flops * factor / of.as_secs_f64() / 1e12;
                println!(
                    "{head_dim:>8} {name:>8} {len:>7} | {:>11.3} {:>8.2} | {:>11.3} {:>8.2}",
                    forward.as_secs_f64() * 1e3,
                    rate(forward, 1.),
                    backward.as_secs_f64() * 1e3,
                    rate(backward, 2.5)
                );
            }
        }
    }
}

fn verify(head_dim: usize, mask: &Mask, dtype: DType, device: &Device) {
    let dims = Dims { batch: 1, heads: 2, kv_heads: 1, num_rows: 150, num_keys: 150, head_dim };
    let problem = Problem::draw(dims, mask.clone(), dtype);
    assert_within_bound("before timing", &flash(&problem, device), &naive(&problem), &problem.truth());
}

/// Median times of the forward pass, and of the backward pass with what comes before and after its kernels: the
/// sums it starts from, and the rounding of gradients to the operands' dtype.
fn time(options: &Options, head_dim: usize, len: usize, mask: &Mask, device: &Device) -> [Duration; 2] {
    let shape = [1, options.heads, len, head_dim];
    let [query, key, value, d_out] = [0, 1, 2, 3].map(|seed| drawn(shape, options.dtype, seed, device));
    let masked = AttentionOptions { kernel: kernel(), ..AttentionOptions::masked(mask.clone()) };
    let forward = || flash_attention(query.clone(), key.clone(), value.clone(), &masked).expect("a valid problem");
    let (out, lse) = forward();
    let intervals = mask.intervals(len, len).expect("a mask that fits");
    let chunk = ChunkOptions { scale: 1. / (head_dim as f64).sqrt(), kernel: kernel() };
    let backward = || {
        let of = |tensor: &Tensor<4>| tensor.clone().into_dispatch();
        let inputs = ChunkGradient {
            query: of(&query),
            key: of(&key),
            value: of(&value),
            lse: lse.clone().unsqueeze_dim::<4>(3).into_dispatch(),
            delta: Dispatch::chunk_delta(of(&out), of(&d_out)),
            d_out: of(&d_out),
        };
        let (d_query, d_key, d_value) = Dispatch::chunk_backward(inputs, intervals.clone(), chunk);
        for gradient in [d_query, d_key, d_value] {
            drop(Tensor::<4>::from_dispatch(gradient).cast(options.dtype));
        }
    };
    [median(device, || drop(forward())), median(device, backward)]
}
