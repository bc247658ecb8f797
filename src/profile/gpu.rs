//! A GPU's kernels while a profiler runs, with the ranges that launched them.

use super::recording::Kernel;
use crate::hardware::cupti::activity::{Activity, Collecting};
use crate::{Error, Result};
use candle_core::Device;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// An id passed to CUPTI has the range's number in its lower bits and the profiler's in the others. A range left open
/// by an earlier profiler is thus not mistaken for one of this profiler.
const NUMBER_BITS: u32 = 40;

/// The GPU side of a running profiler.
pub(super) struct Collector {
    context: Arc<CudaContext>,
    collecting: Collecting,
    profiler: u64,
    /// One point in time on both clocks: the host's and CUPTI's.
    now: (Instant, u64),
}

/// Starts to collect the kernels of `device`; `None` for a device that is not an NVIDIA GPU.
pub(super) fn start(device: &Device) -> Result<Option<Collector>> {
    static PROFILERS: AtomicU64 = AtomicU64::new(0);
    let Device::Cuda(gpu) = device else {
        return Ok(None);
    };
    let context = gpu.cuda_stream().context().clone();
    context.synchronize().w()?; // kernels launched before are not of this recording
    let collecting = Collecting::start()?;
    Ok(Some(Collector {
        now: (Instant::now(), collecting.now()?),
        context,
        collecting,
        profiler: PROFILERS.fetch_add(1, Ordering::Relaxed),
    }))
}

impl Collector {
    /// Waits for all streams.
    pub fn wait(&self) {
        let _ = self.context.synchronize(); // errors are reported by the next op
    }

    pub fn enter(&self, number: usize) {
        self.collecting
            .enter(self.profiler << NUMBER_BITS | number as u64);
    }

    pub fn leave(&self) {
        self.collecting.leave();
    }

    /// Returns the kernels in the order in which they began; times are from `start`.
    pub fn finish(self, start: Instant) -> Result<Vec<Kernel>> {
        self.context.synchronize().w()?;
        let (moment, by_cupti) = self.now;
        let before_start = start.saturating_duration_since(moment).as_nanos() as i128;
        let ns = |cupti: u64| {
            let ns = i128::from(cupti) - i128::from(by_cupti) - before_start;
            u64::try_from(ns).unwrap_or_default()
        };
        let profiler = self.profiler;
        let range = |id: u64| {
            let number = id & ((1 << NUMBER_BITS) - 1);
            (id >> NUMBER_BITS == profiler).then_some(number as usize)
        };
        let activities = self.collecting.finish()?;
        let launched = activities.iter().filter_map(|activity| activity.launcher);
        if !activities.is_empty() && launched.count() == 0 {
            return Err(Error::Order {
                op: "Profiler::finish",
                problem: format!(
                    "expected launch ids from CUPTI, got {} kernels without one",
                    activities.len()
                ),
                hint: "use Profiler::start_waiting_for, which times ops without it".into(),
            });
        }
        let activities = activities.into_iter();
        let kernel = |activity: Activity| Kernel {
            name: activity.name,
            stream: activity.stream,
            start_ns: ns(activity.start),
            end_ns: ns(activity.end),
            grid: activity.extents.map(|[grid, _]| grid),
            block: activity.extents.map(|[_, block]| block),
            span: activity.launcher.and_then(range),
        };
        let mut kernels: Vec<Kernel> = activities.map(kernel).collect();
        kernels.sort_by_key(|kernel| (kernel.start_ns, kernel.end_ns));
        Ok(kernels)
    }
}
