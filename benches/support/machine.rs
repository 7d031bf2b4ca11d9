//! What the numbers were measured on.

use std::thread::available_parallelism;

const LOCK: &str = include_str!("../../Cargo.lock");

/// One line: processor, cores, operating system, versions and build.
#[must_use]
pub fn machine() -> String {
    let cores = available_parallelism().map_or_else(|_| "unknown number of".to_string(), |cores| cores.to_string());
    let build = if cfg!(debug_assertions) { "debug assertions on" } else { "optimised" };
    let versions = ["burn", "burn-distflash", "gemm"].map(|name| format!("{name} {}", locked(name)));
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    format!("{}, {cores} cores, {os} {arch}; {}; {build}", processor(), versions.join(", "))
}

/// As Linux names it.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| "processor without a name".to_string(), |(_, name)| name.trim().to_string())
}

/// The version of crate `name` that the workspace is built with.
fn locked(name: &str) -> &'static str {
    let mut lines = LOCK.lines().skip_while(|line| *line != format!("name = \"{name}\""));
    let version = lines.nth(1).and_then(|line| line.strip_prefix("version = \"")?.strip_suffix('"'));
    version.unwrap_or("of unknown version")
}
