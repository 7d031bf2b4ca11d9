//! `flash_attention` beside Burn's own attention: time, rate and peak memory, on the Flex backend.
//!
//! - `cargo bench -p distflash-benches --bench attention` measures, about a minute;
//! - `cargo bench -p distflash-benches --bench attention -- --test` only checks that all of it runs.
#![allow(clippy::print_stdout, reason = "the table is the product")]

use criterion::{BenchmarkId, Criterion, SamplingMode};
use distflash_benches::{Measured, Pass, Problem, Subject, Table, machine, verify};
use distflash_models::Counting;
use std::hint::black_box;
use std::time::{Duration, Instant};

#[global_allocator]
static MEMORY: Counting = Counting::new();

const HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const SAMPLES: usize = 10;
const SEQ_LENS: [usize; 3] = [512, 1024, 2048];

/// Long enough that both subjects use the code that they use when timed: more than one of our tiles of
/// 256, and more scores than the 512² up to which Flex's kernel does not tile.
const VERIFIED_LEN: usize = 600;

fn problem(seq_len: usize) -> Problem {
    Problem { heads: HEADS, seq_len, head_dim: HEAD_DIM }
}

fn main() {
    println!("{}", machine());
    println!("{}\n", verify(&problem(VERIFIED_LEN)));

    let mut criterion = Criterion::default()
        .sample_size(SAMPLES)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(4))
        .configure_from_args();
    let mut table = Table::default();
    for pass in Pass::ALL {
        let mut group = criterion.benchmark_group(pass.to_string());
        // The same number of runs in every sample: a run takes up to a second.
        group.sampling_mode(SamplingMode::Flat);
        for seq_len in SEQ_LENS {
            let problem = problem(seq_len);
            let tensors = Subject::tensors(pass, &problem.inputs());
            for subject in Subject::ALL {
                let mut samples = Vec::new();
                group.bench_function(BenchmarkId::new(subject.to_string(), seq_len), |bencher| {
                    bencher.iter_custom(|runs| {
                        let start = Instant::now();
                        for _ in 0..runs {
                            black_box(subject.run(pass, &tensors));
                        }
                        let elapsed = start.elapsed();
                        samples.push(elapsed / u32::try_from(runs).expect("not 2³² runs of milliseconds"));
                        elapsed
                    });
                });
                // Criterion warms up first, through the same closure.
                samples.drain(..samples.len().saturating_sub(SAMPLES));
                // Filtered out on the command line.
                if samples.is_empty() {
                    continue;
                }
                // After the timed runs, so that buffers which threads keep are there already.
                let (_, peak_bytes) = MEMORY.peak_above(|| drop(subject.run(pass, &tensors)));
                table.push(Measured { problem, pass, subject, samples, peak_bytes });
            }
        }
        group.finish();
    }
    criterion.final_summary();

    println!("\ncausal, {HEADS} heads of {HEAD_DIM}, f32, Flex; the median run, peak above the inputs\n\n{table}");
    if table.fewest_samples() < 2 {
        println!("One run each: a check, not a measurement.");
    }
}
