//! Which kernels do a problem, and in what shape: decided on the host before anything is compiled.

#[cfg(feature = "cuda")]
use crate::hopper::HopperTiles;
use crate::kernel::Kernel;
use crate::matrix::MatrixTiles;
use crate::problem::{AttentionProblem, Refusal};
use crate::units::UnitTiles;
use cubecl::client::Client;
use cubecl::ir::FloatKind;
use cubecl::ir::features::TypeUsage;
use std::fmt;

/// The kernels of one problem with their shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blueprint {
    /// For Hopper GPUs.
    #[cfg(feature = "cuda")]
    Hopper(HopperTiles),
    /// For matrix units.
    Matrix(MatrixTiles),
    /// For every runtime.
    Units(UnitTiles),
}

impl Blueprint {
    /// Whether the kernels need rows of the operands to be contiguous and to start at multiples of 16 bytes.
    #[must_use]
    pub fn needs_aligned_rows(&self) -> bool {
        !matches!(self, Blueprint::Units(_))
    }

    /// The blueprint for `problem` on the device of `client`.
    ///
    /// # Errors
    /// If the problem is more than the kernels can do, or than the device can do with those asked for.
    pub fn select(client: &Client, problem: &AttentionProblem, kernel: Kernel) -> Result<Self, Refusal> {
        problem.validate()?;
        let needed = TypeUsage::Buffer | TypeUsage::Conversion;
        let properties = client.properties();
        // CubeCL's CPU runtime says it has bf16, and then finds no function that rounds to it (0.11.3).
        let is_missing = properties.hardware.num_cpu_cores.is_some() && problem.dtype == FloatKind::BF16.into();
        if is_missing || !properties.type_usage(problem.dtype).is_superset(needed) {
            return Err(Refusal::DeviceDType(format!("{:?}", problem.dtype)));
        }
        #[cfg(feature = "cuda")]
        let hopper = || HopperTiles::select(client, problem).map(Self::Hopper);
        #[cfg(not(feature = "cuda"))]
        let hopper = || Err(Refusal::Hopper("this program was built without the feature cuda".into()));
        let matrix = || MatrixTiles::select(client, problem).map(Self::Matrix);
        let units = || UnitTiles::select(client, problem).map(Self::Units);
        // Where there is nothing to compute there is nothing to choose, only results to clear.
        if problem.num_rows * problem.num_keys == 0 {
            return units();
        }
        match kernel {
            Kernel::Hopper => hopper(),
            Kernel::Matrix => matrix(),
            Kernel::Units => units(),
            Kernel::Auto | Kernel::Tuned => hopper().or_else(|_| matrix()).or_else(|_| units()),
        }
    }
}

impl Blueprint {
    /// What the autotuner chooses from; the first needs no matrix units.
    pub(crate) const CANDIDATES: [&str; 5] = ["units", "hopper", "matrix", "matrix-tall", "matrix-narrow"];

    /// Candidate `index` for `problem` on the device of `client`.
    ///
    /// # Errors
    /// If it cannot compute it, or certainly is not the fastest.
    pub(crate) fn candidate(client: &Client, problem: &AttentionProblem, index: usize) -> Result<Self, Refusal> {
        let matrix = |variant| match Self::select(client, problem, Kernel::Matrix)? {
            Self::Matrix(tiles) => tiles.variant(variant).map(Self::Matrix),
            _ => Err(Refusal::Matrix("there is nothing to compute".into())),
        };
        match index {
            0 if matrix(0).is_ok() => Err(Refusal::Matrix("it is faster than single units".into())),
            0 => Self::select(client, problem, Kernel::Units),
            1 => Self::select(client, problem, Kernel::Hopper),
            other => matrix(other - 2),
        }
    }
}

impl fmt::Display for Blueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            #[cfg(feature = "cuda")]
            Blueprint::Hopper(tiles) => tiles.fmt(f),
            Blueprint::Matrix(tiles) => tiles.fmt(f),
            Blueprint::Units(tiles) => tiles.fmt(f),
        }
    }
}
