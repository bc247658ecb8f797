//! The kernels of a GPU while a profiler runs, with the ranges that launched them.

use super::recording::Kernel;
use crate::hardware::cupti::activity::{Activity, Collecting};
use crate::{Error, Result};
use candle_core::Device;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A range's number has the lower bits of the id that CUPTI is given, the profiler's the others: a range that an
/// earlier one has left open is none of this one's.
const NUMBER_BITS: u32 = 40;

/// What a profiler is told of a GPU's work.
pub(super) struct Watch {
    context: Arc<CudaContext>,
    collecting: Collecting,
    profiler: u64,
    /// One moment by both clocks.
    now: (Instant, u64),
}

/// Has the kernels of `device` collected; `None` where it is no GPU of NVIDIA's.
pub(super) fn watch(device: &Device) -> Result<Option<Watch>> {
    static PROFILERS: AtomicU64 = AtomicU64::new(0);
    let Device::Cuda(gpu) = device else {
        return Ok(None);
    };
    let context = gpu.cuda_stream().context().clone();
    context.synchronize().w()?; // what was launched before is not this recording's
    let collecting = Collecting::start()?;
    Ok(Some(Watch {
        now: (Instant::now(), collecting.now()?),
        context,
        collecting,
        profiler: PROFILERS.fetch_add(1, Ordering::Relaxed),
    }))
}

impl Watch {
    /// Waits for all streams.
    pub fn wait(&self) {
        let _ = self.context.synchronize(); // an error there is the next op's to report
    }

    /// The calling thread enters a range.
    pub fn enter(&self, number: usize) {
        self.collecting
            .enter(self.profiler << NUMBER_BITS | number as u64);
    }

    /// And leaves it.
    pub fn leave(&self) {
        self.collecting.leave();
    }

    /// What has run, in order; times are from `start`.
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
                    "CUPTI tells of {} kernels, and of none what launched it",
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
