//! Device memory that attention takes above its inputs, by length, as `nvidia-smi` sees it: CubeCL's pool never
//! gives back, so what the process holds after forward and backward is what it held at most.
//!
//! `cargo bench -p distflash-benches --features cuda --bench gpu_memory -- 4096 16384 65536`
#![allow(clippy::print_stdout, reason = "a table is what it is for")]

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_distflash::{AttentionOptions, flash_attention};
use distflash_benches::used_mib;
use distflash_tests::{Draw, kernel};
use std::process::Command;

const HEADS: usize = 8;
const HEAD_DIM: usize = 128;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let lens: Vec<usize> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    if let [len] = lens[..] {
        return row(len);
    }
    println!("bf16, {HEADS} heads, head_dim {HEAD_DIM}, causal, kernels {}", kernel());
    println!("{:>8} | {:>10} | {:>22} | {:>14}", "N", "inputs MiB", "MiB above the inputs", "bytes a token");
    let program = std::env::current_exe().expect("this program");
    for len in lens {
        // A process each: what one length has taken, the next would find.
        let status = Command::new(&program).arg(len.to_string()).status().expect("this program");
        assert!(status.success(), "N = {len} failed");
    }
}

fn row(len: usize) {
    let device = distflash_tests::device().autodiff();
    // Kernels and context are there before anything is measured.
    drop(run(256, &device));
    let leaves = inputs(len, &device);
    let before = used(&device);
    let grads = attend(&leaves);
    let above = used(&device) - before;
    drop(grads);
    let inputs_mib = 3 * HEADS * len * HEAD_DIM * 2 / (1 << 20);
    println!("{len:>8} | {inputs_mib:>10} | {above:>22} | {:>14}", above * (1 << 20) / len);
}

fn run(len: usize, device: &Device) -> [Tensor<4>; 3] {
    attend(&inputs(len, device))
}

fn inputs(len: usize, device: &Device) -> [Tensor<4>; 3] {
    let shape = [1, HEADS, len, HEAD_DIM];
    let mut draw = Draw::new(len as u64);
    [(); 3].map(|()| {
        let data = TensorData::new(draw.uniform(shape.iter().product(), 1.), shape).convert_dtype(DType::BF16);
        Tensor::<4>::from_data(data, (device, DType::BF16)).require_grad()
    })
}

/// Gradients of the sum of the output.
fn attend(leaves: &[Tensor<4>; 3]) -> [Tensor<4>; 3] {
    let options = AttentionOptions { kernel: kernel(), ..AttentionOptions::default() };
    let [query, key, value] = leaves.clone();
    let (out, _) = flash_attention(query, key, value, &options).expect("a valid problem");
    let grads = out.sum().backward();
    leaves.each_ref().map(|leaf| leaf.grad(&grads).expect("tracked"))
}

/// MiB in use on the first GPU, when all work is done.
fn used(device: &Device) -> usize {
    device.sync().expect("a device that works");
    used_mib().expect("nvidia-smi, of NVIDIA's driver")
}
