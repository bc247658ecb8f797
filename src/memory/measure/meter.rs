//! What tensors take, by the counter of the device that they are on.

use super::tracker;
use crate::Result;
use crate::hardware::cuda::{Counter, pool_bytes, reset_pool_peaks, trim_pool};
use candle_core::Device;

/// The counters of a device's memory, in bytes; `None` without counters.
///
/// On the CPU they are the [`tracker`]'s, where it is installed: all of the process's allocations. On CUDA they are
/// those of the GPU's memory pool, which tensors of this process come from: what PyTorch calls `memory_allocated`,
/// `max_memory_allocated` and `max_memory_reserved`. cuBLAS's workspace is not among them.
///
/// ```
/// use candle_core::Device;
/// use tallow::memory::Meter;
///
/// let meter = Meter::new(&Device::Cpu);
/// meter.reset_peak();
/// // `None` here: this program has no tracking allocator.
/// assert_eq!(meter.peak_bytes(), None);
/// ```
#[derive(Clone, Debug)]
pub struct Meter {
    device: Device,
}

impl Meter {
    /// The meter of `device`.
    pub fn new(device: &Device) -> Self {
        let device = device.clone();
        Self { device }
    }

    /// Waits until what was dropped is given back, to the driver too: what was held for an earlier run is not in the
    /// next one's peaks, and not missing where the driver is asked for memory past the pool.
    pub(crate) fn settle(&self) -> Result<()> {
        match &self.device {
            Device::Cuda(_) => Ok(trim_pool(&self.device)?),
            other => Ok(other.synchronize()?),
        }
    }

    /// What is taken now.
    pub fn current_bytes(&self) -> Option<u64> {
        match &self.device {
            Device::Cpu => tracker::current_bytes(),
            Device::Cuda(_) => pool_bytes(&self.device, Counter::Used),
            Device::Metal(_) => None,
        }
    }

    /// The most that was taken at once since [`reset_peak`](Self::reset_peak).
    pub fn peak_bytes(&self) -> Option<u64> {
        match &self.device {
            Device::Cpu => tracker::peak_bytes(),
            Device::Cuda(_) => pool_bytes(&self.device, Counter::UsedPeak),
            Device::Metal(_) => None,
        }
    }

    /// The most that the pool held, used or not, since [`reset_peak`](Self::reset_peak): CUDA only.
    pub fn reserved_peak_bytes(&self) -> Option<u64> {
        match &self.device {
            Device::Cuda(_) => pool_bytes(&self.device, Counter::ReservedPeak),
            _ => None,
        }
    }

    /// Resets the peaks to what is taken now.
    pub fn reset_peak(&self) {
        match &self.device {
            Device::Cpu => tracker::reset_peak(),
            // Where the pool has no counters the peak is `None` too.
            Device::Cuda(_) => drop(reset_pool_peaks(&self.device)),
            Device::Metal(_) => {}
        }
    }
}
