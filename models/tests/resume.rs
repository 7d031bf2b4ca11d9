//! Runs that go on: the same to the bit, on other ranks to rounding, and from what is whole.

use burn_distflash::{Checkpointing, Sequence, Sharding};
use distflash_models::Counting;
use distflash_models::llama::{Llama, LlamaConfig};
use distflash_models::train::{MemoryReport, Metrics, Precision, TrainConfig, TrainError, resume, train};
use safetensors::tensor::SafeTensors;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

fn config(ranks: usize, sharding: Sharding) -> TrainConfig {
    let model = LlamaConfig {
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        tie_word_embeddings: false,
        ..LlamaConfig::default()
    };
    TrainConfig {
        ranks,
        sharding,
        strategy: Sequence::Zigzag.into(),
        seq_len: 33,
        steps: 8,
        warmup_steps: 2,
        save_every: 4,
        model,
        ..TrainConfig::default()
    }
}

fn start(runs: &TempDir, config: &TrainConfig) -> PathBuf {
    train(config.clone(), runs.path(), None, &ALLOCATOR).unwrap().folder
}

fn go_on(run: &Path, config: &TrainConfig) -> Result<Vec<String>, TrainError> {
    let warnings = Mutex::new(Vec::new());
    resume(config.clone(), run, &ALLOCATOR, |damaged| warnings.lock().unwrap().push(damaged.to_string()))?;
    Ok(warnings.into_inner().unwrap())
}

fn checkpoint(run: &Path, step: usize) -> PathBuf {
    run.join(format!("checkpoints/step-{step:06}"))
}

fn model(run: &Path) -> Vec<u8> {
    fs::read(run.join("model/model.safetensors")).unwrap()
}

fn weights(run: &Path) -> Vec<f64> {
    let bytes = model(run);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<_> = file.iter().collect();
    tensors.sort_by_key(|tensor| tensor.0);
    let number = |bytes: &[u8]| f64::from(f32::from_le_bytes(bytes.try_into().unwrap()));
    tensors.iter().flat_map(|tensor| tensor.1.data().chunks_exact(4).map(number)).collect()
}

fn metrics(run: &Path) -> Vec<Metrics> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Cut off in the seventh step, with half a line of metrics written.
fn interrupt(run: &Path) {
    fs::remove_dir_all(checkpoint(run, 8)).unwrap();
    fs::create_dir(checkpoint(run, 7).with_extension("unfinished")).unwrap();
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let six: usize = text.split_inclusive('\n').take(6).map(str::len).sum();
    fs::write(run.join("metrics.jsonl"), &text[..six + 20]).unwrap();
    fs::remove_dir_all(run.join("model")).unwrap();
}

#[test]
fn a_run_goes_on_to_the_bit() {
    for sharding in Sharding::ALL {
        for precision in [Precision::F32, Precision::F16] {
            if precision == Precision::F16 && sharding == Sharding::None {
                continue; // refused
            }
            let config = TrainConfig { precision, ..config(3, sharding) };
            let runs = tempfile::tempdir().unwrap();
            let run = start(&runs, &config);
            let (whole, steps) = (model(&run), metrics(&run));
            interrupt(&run);
            assert_eq!(go_on(&run, &config).unwrap(), Vec::<String>::new());
            assert!(model(&run) == whole, "{sharding}, {precision:?}");
            let losses = |steps: &[Metrics]| steps.iter().map(|step| (step.step, step.loss)).collect::<Vec<_>>();
            assert_eq!(losses(&metrics(&run)), losses(&steps));
            assert!(!checkpoint(&run, 7).with_extension("unfinished").exists() || checkpoint(&run, 8).exists());
        }
    }
}

/// Root mean square of the difference.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    (a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / a.len() as f64).sqrt()
}

#[test]
fn a_run_goes_on_over_other_ranks_and_otherwise_spread() {
    let straight = |config: &TrainConfig| {
        let runs = tempfile::tempdir().unwrap();
        weights(&start(&runs, config))
    };
    for from in [(3, Sharding::Full), (2, Sharding::None)] {
        let begun = config(from.0, from.1);
        let reference = straight(&begun);
        for to in [(1, Sharding::None), (2, Sharding::Optimizer), (5, Sharding::Full), (4, Sharding::None)] {
            let other = config(to.0, to.1);
            let runs = tempfile::tempdir().unwrap();
            let run = start(&runs, &begun);
            interrupt(&run);
            go_on(&run, &other).unwrap();
            // Summed in another order for four steps: no further than a run that was so from its first.
            let size = distance(&reference, &vec![0.; reference.len()]);
            let bound = 2. * distance(&straight(&other), &reference) + f64::from(f32::EPSILON) * size;
            let off = distance(&weights(&run), &reference);
            assert!(off <= bound, "{from:?} to {to:?}: off by {off:e}, bound {bound:e}");
            let read = Llama::load(&run.join("model"), &burn::tensor::Device::flex());
            assert_eq!(read.unwrap().1, other.model);
        }
    }
}

#[test]
fn what_is_damaged_is_named_and_passed_over() {
    let config = config(2, Sharding::Full);
    let file = |run: &Path| checkpoint(run, 8).join("rank-1-of-2.safetensors");
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 5] = [
        ("rank-1-of-2.safetensors is damaged: it has", |file| {
            let bytes = fs::read(file).unwrap();
            fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("rank-1-of-2.safetensors is damaged: its bytes are not those that were written", |file| {
            let mut bytes = fs::read(file).unwrap();
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            fs::write(file, bytes).unwrap();
        }),
        ("rank-1-of-2.safetensors: No such file", |file| fs::remove_file(file).unwrap()),
        ("checkpoint.json: No such file", |file| fs::remove_file(file.with_file_name("checkpoint.json")).unwrap()),
        ("checkpoint.json is damaged", |file| fs::write(file.with_file_name("checkpoint.json"), "{\"for").unwrap()),
    ];
    for (says, damage) in damages {
        let runs = tempfile::tempdir().unwrap();
        let run = start(&runs, &config);
        let whole = model(&run);
        damage(&file(&run));
        let warnings = go_on(&run, &config).unwrap();
        assert!(warnings.len() == 1 && warnings[0].contains(says), "{says}: {warnings:?}");
        assert!(model(&run) == whole, "{says}");
        for step in [4, 8] {
            fs::remove_file(checkpoint(&run, step).join("checkpoint.json")).unwrap();
        }
        assert!(go_on(&run, &config).unwrap_err().to_string().contains("step-000008/checkpoint.json: No such file"));
    }
}

#[test]
fn what_cannot_go_on_is_refused_and_left_alone() {
    let begun = config(2, Sharding::Full);
    let runs = tempfile::tempdir().unwrap();
    let run = start(&runs, &begun);
    let (whole, lines) = (model(&run), metrics(&run));
    let other_model = LlamaConfig { hidden_size: 32, ..begun.model.clone() };
    for (config, says) in [
        (begun.clone(), "has made 8 of 8 steps; give more --steps"),
        (TrainConfig { seed: 2, ..begun.clone() }, "seed is not that of"),
        (TrainConfig { seq_len: 34, ..begun.clone() }, "seq_len is not that of"),
        (TrainConfig { model: other_model, ..begun.clone() }, "model is not that of"),
        (TrainConfig { ranks: 0, ..begun.clone() }, "ranks is 0"),
    ] {
        let error = go_on(&run, &config).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains(says), "{says}: {error}");
    }
    let more = TrainConfig { steps: 12, ..begun.clone() };
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    let error = go_on(&run, &more).unwrap_err();
    assert!(error.to_string().contains("checkpoints holds no whole checkpoint"), "{error}");
    assert!(model(&run) == whole && metrics(&run) == lines);
}

#[test]
fn only_the_newest_are_kept() {
    let runs = tempfile::tempdir().unwrap();
    let run = start(&runs, &TrainConfig { save_every: 1, keep: 3, ..config(2, Sharding::Full) });
    let mut left: Vec<_> =
        fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["step-000006", "step-000007", "step-000008"]);
}

#[test]
fn what_ranks_hold_is_what_was_planned() {
    for sharding in Sharding::ALL {
        for checkpointing in Checkpointing::ALL {
            let runs = tempfile::tempdir().unwrap();
            let config = TrainConfig {
                checkpointing,
                seq_len: 100,
                model: LlamaConfig { hidden_size: 64, intermediate_size: 160, ..config(1, sharding).model },
                ..config(4, sharding)
            };
            let run = start(&runs, &config);
            let text = fs::read_to_string(run.join("memory.json")).unwrap();
            let report: MemoryReport = serde_json::from_str(&text).unwrap();
            assert_eq!(report.ranks.len(), 4);
            let (found, planned) = (report.highest(), report.planned);
            for (what, found, planned) in [
                ("parameters", found.parameters, planned.parameters),
                ("optimizer", found.optimizer, planned.optimizer),
                ("gradients", found.gradients, planned.gradients),
                ("inputs", found.kept_inputs, planned.kept_inputs),
                ("attention", found.kept_attention, planned.kept_attention),
            ] {
                let off = found.abs_diff(planned);
                assert!(10 * off <= planned, "{what}, {sharding}, {checkpointing}: {found}, planned {planned}");
            }
            let state: usize = report.ranks.iter().map(|rank| rank.parameters + rank.optimizer).sum();
            assert!(report.process_peak > state, "{report:?}");
        }
    }
}
