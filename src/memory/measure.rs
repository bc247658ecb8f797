//! Memory measured while a step runs: by a device's counters, and by a run of what the estimate predicts.

use super::workload::with_context_of;
use super::{Mode, Workload, estimate, tracker};
use crate::hardware::cuda::{Counter, pool_bytes, reset_pool_peaks, trim_pool};
use crate::model::{TransformerConfig, TransformerLM};
use crate::optim::{GradScaler, GradScalerConfig, Optimizer, usual_groups};
use crate::{Error, Result, backward, hardware, nn, no_grad, ops};
use candle_core::{DType, Device, Tensor};
use serde::Serialize;

/// Reads the counters of a device's memory, in bytes; each is `None` without counters.
///
/// On the CPU they are those of the [`tracker`], if it is installed: all allocations of the process. On CUDA they are
/// those of the GPU's memory pool, from which tensors of this process are allocated: PyTorch's `memory_allocated`,
/// `max_memory_allocated` and `max_memory_reserved`. The workspace that a planned step passes to cuBLASLt
/// ([`Plan::workspace_bytes`](crate::compile::Plan::workspace_bytes)) is from the pool and included. What cuBLAS
/// allocates itself, as for eager matmuls, is not.
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
    /// Creates the meter of `device`.
    pub fn new(device: &Device) -> Self {
        let device = device.clone();
        Self { device }
    }

    /// Waits until dropped tensors are freed, and returns the pool's unused memory to the driver. The next run's peaks
    /// then exclude memory of an earlier run, and memory is free for allocations outside of the pool.
    pub(crate) fn settle(&self) -> Result<()> {
        match &self.device {
            Device::Cuda(_) => Ok(trim_pool(&self.device)?),
            other => Ok(other.synchronize()?),
        }
    }

    /// Returns the bytes in use now.
    pub fn current_bytes(&self) -> Option<u64> {
        self.counter(tracker::current_bytes, Counter::Used)
    }

    /// Returns the peak of bytes in use since [`reset_peak`](Self::reset_peak).
    pub fn peak_bytes(&self) -> Option<u64> {
        self.counter(tracker::peak_bytes, Counter::UsedPeak)
    }

    /// Returns the peak of bytes reserved by the pool, used or not, since [`reset_peak`](Self::reset_peak): CUDA only.
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

    /// Resets the peaks to the bytes in use now.
    pub fn reset_peak(&self) {
        match &self.device {
            Device::Cpu => tracker::reset_peak(),
            // Without the pool's counters `peak_bytes` is `None` too.
            Device::Cuda(_) => drop(reset_pool_peaks(&self.device)),
            Device::Metal(_) => {}
        }
    }
}

/// Memory counted by [`measure`], in bytes requested of the allocator: weights, optimizer state and inputs included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Measured {
    /// Bytes alive when forward was done, before backward.
    pub after_forward_bytes: u64,
    /// The peak.
    pub peak_bytes: u64,
}

/// Runs on the CPU what [`estimate`](crate::memory::estimate()) predicts, and counts its memory.
///
/// It creates a new model and runs it on equal tokens (no size depends on their values). As in the estimate, drawing
/// the weights is not counted. All other allocations of the process count too, so run nothing else meanwhile.
///
/// Runs are repeated until one leaves nothing allocated, 3 times at most, and then once more to count. Memory that
/// kernels keep for later calls (0.75 MiB a thread for packing, 2.5 in half precision) is therefore not counted.
///
/// ```
/// use std::alloc::System;
/// use tallow::memory::{Workload, estimate, measure, tracker::Tracker};
/// use tallow::model::TransformerConfig;
///
/// #[global_allocator]
/// static ALLOCATOR: Tracker<System> = Tracker::new(System);
///
/// let config = TransformerConfig {
///     d_model: 64,
///     d_ff: 128,
///     num_heads: 4,
///     vocab_size: 500,
///     ..Default::default()
/// };
/// let workload = Workload { batch_size: 4, sequence_length: 128, ..Default::default() };
/// let (plan, run) = (estimate(&config, &workload)?, measure(&config, &workload)?);
/// assert!(plan.peak_bytes.abs_diff(run.peak_bytes) < 1 << 20);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Order`] in a binary without a [`Tracker`](tracker::Tracker); [`Error::OutOfMemory`] if the estimate exceeds
/// the available memory; the errors of `estimate` and of the run.
pub fn measure(config: &TransformerConfig, workload: &Workload) -> Result<Measured> {
    check_available(config, workload)?;
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

/// The most warm-up runs. Threads allocate their buffers of a kernel one after another.
const WARM_UPS: usize = 3;

fn current_bytes() -> Result<u64> {
    tracker::current_bytes().ok_or_else(|| Error::Order {
        op: "memory::measure",
        problem: "this binary has no allocator that counts".into(),
        hint: "make memory::tracker::Tracker its #[global_allocator]".into(),
    })
}

/// Refuses a run that does not fit, which the system would end by killing the process.
fn check_available(config: &TransformerConfig, workload: &Workload) -> Result<()> {
    let wanted_bytes = estimate(config, workload)?.peak_bytes;
    hardware::check_available("memory::measure", wanted_bytes, hardware::available_bytes())
}

/// Returns a closure that runs a step and returns the bytes alive when forward is done. Model and optimizer exist
/// before.
fn step(
    config: &TransformerConfig,
    workload: &Workload,
) -> Result<impl FnMut() -> Result<u64> + use<>> {
    let config = with_context_of(config, workload.sequence_length);
    let (mode, precision) = (workload.mode, workload.precision);
    let weights = nn::seeded(0, precision.parameter_dtype(), &Device::Cpu);
    let model = TransformerLM::from_var_builder(&config, weights)?;
    let model = model.with_attention(workload.attention)?;
    let model = model.with_checkpointing(workload.checkpointing);
    let rule = workload.optimizer;
    let groups = || usual_groups(model.parameters(), rule);
    let optimizer = (mode == Mode::TrainStep).then(|| Optimizer::with_groups(groups()));
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
