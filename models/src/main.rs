//! The `distflash` program; see `distflash --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    distflash_models::cli::main()
}
