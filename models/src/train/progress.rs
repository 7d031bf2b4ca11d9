//! What a person sees while a run goes on.

use super::run_folder::Metrics;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal, Write};

/// A bar on a terminal; elsewhere a plain line now and then, which logs keep well.
pub enum Progress {
    /// On a terminal.
    Bar(ProgressBar),
    /// Elsewhere.
    Lines {
        /// Steps that were made before.
        first: usize,
        /// Steps of the run.
        steps: usize,
    },
}

impl Progress {
    /// For a run of `steps`, of which `first` are made, on standard error.
    #[must_use]
    pub fn new(first: usize, steps: usize) -> Self {
        if !io::stderr().is_terminal() {
            return Self::Lines { first, steps };
        }
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} steps  {msg}  {eta} left");
        let bar = ProgressBar::new(steps as u64);
        bar.set_style(style.expect("a valid template"));
        bar.set_position(first as u64);
        bar.reset_eta();
        Self::Bar(bar)
    }

    /// Shows a step, `seconds` after the first of now.
    pub fn show(&self, metrics: &Metrics, seconds: f64) {
        let Metrics { step, loss, tokens_per_second, .. } = metrics;
        match self {
            Self::Bar(bar) => {
                bar.set_message(format!("loss {loss:.3}  {tokens_per_second:.0} tokens/s"));
                bar.set_position(*step as u64);
            }
            Self::Lines { first, steps } => {
                let every = (steps / 20).max(1);
                if step % every == 0 || *step == first + 1 || step == steps {
                    let left = seconds / (step - first) as f64 * (steps - step) as f64;
                    // A closed pipe must not end the training.
                    let _ = writeln!(
                        io::stderr(),
                        "step {step}/{steps}  loss {loss:.3}  {tokens_per_second:.0} tokens/s  {left:.0} s left"
                    );
                }
            }
        }
    }

    /// Leaves the terminal tidy.
    pub fn finish(&self) {
        if let Self::Bar(bar) = self {
            bar.finish();
        }
    }
}
