//! The program as a user meets it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

fn distflash(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_distflash")).current_dir(folder).args(arguments).output().unwrap()
}

/// A run of a few seconds.
const SMALL: [&str; 17] = [
    "train",
    "--steps",
    "3",
    "--seq-len",
    "50",
    "--hidden-size",
    "16",
    "--intermediate-size",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--kv-heads",
    "1",
    "--head-dim",
    "8",
];

fn small(folder: &Path, more: &[&str]) -> Output {
    distflash(folder, &[&SMALL, more].concat())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn train_leaves_a_run_folder_to_look_at() {
    let folder = folder();
    let output = small(folder.path(), &["--name", "first", "--ranks", "3"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.contains("nats per byte") && said.contains("guessing by frequency alone would give 3.1"), "{said}");
    let progress = text(&output.stderr);
    assert!(
        progress.contains("step 3/3  loss") && progress.contains("tokens/s"),
        "plain lines off a terminal: {progress}"
    );

    let run = folder.path().join("runs/first");
    for file in
        ["config.toml", "metrics.jsonl", "loss.svg", "schedule.svg", "model/config.json", "model/model.safetensors"]
    {
        assert!(run.join(file).metadata().unwrap().len() > 0, "{file}");
    }
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[2]["tokens"], 3 * 2 * 50);
    assert!(lines[0]["loss"].as_f64().unwrap() > 5., "an untrained model knows nothing: {}", lines[0]);
    assert!(fs::read_to_string(run.join("schedule.svg")).unwrap().contains("rank 2"));
}

#[test]
fn a_run_can_be_repeated_from_its_own_config() {
    let folder = folder();
    assert!(small(folder.path(), &[]).status.success());
    let again = distflash(folder.path(), &["train", "--config", "runs/train-1/config.toml"]);
    assert!(again.status.success(), "{}", text(&again.stderr));
    let read = |run: &str, file: &str| fs::read(folder.path().join("runs").join(run).join(file)).unwrap();
    assert_eq!(read("train-1", "config.toml"), read("train-2", "config.toml"));
    assert_eq!(read("train-1", "model/model.safetensors"), read("train-2", "model/model.safetensors"), "bit for bit");
}

/// One clear line, exit code 2, and nothing made or overwritten.
#[test]
fn bad_input_is_refused() {
    let folder = folder();
    fs::write(folder.path().join("empty.txt"), "").unwrap();
    fs::write(folder.path().join("short.txt"), "In the beginning").unwrap();
    fs::write(folder.path().join("typo.toml"), "stpes = 3").unwrap();
    for (arguments, says) in [
        (&["--data", "missing.txt"][..], "cannot read missing.txt: No such file"),
        (&["--data", "empty.txt"], "empty.txt is empty"),
        (&["--data", "short.txt"], "need a text of 51; short.txt has 16"),
        (&["--heads", "3", "--kv-heads", "2"], "num_attention_heads (3) is not divisible by num_key_value_heads (2)"),
        (&["--ranks", "0"], "ranks is 0; expected at least 1"),
        (&["--seq-len", "0"], "seq_len is 0; expected at least 1"),
        (&["--head-dim", "7"], "head_dim is 7"),
        (&["--learning-rate", "NaN"], "learning_rate is NaN; expected a positive number"),
        (&["--strategy", "magic"], "ring, balanced, zigzag, striped"),
        (&["--strategy", "hybrid:3:ring"], "groups of 3 ranks, which 4 ranks do not divide into"),
        (&["--device", "tpu"], "flex"),
        (&["--ranks", "four"], "invalid value 'four' for '--ranks"),
        (&["--config", "missing.toml"], "missing.toml: No such file"),
        (&["--config", "typo.toml"], "typo.toml: unknown field `stpes`"),
        (&["--name", "../elsewhere"], "`../elsewhere` is not a run's name"),
    ] {
        // clap refuses a flag given twice, so the small run's own flags give way.
        let base: Vec<&str> =
            SMALL[1..].chunks(2).filter(|pair| !arguments.contains(&pair[0])).flatten().copied().collect();
        let output = distflash(folder.path(), &[&["train"], &base[..], arguments].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(says), "{arguments:?}: {said}");
        assert!(said.starts_with("error: "), "{arguments:?}: {said}");
        assert!(!said.contains("panicked"), "{arguments:?}: {said}");
        let made = fs::read_dir(folder.path().join("runs")).map_or(0, Iterator::count);
        assert_eq!(made, 0, "{arguments:?} made a run folder");
    }
}

#[test]
fn an_existing_run_folder_is_left_alone() {
    let folder = folder();
    fs::create_dir_all(folder.path().join("runs/mine")).unwrap();
    fs::write(folder.path().join("runs/mine/loss.svg"), "precious").unwrap();
    let output = small(folder.path(), &["--name", "mine"]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("runs/mine exists already; nothing was changed"), "{said}");
    assert_eq!(fs::read_to_string(folder.path().join("runs/mine/loss.svg")).unwrap(), "precious");
}

#[test]
fn help_teaches() {
    let output = distflash(Path::new("."), &["train", "--help"]);
    let said = text(&output.stdout);
    for word in ["Examples:", "--strategy", "ring, balanced, zigzag, striped", "[default: 1024]", "--kv-heads"] {
        assert!(said.contains(word), "{word}: {said}");
    }
}

#[test]
fn the_defaults_that_help_names_are_the_defaults() {
    let help = text(&distflash(Path::new("."), &["train", "--help"]).stdout);
    let config = toml::Table::try_from(distflash_models::train::TrainConfig::default()).unwrap();
    let loss = config["loss"].as_table().expect("a table").iter();
    let flat = config.iter().filter(|(name, _)| !["model", "loss"].contains(&name.as_str()));
    for (name, value) in flat.chain(loss) {
        let flag = format!("--{} ", name.replace('_', "-"));
        let value = value.to_string().trim_matches('"').to_string();
        let text = help.split(&flag).nth(1).unwrap_or_else(|| panic!("no {flag} in {help}"));
        // Help is wrapped wherever it likes.
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let default = text.split("[default: ").nth(1).unwrap().split(']').next().unwrap();
        assert_eq!(default.parse::<f64>().ok(), value.parse::<f64>().ok(), "{flag}: {default}, {value}");
        assert!(default.parse::<f64>().is_ok() || default == value, "{flag}: {default}, {value}");
    }
}

#[test]
fn auto_says_what_it_chose_and_why_before_it_trains() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("auto.toml"), "strategy = \"auto\"").unwrap();
    for (run, flags) in ["train-1", "train-2"].into_iter().zip([["--strategy", "auto"], ["--config", "auto.toml"]]) {
        let output = small(folder.path(), &flags);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let chosen = said.strip_prefix("auto chooses ").and_then(|rest| rest.split(':').next()).unwrap();
        let config = fs::read_to_string(folder.path().join(format!("runs/{run}/config.toml"))).unwrap();
        assert!(config.contains(&format!("strategy = \"{chosen}")), "{said}\n{config}");
    }
}

#[test]
fn a_plan_names_the_fastest_strategy_and_writes_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let plan = |args: &[&str]| distflash(folder.path(), &[&["plan"], args].concat());
    let output = plan(&[
        "--model",
        "llama3-8b",
        "--cluster",
        "8xh200",
        "--gpus",
        "4",
        "--seq-len",
        "64K",
        "--html",
        "plan.html",
    ]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for word in
        ["llama3-8b, 64K tokens, 4 like those of 8 x H200", "auto chooses ", "\nzigzag ", "\nmegatron-lm ", "longest"]
    {
        assert!(said.contains(word), "{word}: {said}");
    }
    let page = fs::read_to_string(folder.path().join("plan.html")).unwrap();
    assert!(page.matches("<svg").count() == 4 && page.contains("rank 3") && page.ends_with("</html>\n"));
    fs::write(folder.path().join("fast.toml"), "attention_forward = [[1024, 5000]]").unwrap();
    fs::write(folder.path().join("typo.toml"), "attention_foward = [[1024, 5000]]").unwrap();
    let seconds = |args: &[&str]| {
        text(&plan(args).stdout).split(" a step").next().unwrap().rsplit(' ').nth(1).unwrap().parse::<f64>().unwrap()
    };
    assert!(seconds(&["--rates", "fast.toml"]) < seconds(&[]));
    for (args, says) in [
        (&["--rates", "typo.toml"][..], "typo.toml: unknown field `attention_foward`"),
        (&["--model", "gpt-2"], "unknown model `gpt-2`; expected tiny"),
        (&["--cluster", "dgx"], "unknown cluster `dgx`; expected a TOML file or one of cpu, 8xh100"),
        (&["--mask", "diagonal"], "expected causal, full, window:<keys>"),
        (&["--seq-len", "0"], "not between 1 and"),
        (&["--strategy", "hybrid:3:ring"], "groups of 3 ranks, which 8 ranks do not divide into"),
    ] {
        let output = plan(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(says), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn a_schedule_is_printed_as_text_and_json() {
    let schedule =
        |args: &[&str]| text(&distflash(Path::new("."), &[&["schedule", "--ranks", "5"], args].concat()).stdout);
    assert!(schedule(&[]).starts_with("step 0:  q0·kv0  q1·kv1  q2·kv2  q3·kv3  q4·kv4\n"));
    let json: serde_json::Value = serde_json::from_str(&schedule(&["--json", "--seq-len", "100"])).unwrap();
    assert_eq!((json["strategy"].as_str(), json["steps"].as_array().map(Vec::len)), (Some("balanced"), Some(3)));
    let area: u64 = json["steps"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|step| step["pairs"].as_array().unwrap())
        .flat_map(|pairs| pairs.as_array().unwrap())
        .map(|pair| pair["area"].as_u64().unwrap())
        .sum();
    assert_eq!(area, 100 * 101 / 2);
}
