//! Who computes what, and what it costs: schedules are tables that can be printed, proved and priced
//! without a device or a tensor.
//!
//! `cargo run -p distflash-examples --example schedule`
#![allow(clippy::print_stdout, reason = "printing is what an example is for")]

use burn_distflash::schedule::{AttentionShape, Pass};
use burn_distflash::{Mask, Plan, Sequence, Strategy};
use std::error::Error;

/// Divides by 8 but not by 5.
const SEQ_LEN: usize = 4096;

/// One layer of Llama 3 8B in bf16.
const SHAPE: AttentionShape = AttentionShape { batch: 1, heads: 32, kv_heads: 8, head_dim: 128, element_bytes: 2 };

fn main() -> Result<(), Box<dyn Error>> {
    println!("q3·kv1 is the queries of rank 3 over the keys and values of rank 1; one column a rank.");
    for world_size in [5, 8] {
        println!("\n{SEQ_LEN} tokens over {world_size} ranks, causal\n");
        let [ring, balanced] = [Sequence::Ring, Sequence::Balanced].map(|sequence| plan(sequence.into(), world_size));
        let (ring, balanced) = (ring?, balanced?);
        print!("ring\n{}\nbalanced\n{}\n", ring.schedule(Pass::Forward), balanced.schedule(Pass::Forward));

        println!("{:22}{:>6}{:>8}{:>26}{:>26}", "", "steps", "idle", "forward, KiB a rank", "backward, KiB a rank");
        println!("{:22}{:>6}{:>8}{:>26}{:>26}", "strategy", "", "share", "mean (most)", "mean (most)");
        for strategy in Strategy::all_for(world_size) {
            println!("{}", row(&plan(strategy, world_size)?));
        }
        let num_steps = balanced.schedule(Pass::Forward).num_steps();
        assert_eq!(num_steps, world_size / 2 + 1, "half the ring, and the rank's own pair");
        let [ring, balanced] = [ring, balanced].map(|plan| plan.simulate(Pass::Forward).idle_share());
        assert!(balanced < ring / 3., "idle share {balanced:.3}, against {ring:.3} of the ring");
    }
    println!("\nEvery schedule above computes each unmasked (query, key) pair exactly once: checked.");
    Ok(())
}

fn plan(strategy: Strategy, world_size: usize) -> Result<Plan, Box<dyn Error>> {
    let plan = Plan::new(strategy, &Mask::causal(), SEQ_LEN, world_size, SHAPE)?;
    for pass in [Pass::Forward, Pass::Backward] {
        plan.schedule(pass).check(plan.sharded_mask())?;
    }
    Ok(plan)
}

fn row(plan: &Plan) -> String {
    let world_size = plan.layout().world_size();
    let sent = |pass| {
        let cost = plan.simulate(pass);
        let kib = (0..world_size).map(|rank| cost.bytes_sent(rank) as f64 / 1024.);
        let mean = kib.clone().sum::<f64>() / world_size as f64;
        format!("{mean:.0} ({:.0})", kib.fold(0., f64::max))
    };
    let (forward, backward) = (sent(Pass::Forward), sent(Pass::Backward));
    let steps = plan.schedule(Pass::Forward).num_steps();
    let idle = 100. * plan.simulate(Pass::Forward).idle_share();
    format!("{:22}{steps:>6}{idle:>7.1}%{forward:>26}{backward:>26}", plan.strategy().to_string())
}
