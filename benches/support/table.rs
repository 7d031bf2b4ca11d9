//! The summary.

use crate::{Pass, Problem, Subject};
use std::fmt;
use std::time::Duration;

/// What one subject cost on one problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Of what.
    pub problem: Problem,
    /// Which part.
    pub pass: Pass,
    /// Whose.
    pub subject: Subject,
    /// Time per run, one entry per sample.
    pub samples: Vec<Duration>,
    /// Most bytes that lived at once beyond the inputs.
    pub peak_bytes: usize,
}

impl Measured {
    /// The sample in the middle; of an even number, the slower of the two.
    fn median(&self) -> Option<Duration> {
        let mut sorted = self.samples.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }

    fn cells(&self) -> String {
        let mib = self.peak_bytes as f64 / f64::from(1 << 20);
        let Some(median) = self.median() else {
            return format!("{:>10}{:>10}{mib:>10.1}", "-", "-");
        };
        let (seconds, flops) = (median.as_secs_f64(), self.problem.flops(self.pass));
        format!("{:>10.2}{:>10.2}{mib:>10.1}", 1e3 * seconds, flops / seconds / 1e9)
    }
}

/// One row per pass and length, the subjects side by side.
#[derive(Clone, Debug, Default)]
pub struct Table(Vec<Measured>);

impl Table {
    /// Adds a measurement.
    pub fn push(&mut self, measured: Measured) {
        self.0.push(measured);
    }

    /// Fewest samples behind any number; 0 if there are none.
    #[must_use]
    pub fn fewest_samples(&self) -> usize {
        self.0.iter().map(|measured| measured.samples.len()).min().unwrap_or(0)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:16}{:>6}", "", "")?;
        for subject in Subject::ALL {
            write!(f, "{subject:>30}")?;
        }
        write!(f, "\n{:16}{:>6}", "", "N")?;
        for _ in Subject::ALL {
            write!(f, "{:>10}{:>10}{:>10}", "ms", "GFLOP/s", "peak MiB")?;
        }
        writeln!(f)?;
        let mut rows: Vec<(Pass, usize)> = Vec::new();
        for measured in &self.0 {
            let row = (measured.pass, measured.problem.seq_len);
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
        for row in rows {
            write!(f, "{:16}{:>6}", row.0, row.1)?;
            for subject in Subject::ALL {
                let here = |m: &&Measured| (m.pass, m.problem.seq_len) == row && m.subject == subject;
                match self.0.iter().find(here) {
                    Some(measured) => write!(f, "{}", measured.cells())?,
                    None => write!(f, "{:>30}", "-")?,
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
