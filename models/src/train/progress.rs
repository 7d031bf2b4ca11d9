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
        /// Steps of the run.
        steps: usize,
    },
}

impl Progress {
    /// For a run of `steps`, on standard error.
    #[must_use]
    pub fn new(steps: usize) -> Self {
        if !io::stderr().is_terminal() {
            return Self::Lines { steps };
        }
        let style = ProgressStyle::with_template("{bar:32} {pos}/{len} steps  {msg}  {eta} left");
        let bar = ProgressBar::new(steps as u64);
        bar.set_style(style.expect("a valid template"));
        Self::Bar(bar)
    }

    /// Shows a step.
    pub fn show(&self, metrics: &Metrics) {
        let Metrics { step, loss, tokens_per_second, elapsed_seconds, .. } = metrics;
        match self {
            Self::Bar(bar) => {
                bar.set_message(format!("loss {loss:.3}  {tokens_per_second:.0} tokens/s"));
                bar.set_position(*step as u64);
            }
            Self::Lines { steps } => {
                let every = (steps / 20).max(1);
                if step % every == 0 || *step == 1 || step == steps {
                    let left = elapsed_seconds / *step as f64 * (steps - step) as f64;
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
