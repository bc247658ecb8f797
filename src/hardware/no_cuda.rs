//! [`super::cuda`] in a build without CUDA.

use candle_core::{Device, Result};

pub(super) fn open(ordinal: usize) -> Result<Device> {
    Device::new_cuda(ordinal) // returns candle's error
}

#[cfg(feature = "report")]
pub(super) fn description(_device: &Device) -> Option<String> {
    None
}

pub(super) fn has_tf32(_device: &Device) -> bool {
    false
}

pub(super) fn available_bytes(_device: &Device) -> Option<u64> {
    None
}

#[derive(Clone, Copy)]
pub(crate) enum Counter {
    Used,
    UsedPeak,
    ReservedPeak,
}

pub(crate) fn pool_bytes(_device: &Device, _which: Counter) -> Option<u64> {
    None
}

pub(crate) fn reset_pool_peaks(_device: &Device) -> Option<()> {
    None
}

pub(crate) fn trim_pool(_device: &Device) -> Result<()> {
    Ok(())
}
