//! Settings from defaults, a file and flags, the later over the earlier.

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

fn table(of: &impl Serialize) -> Table {
    Table::try_from(of).expect("settings are a table")
}

fn overlay(base: &mut Table, over: Table) {
    for (name, value) in over {
        match (base.get_mut(&name), value) {
            (Some(Value::Table(base)), Value::Table(over)) => overlay(base, over),
            // `--learning-rate 1` is a number like any other.
            (Some(Value::Float(base)), Value::Integer(over)) => *base = over as f64,
            (_, value) => drop(base.insert(name, value)),
        }
    }
}

/// The text of a settings file.
///
/// # Errors
/// If it is no TOML.
pub fn parse(text: &str) -> Result<Table, String> {
    text.parse().map_err(one_line)
}

/// The parser's own messages are many lines, with a picture of the place.
fn one_line(error: toml::de::Error) -> String {
    error.message().replace('\n', " ")
}

/// `defaults`, overlaid with a settings file and with flags, of which those not given serialise to nothing.
///
/// # Errors
/// If names or types in the file are not those of the settings.
pub fn resolve<T>(defaults: &T, file: Table, flags: &impl Serialize) -> Result<T, String>
where
    T: Serialize + DeserializeOwned,
{
    let mut merged = table(defaults);
    overlay(&mut merged, file);
    overlay(&mut merged, table(flags));
    T::deserialize(merged).map_err(one_line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::TrainConfig;

    #[derive(Serialize)]
    struct Flags {
        ranks: Option<usize>,
        seed: Option<u64>,
    }

    fn resolved(file: &str, ranks: Option<usize>) -> Result<TrainConfig, String> {
        parse(file).and_then(|file| resolve(&TrainConfig::default(), file, &Flags { ranks, seed: None }))
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_the_defaults() {
        let file = "ranks = 2\nseq_len = 77\nlearning_rate = 1\n[model]\nhidden_size = 64";
        let config = resolved(file, Some(3)).unwrap();
        assert_eq!((config.ranks, config.seq_len, config.model.hidden_size), (3, 77, 64));
        assert_eq!(config.learning_rate, 1.);
        assert_eq!(config.model.head_dim, TrainConfig::default().model.head_dim);
    }

    #[test]
    fn unknown_names_and_wrong_types_are_named() {
        let error = resolved("stpes = 3", None).unwrap_err();
        assert!(error.contains("unknown field `stpes`") && error.contains("`steps`"), "{error}");
        let error = resolved("ranks = \"many\"", None).unwrap_err();
        assert!(error.contains("\"many\"") && !error.contains('\n'), "{error}");
        assert!(resolved("ranks = ", None).is_err());
    }
}
