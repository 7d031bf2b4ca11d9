//! Which kernels to take, by name.

use std::fmt;
use std::str::FromStr;

/// Which kernels to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// The fastest kind that the device and the problem allow, in the shape that a table says.
    #[default]
    Auto,
    /// The fastest that CubeCL's autotuner measures for this class of problems. The winner may differ between
    /// machines and first runs, and with it the last bits of results; all other choices give the same bits in
    /// every run.
    Tuned,
    /// Those for Hopper GPUs, or an error with the reason.
    Hopper,
    /// Those for matrix units, or an error with the reason.
    Matrix,
    /// Those that run everywhere, in f32 arithmetic.
    Units,
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kernel::Auto => "auto",
            Kernel::Tuned => "tuned",
            Kernel::Hopper => "hopper",
            Kernel::Matrix => "matrix",
            Kernel::Units => "units",
        })
    }
}

impl FromStr for Kernel {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [Kernel::Auto, Kernel::Tuned, Kernel::Hopper, Kernel::Matrix, Kernel::Units]
            .into_iter()
            .find(|kernel| kernel.to_string() == name)
            .ok_or_else(|| format!("unknown kernel {name:?}: expected auto, tuned, hopper, matrix or units"))
    }
}
