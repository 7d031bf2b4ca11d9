//! The command line.

mod plan;
mod schedule;
mod settings;
mod train;

use crate::Counting;
use clap::{Parser, Subcommand};
use std::io::{self, Write};
use std::process::ExitCode;

/// Exact long-context attention for training, sharded across ranks.
#[derive(Debug, Parser)]
#[command(name = "distflash", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(Box<train::TrainCommand>),
    Plan(plan::PlanCommand),
    Schedule(schedule::ScheduleCommand),
}

/// Why a command ended without success.
enum Failure {
    /// The request was wrong; nothing was done.
    Refused(String),
    /// It failed on the way.
    Failed(String),
}

/// Runs the program, whose allocator is `allocator`: exit code 0 on success, 2 if the request was wrong, 1 if it failed
/// on the way.
#[must_use]
pub fn main(allocator: &'static Counting) -> ExitCode {
    let result = match Cli::parse().command {
        Command::Train(command) => command.run(allocator),
        Command::Plan(command) => command.run(),
        Command::Schedule(command) => command.run(),
    };
    let (code, message) = match result {
        Ok(text) => {
            // A closed pipe is no failure of the run.
            let _ = io::stdout().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(Failure::Refused(message)) => (2, message),
        Err(Failure::Failed(message)) => (1, message),
    };
    let _ = writeln!(io::stderr(), "error: {message}");
    ExitCode::from(code)
}
