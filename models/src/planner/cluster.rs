//! What a run would run on.

use serde::{Deserialize, Serialize};
use std::path::Path;
use std::{fs, io};

/// A cluster of equal devices in equal nodes, as a TOML file describes it.
///
/// ```
/// use distflash_models::planner::Cluster;
///
/// let cluster = Cluster::preset("8xh100")?;
/// assert_eq!((cluster.num_devices, cluster.num_nodes()), (8, 1));
/// # Ok::<(), distflash_models::planner::ClusterError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// How reports call it.
    pub name: String,
    /// Devices in all; one rank each.
    pub num_devices: usize,
    /// Devices joined by the faster link.
    pub devices_per_node: usize,
    /// What one device can do.
    pub device: DeviceSpec,
    /// Between devices of a node, each way and device.
    pub node_link: Link,
    /// Between nodes, each way and *node*: its devices share it.
    pub network: Link,
}

/// What one device can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Memory in GiB that a program can use.
    pub memory_gib: f64,
    /// What its maker promises, in TFLOP/s of the training dtype; utilisation is measured against it.
    pub peak_tflops: f64,
    /// What long matrix products reach.
    pub matmul_tflops: f64,
    /// What attention reaches, forward, by the number of rows and keys of a call.
    pub attention_forward: Rate,
    /// Backward, where a pair costs 2.5 times the forward's operations.
    pub attention_backward: Rate,
    /// What a call costs whatever its size, in µs.
    pub call_us: f64,
    /// Memory bandwidth in GB/s, for what is bound by it.
    pub memory_gb_s: f64,
}

/// One kind of link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// In GB/s, as transfers reach it.
    pub gb_s: f64,
    /// From the start of a transfer to its first byte, in µs.
    pub latency_us: f64,
}

/// Measured rates: `(length, TFLOP/s)` by length, interpolated over the logarithm of the length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rate(pub Vec<(f64, f64)>);

impl Rate {
    /// TFLOP/s at `len`; below the first length the *time* of that length's call is what it takes, so the rate
    /// falls with the work.
    #[must_use]
    pub fn at(&self, len: f64) -> f64 {
        let (first, last) = (self.0[0], self.0[self.0.len() - 1]);
        if len <= first.0 {
            return first.1 * (len / first.0).powi(2).max(1e-6);
        }
        let Some(pair) = self.0.windows(2).find(|pair| len <= pair[1].0) else {
            return last.1;
        };
        let share = (len / pair[0].0).ln() / (pair[1].0 / pair[0].0).ln();
        pair[0].1 + share * (pair[1].1 - pair[0].1)
    }
}

/// Why there is no cluster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// Neither a preset nor a file.
    #[error("unknown cluster `{0}`; expected a TOML file or one of {names}", names = Cluster::PRESETS.map(|p| p.0).join(", "))]
    Unknown(String),
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// Which.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// The file does not describe a cluster.
    #[error("{name}: {reason}")]
    Invalid {
        /// Of the file or preset.
        name: String,
        /// Why not.
        reason: String,
    },
}

impl Cluster {
    /// Clusters with names, and their descriptions.
    pub const PRESETS: [(&'static str, &'static str); 5] = [
        ("cpu", include_str!("clusters/cpu.toml")),
        ("8xh100", include_str!("clusters/8xh100.toml")),
        ("8xh200", include_str!("clusters/8xh200.toml")),
        ("8xa100", include_str!("clusters/8xa100.toml")),
        ("2x8xa100", include_str!("clusters/2x8xa100.toml")),
    ];

    /// The cluster known as `name`.
    ///
    /// # Errors
    /// If none is.
    pub fn preset(name: &str) -> Result<Self, ClusterError> {
        let named = Self::PRESETS.iter().find(|preset| preset.0 == name);
        let (name, text) = named.ok_or_else(|| ClusterError::Unknown(name.to_string()))?;
        Self::parse(name, text)
    }

    /// The preset of that name, or the file at that path.
    ///
    /// # Errors
    /// If there is neither, or the file is no description of a cluster.
    pub fn load(name: &str) -> Result<Self, ClusterError> {
        if Path::new(name).extension().is_none_or(|extension| extension != "toml") {
            return Self::preset(name);
        }
        let text = fs::read_to_string(name).map_err(|source| ClusterError::Read { path: name.to_string(), source })?;
        Self::parse(name, &text)
    }

    fn parse(name: &str, text: &str) -> Result<Self, ClusterError> {
        let invalid = |reason: String| ClusterError::Invalid { name: name.to_string(), reason };
        let cluster: Self = toml::from_str(text).map_err(|error| invalid(error.message().replace('\n', " ")))?;
        cluster.validate().map_err(invalid)?;
        Ok(cluster)
    }

    fn validate(&self) -> Result<(), String> {
        let DeviceSpec { memory_gib, peak_tflops, matmul_tflops, call_us, memory_gb_s, .. } = self.device;
        let numbers = [
            ("device.memory_gib", memory_gib),
            ("device.peak_tflops", peak_tflops),
            ("device.matmul_tflops", matmul_tflops),
            ("device.memory_gb_s", memory_gb_s),
            ("node_link.gb_s", self.node_link.gb_s),
            ("network.gb_s", self.network.gb_s),
        ];
        let is_positive = |x: f64| x.is_finite() && x > 0.;
        if let Some((name, value)) = numbers.into_iter().find(|number| !is_positive(number.1)) {
            return Err(format!("{name} is {value}; expected a positive number"));
        }
        let times = [
            ("device.call_us", call_us),
            ("node_link.latency_us", self.node_link.latency_us),
            ("network.latency_us", self.network.latency_us),
        ];
        if let Some((name, value)) = times.into_iter().find(|time| !(time.1.is_finite() && time.1 >= 0.)) {
            return Err(format!("{name} is {value}; expected a number of at least 0"));
        }
        if self.devices_per_node == 0 || self.num_devices == 0 {
            return Err("num_devices and devices_per_node must be at least 1".to_string());
        }
        let rates = [("forward", &self.device.attention_forward), ("backward", &self.device.attention_backward)];
        for (pass, Rate(points)) in rates {
            let rising = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
            if points.is_empty() || !rising || !points.iter().all(|point| is_positive(point.0) && is_positive(point.1))
            {
                return Err(format!("device.attention_{pass} needs positive [length, TFLOP/s] pairs by rising length"));
            }
        }
        Ok(())
    }

    /// This cluster with rates that were measured: a TOML file with any of the fields of `[device]`, such as
    /// `attention_forward = [[1024, 180], [4096, 432]]`.
    ///
    /// # Errors
    /// If the file cannot be read, or does not name such fields.
    pub fn with_rates(self, path: &Path) -> Result<Self, ClusterError> {
        let name = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|source| ClusterError::Read { path: name.clone(), source })?;
        let invalid = |reason: String| ClusterError::Invalid { name: name.clone(), reason };
        let one_line = |error: toml::de::Error| invalid(error.message().replace('\n', " "));
        let measured: toml::Table = text.parse().map_err(one_line)?;
        let mut device = toml::Table::try_from(&self.device).expect("a device is a table");
        device.extend(measured);
        let cluster = Self { device: DeviceSpec::deserialize(device).map_err(one_line)?, ..self };
        cluster.validate().map_err(invalid)?;
        Ok(cluster)
    }

    /// This cluster with another number of devices, in nodes of the same size.
    #[must_use]
    pub fn with_devices(mut self, num_devices: usize) -> Self {
        self.num_devices = num_devices;
        self
    }

    /// Nodes, the last perhaps not full.
    #[must_use]
    pub fn num_nodes(&self) -> usize {
        self.num_devices.div_ceil(self.devices_per_node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid_and_written_as_it_is_read() {
        for (name, _) in Cluster::PRESETS {
            let cluster = Cluster::preset(name).unwrap();
            let text = toml::to_string(&cluster).unwrap();
            assert_eq!(Cluster::parse(name, &text).unwrap(), cluster);
        }
    }

    #[test]
    fn rates_are_interpolated_between_measurements_and_kept_beyond() {
        let rate = Rate(vec![(1024., 100.), (4096., 300.)]);
        assert_eq!([1024., 2048., 4096., 1e6].map(|len| rate.at(len)), [100., 200., 300., 300.]);
        assert_eq!(rate.at(512.), 25.);
    }

    #[test]
    fn what_is_wrong_with_a_description_is_named() {
        let text = Cluster::PRESETS[1].1;
        let with = |from: &str, to: &str| Cluster::parse("x", &text.replace(from, to)).unwrap_err().to_string();
        assert!(with("num_devices = 8", "num_devices = 0").contains("at least 1"));
        assert!(with("memory_gib", "memory").contains("unknown field `memory`"));
        assert!(Cluster::load("dgx").unwrap_err().to_string().contains("8xh100"));
        assert!(Cluster::load("/nowhere/c.toml").unwrap_err().to_string().contains("/nowhere/c.toml"));
    }
}
