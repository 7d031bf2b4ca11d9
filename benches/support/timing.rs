//! Timing what runs on a device.

use burn::tensor::{DType, Device, Tensor, TensorData};
use distflash_tests::Draw;
use std::time::{Duration, Instant};

/// A tensor drawn on the host.
#[must_use]
pub fn drawn(shape: [usize; 4], dtype: DType, seed: u64, device: &Device) -> Tensor<4> {
    let values = Draw::new(seed).uniform(shape.iter().product(), 1.);
    Tensor::from_data(TensorData::new(values, shape).convert_dtype(dtype), (device, dtype))
}

/// Median time of one of several calls in a row: the device, not the host, sets the pace.
///
/// # Panics
/// If the device fails.
#[must_use]
pub fn median(device: &Device, call: impl Fn()) -> Duration {
    let sync = || device.sync().expect("a device that works");
    let time = |calls: u32| {
        sync();
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        sync();
        start.elapsed() / calls
    };
    // The first calls compile kernels and fill the memory pool.
    time(2);
    let calls = (0.03 / time(2).as_secs_f64()).clamp(1., 50.) as u32;
    let mut times: Vec<Duration> = (0..7).map(|_| time(calls)).collect();
    times.sort_unstable();
    times[times.len() / 2]
}
