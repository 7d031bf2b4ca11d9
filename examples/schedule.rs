//! Who computes what, and what it costs: schedules are tables that can be printed, proved and priced
//! without a device or a tensor.
//!
//! `cargo run -p distflash-examples --example schedule`
#![allow(clippy::print_stdout, reason = "printing is what an example is for")]

use burn_distflash::schedule::{AttentionShape, Pass, Schedule, Simulation};
use burn_distflash::{Mask, Strategy};
use std::error::Error;

/// Divides by 8 but not by 5.
const SEQ_LEN: usize = 4096;

/// One layer of Llama 3 8B in bf16.
const SHAPE: AttentionShape = AttentionShape { batch: 1, heads: 32, kv_heads: 8, head_dim: 128, element_bytes: 2 };

fn main() -> Result<(), Box<dyn Error>> {
    println!("q3·kv1 is the queries of rank 3 over the keys and values of rank 1; one column a rank.");
    for world_size in [5, 8] {
        println!("\n{SEQ_LEN} tokens over {world_size} ranks, causal\n");
        let [ring, balanced] = [Strategy::Ring, Strategy::Balanced].map(|strategy| plan(strategy, world_size));
        let (ring, balanced) = (ring?, balanced?);
        print!("ring\n{}\nbalanced\n{}\n", ring.schedule, balanced.schedule);

        println!("{:10}{:>6}{:>8}{:>26}{:>26}", "", "steps", "idle", "forward, KiB a rank", "backward, KiB a rank");
        println!("{:10}{:>6}{:>8}{:>26}{:>26}", "strategy", "", "share", "mean (most)", "mean (most)");
        for strategy in Strategy::ALL {
            println!("{}", row(strategy, &plan(strategy, world_size)?, world_size));
        }
        assert_eq!(balanced.schedule.num_steps(), world_size / 2 + 1, "half the ring, and the rank's own pair");
        let (ring, balanced) = (ring.cost.idle_share(), balanced.cost.idle_share());
        assert!(balanced < ring / 3., "idle share {balanced:.3}, against {ring:.3} of the ring");
    }
    println!("\nEvery schedule above computes each unmasked (query, key) pair exactly once: checked.");
    Ok(())
}

struct Planned {
    schedule: Schedule,
    cost: Simulation,
}

fn plan(strategy: Strategy, world_size: usize) -> Result<Planned, Box<dyn Error>> {
    let mask = strategy.shard(&Mask::causal(), SEQ_LEN, world_size)?;
    let schedule = strategy.schedule(&mask);
    schedule.check(&mask)?;
    let cost = schedule.simulate(&mask, &SHAPE);
    Ok(Planned { schedule, cost })
}

fn row(strategy: Strategy, planned: &Planned, world_size: usize) -> String {
    let sent = |pass| {
        let kib = (0..world_size).map(|rank| planned.cost.bytes_sent(pass, rank) as f64 / 1024.);
        let mean = kib.clone().sum::<f64>() / world_size as f64;
        format!("{mean:.0} ({:.0})", kib.fold(0., f64::max))
    };
    let (forward, backward) = (sent(Pass::Forward), sent(Pass::Backward));
    let (steps, idle) = (planned.schedule.num_steps(), 100. * planned.cost.idle_share());
    // `Strategy` writes its name whatever the width asked for.
    format!("{:10}{steps:>6}{idle:>7.1}%{forward:>26}{backward:>26}", strategy.name())
}
