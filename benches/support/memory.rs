//! What a GPU has in use.

/// MiB in use on the first NVIDIA GPU, of all processes; `None` where there is none.
#[must_use]
pub fn used_mib() -> Option<usize> {
    let arguments = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"];
    let output = std::process::Command::new("nvidia-smi").args(arguments).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}
