//! The operating system's counters of this process: resident memory, page faults, threads.
//!
//! What the machine has is in [`hardware`](crate::hardware).
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

/// The most memory this process has had resident, in bytes, since it began or since [`reset_resident_peak`].
#[cfg(target_os = "linux")]
pub fn resident_peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// The most memory this process has had resident, in bytes, since it began.
#[cfg(all(unix, not(target_os = "linux")))]
pub fn resident_peak_bytes() -> Option<u64> {
    let usage = usage()?;
    // Bytes on Apple's systems, KiB elsewhere.
    let unit = if cfg!(target_vendor = "apple") {
        1
    } else {
        1024
    };
    u64::try_from(usage.ru_maxrss).ok().map(|peak| peak * unit)
}

/// The most memory this process has had resident: not known here.
#[cfg(not(unix))]
pub fn resident_peak_bytes() -> Option<u64> {
    None
}

/// Starts the threads of the current pool, and has all of them allocate what they keep for matmuls in `precision`: what
/// is [available](crate::hardware::available_bytes) afterwards is a step's own.
///
/// # Errors
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
pub fn reserve_scratch(precision: Precision) -> Result<()> {
    ops::reserve_scratch(precision.dtype() != DType::F32)
}

/// Lets the resident peak begin again at what is resident now. False where the system cannot (Linux can): then
/// [`resident_peak_bytes`] is the peak since the process began.
pub fn reset_resident_peak() -> bool {
    cfg!(target_os = "linux") && std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// How often this process has met a page that was not there yet, since it began.
#[cfg(unix)]
pub fn page_faults() -> Option<u64> {
    let usage = usage()?;
    u64::try_from(usage.ru_minflt + usage.ru_majflt).ok()
}

#[cfg(unix)]
fn usage() -> Option<libc::rusage> {
    // SAFETY: getrusage fills the zeroed struct that it is given.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::getrusage(libc::RUSAGE_SELF, &mut usage) == 0).then_some(usage)
    }
}

/// How often this process has met a page that was not there yet: not known here.
#[cfg(not(unix))]
pub fn page_faults() -> Option<u64> {
    None
}

/// How many threads this process has, where the system says so (Linux does).
pub fn threads() -> Option<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    u64::try_from(tasks.count()).ok()
}
