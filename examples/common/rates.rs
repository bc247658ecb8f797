//! The measured rates of a device, for MFU and floors.

use candle_core::{DType, Device};
use tallow::precision::Precision;
use tallow::profile::DeviceRates;

/// Returns the device's rates for matmuls in `dtypes`; `None` if they cannot be measured, for instance because memory
/// is too short.
pub fn measure(device: &Device, dtypes: &[DType]) -> Option<DeviceRates> {
    DeviceRates::measure(device, dtypes).ok()
}

/// Returns the rates for matmuls in these precisions.
pub fn of_precisions(device: &Device, precisions: &[Precision]) -> Option<DeviceRates> {
    let mut dtypes: Vec<DType> = precisions.iter().map(|one| one.dtype()).collect();
    dtypes.dedup();
    measure(device, &dtypes)
}

/// Returns the matmul rates for a report's header: `448 GFLOP/s in f32, 900 GFLOP/s in bf16`.
pub fn header(rates: &DeviceRates) -> String {
    let all = rates.matmul_flops.iter();
    let all = all.map(|(dtype, rate)| format!("{:.0} GFLOP/s in {}", rate / 1e9, dtype.as_str()));
    all.collect::<Vec<_>>().join(", ")
}
