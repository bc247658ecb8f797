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
    let dtypes: Vec<DType> = precisions.iter().map(|one| one.dtype()).collect();
    measure(device, &dtypes)
}
