//! The measured rates of a device, for MFU and floors.

use candle_core::{DType, Device};
use tallow::precision::Precision;
use tallow::profile::DeviceRates;
use tallow::{Error, Result};

/// Returns the device's rates for matmuls in `dtypes`; `None` if memory is too short to measure them.
pub fn measure(device: &Device, dtypes: &[DType]) -> Result<Option<DeviceRates>> {
    match DeviceRates::measure(device, dtypes) {
        Ok(rates) => Ok(Some(rates)),
        Err(Error::OutOfMemory { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the rates for matmuls in these precisions.
pub fn of_precisions(device: &Device, precisions: &[Precision]) -> Result<Option<DeviceRates>> {
    let dtypes: Vec<DType> = precisions.iter().map(|one| one.dtype()).collect();
    measure(device, &dtypes)
}
