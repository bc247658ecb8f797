//! The operating system's counters of this process: resident memory, page faults, threads.
//!
//! [`hardware`](crate::hardware) has those of the machine.
//!
//! ```
//! use tallow::memory::system;
//!
//! let touched = vec![1u8; 1 << 20];
//! if let Some(peak) = system::resident_peak_bytes() {
//!     assert!(peak > touched.len() as u64);
//! }
//! ```

use crate::precision::Precision;
use crate::{Result, ops};
use candle_core::DType;

/// Returns the peak of this process's resident memory, in bytes, since its start or [`reset_resident_peak`].
#[cfg(target_os = "linux")]
pub fn resident_peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// Returns the peak of this process's resident memory, in bytes, since its start.
#[cfg(all(unix, not(target_os = "linux")))]
pub fn resident_peak_bytes() -> Option<u64> {
    let usage = usage()?;
    // The unit is bytes on Apple's systems and KiB elsewhere.
    let unit = if cfg!(target_vendor = "apple") {
        1
    } else {
        1024
    };
    u64::try_from(usage.ru_maxrss).ok().map(|peak| peak * unit)
}

/// Returns `None`: the peak of resident memory is not known on this system.
#[cfg(not(unix))]
pub fn resident_peak_bytes() -> Option<u64> {
    None
}

/// Starts the threads of the current pool and allocates the buffers that all of them keep for matmuls in `precision`.
/// Call it before [`available_bytes`](crate::hardware::available_bytes), whose result then is memory for the tensors of
/// a step alone.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub fn reserve_scratch(precision: Precision) -> Result<()> {
    ops::reserve_scratch(precision.dtype() != DType::F32)
}

/// Resets the resident peak to what is resident now, and returns whether the system can do this (Linux can). Otherwise
/// [`resident_peak_bytes`] stays the peak since the process's start.
pub fn reset_resident_peak() -> bool {
    cfg!(target_os = "linux") && std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// Returns the number of page faults of this process since its start.
#[cfg(unix)]
pub fn page_faults() -> Option<u64> {
    let usage = usage()?;
    u64::try_from(usage.ru_minflt + usage.ru_majflt).ok()
}

#[cfg(unix)]
fn usage() -> Option<libc::rusage> {
    // SAFETY: getrusage fills the zeroed struct.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::getrusage(libc::RUSAGE_SELF, &mut usage) == 0).then_some(usage)
    }
}

/// Returns `None`: the number of page faults is not known on this system.
#[cfg(not(unix))]
pub fn page_faults() -> Option<u64> {
    None
}

/// Returns the number of threads of this process, if the system reports it (Linux does).
pub fn threads() -> Option<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    u64::try_from(tasks.count()).ok()
}
