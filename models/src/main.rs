//! The `distflash` program; see `distflash --help`.

use distflash_models::{Counting, cli};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

fn main() -> ExitCode {
    cli::main(&ALLOCATOR)
}
