//! The memory that an example may use, and the allocator where that is hardly more than a run needs.

use candle_core::Device;
use tallow::Result;
use tallow::bench::EndToEnd;
use tallow::memory::system;
use tallow::precision::Precision;

/// The bytes that runs in these precisions may use on `device`: the limit of the flag in GiB, or what is available once
/// all threads have what they keep for products.
pub fn available_bytes(
    device: &Device,
    limit_gib: Option<f64>,
    precisions: &[Precision],
) -> Result<Option<u64>> {
    if device.is_cpu() {
        for precision in precisions {
            system::reserve_scratch(*precision)?;
        }
    }
    let limit = limit_gib.map(super::gib_bytes);
    Ok(limit.or_else(|| tallow::hardware::available_bytes_on(device)))
}

/// Has blocks come from the system one by one if one of the runs fits, and needs most of the memory on the CPU.
pub fn fit_allocator<'r>(device: &Device, runs: impl IntoIterator<Item = &'r EndToEnd>) {
    for run in runs {
        if let (Some(available_bytes), Ok(estimate)) = (run.available_bytes, run.estimate(device)) {
            fit_allocator_to(device, estimate.peak_bytes, available_bytes);
        }
    }
}

/// As [`fit_allocator`], for a run that needs `wanted_bytes`.
///
/// mimalloc rounds blocks up, and keeps freed pages that no later block may fit: together up to half of what a step
/// has allocated. Blocks from the system take the pages that they need, and more time.
pub fn fit_allocator_to(device: &Device, wanted_bytes: u64, available_bytes: u64) {
    let is_tight = wanted_bytes.saturating_add(wanted_bytes / 2) > available_bytes;
    if device.is_cpu() && is_tight && wanted_bytes <= available_bytes {
        super::take_blocks_from_the_system();
    }
}
