//! Memory measured while a step runs: by the counter of a device, and by a run of what is predicted.

use super::{Mode, Workload, estimate, tracker};
use crate::hardware::cuda::{Counter, pool_bytes, reset_pool_peaks, trim_pool};
use crate::model::{TransformerConfig, TransformerLM};
use crate::optim::{AdamW, AdamWConfig, GradScaler, GradScalerConfig};
use crate::{Error, Result, backward, hardware, nn, no_grad, ops};
use candle_core::{DType, Device, Tensor};
use serde::Serialize;

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
        self.counter(tracker::current_bytes, Counter::Used)
    }

    /// The most that was taken at once since [`reset_peak`](Self::reset_peak).
    pub fn peak_bytes(&self) -> Option<u64> {
        self.counter(tracker::peak_bytes, Counter::UsedPeak)
    }

    /// The most that the pool held, used or not, since [`reset_peak`](Self::reset_peak): CUDA only.
    pub fn reserved_peak_bytes(&self) -> Option<u64> {
        self.counter(|| None, Counter::ReservedPeak)
    }

    fn counter(&self, of_host: fn() -> Option<u64>, of_pool: Counter) -> Option<u64> {
        match &self.device {
            Device::Cpu => of_host(),
            Device::Cuda(_) => pool_bytes(&self.device, of_pool),
            Device::Metal(_) => None,
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

/// What [`measure`] counted, in bytes requested of the allocator: weights, optimizer state and inputs included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Measured {
    /// Alive when forward was done, before backward.
    pub after_forward_bytes: u64,
    /// The most that was alive at once.
    pub peak_bytes: u64,
}

/// Runs on the CPU what [`estimate`](crate::memory::estimate()) predicts, and counts its memory.
///
/// It runs a new model, on tokens that are all the same (no size depends on their values). As in the estimate,
/// attention and checkpointing are the workload's, and drawing the weights is not counted. Whatever else the process
/// allocates meanwhile is: run nothing beside it.
///
/// It runs until a run leaves nothing behind, and counts the last: what kernels keep for their next calls (0.75 MiB a
/// thread for packing, 2.5 in half precision) is no part of a step.
///
/// ```
/// use std::alloc::System;
/// use tallow::memory::{Workload, estimate, measure, tracker::Tracker};
/// use tallow::model::TransformerConfig;
///
/// #[global_allocator]
/// static ALLOCATOR: Tracker<System> = Tracker::new(System);
///
/// let config = TransformerConfig { d_model: 64, d_ff: 128, num_heads: 4, vocab_size: 500, ..Default::default() };
/// let workload = Workload { batch_size: 4, sequence_length: 128, ..Default::default() };
/// let (plan, run) = (estimate(&config, &workload)?, measure(&config, &workload)?);
/// assert!(plan.peak_bytes.abs_diff(run.peak_bytes) < 1 << 20);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A binary without a [`Tracker`](tracker::Tracker), more than is available by the estimate, whatever that refuses,
/// and what the run meets.
pub fn measure(config: &TransformerConfig, workload: &Workload) -> Result<Measured> {
    check_room(config, workload)?;
    ops::reserve_scratch(workload.precision.dtype() != DType::F32)?;
    let before = current_bytes()?;
    let mut step = step(config, workload)?;
    let ready_bytes = current_bytes()?.saturating_sub(before);
    for _ in 0..WARM_UPS {
        let start = current_bytes()?;
        step()?;
        if current_bytes()? <= start {
            break;
        }
    }
    tracker::reset_peak();
    let start = current_bytes()?;
    let after_forward_bytes = step()?;
    let peak_bytes = tracker::peak_bytes().unwrap_or(start);
    let beyond = |bytes: u64| ready_bytes + bytes.saturating_sub(start);
    Ok(Measured {
        after_forward_bytes: beyond(after_forward_bytes),
        peak_bytes: beyond(peak_bytes),
    })
}

/// Runs at most before the one that counts. Threads meet a kernel's buffers one after another.
const WARM_UPS: usize = 3;

fn current_bytes() -> Result<u64> {
    tracker::current_bytes().ok_or_else(|| Error::Order {
        op: "memory::measure",
        problem: "this binary has no allocator that counts".into(),
        hint: "make memory::tracker::Tracker its #[global_allocator]".into(),
    })
}

/// Refuses what would end in the system's killing of the process.
fn check_room(config: &TransformerConfig, workload: &Workload) -> Result<()> {
    let wanted_bytes = estimate(config, workload)?.peak_bytes;
    hardware::check_available("memory::measure", wanted_bytes, hardware::available_bytes())
}

/// A run on what is there before it; returns the bytes that are alive when forward is done.
fn step(
    config: &TransformerConfig,
    workload: &Workload,
) -> Result<impl FnMut() -> Result<u64> + use<>> {
    let config = TransformerConfig {
        attention: workload.attention,
        checkpointing: workload.checkpointing,
        context_length: config.context_length.max(workload.sequence_length),
        ..config.clone()
    };
    let (mode, precision) = (workload.mode, workload.precision);
    let weights = nn::seeded(0, precision.parameter_dtype(), &Device::Cpu);
    let model = TransformerLM::from_var_builder(&config, weights)?;
    let adamw = AdamWConfig {
        moments: workload.moments,
        ..Default::default()
    };
    let optimizer = (mode == Mode::TrainStep).then(|| AdamW::new(model.parameters(), adamw));
    let mut optimizer = optimizer.transpose()?;
    let shape = (workload.batch_size, workload.sequence_length);
    let mut scaler = GradScaler::new(GradScalerConfig {
        enabled: precision.dtype() == DType::F16,
        ..Default::default()
    })?;
    let [tokens, targets] = [0; 2].map(|_| Tensor::zeros(shape, DType::U32, &Device::Cpu)); // (B, T)
    let (tokens, targets) = (tokens?, targets?);
    Ok(move || {
        let forward = || precision.run(|| model.forward(&tokens));
        let loss = || precision.run(|| model.loss(&tokens, &targets));
        let out = match mode {
            Mode::Forward => no_grad(forward)?,
            Mode::ForwardKeepingGraph => forward()?,
            Mode::ForwardBackward => loss()?,
            Mode::TrainStep => scaler.scale(&loss()?)?,
        };
        let after_forward_bytes = current_bytes()?;
        if matches!(mode, Mode::ForwardBackward | Mode::TrainStep) {
            let mut gradients = backward(out)?;
            if let Some(optimizer) = &mut optimizer {
                scaler.step(optimizer, &mut gradients)?;
                scaler.update()?;
            }
        }
        Ok(after_forward_bytes)
    })
}
