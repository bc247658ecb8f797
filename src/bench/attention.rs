//! Attention, alone or in its layer, timed by phase, with its memory.

use super::stopwatch::settled_meter;
use super::{Execution, PhaseTime, Step, Stopwatch};
use crate::attention::{Algorithm, flash};
use crate::backward::backward_from_ones;
use crate::report::format_mib;
use crate::{Error, Result, hardware};
use candle_core::{DType, Device};

mod result;
mod workload;
pub use result::{AttentionMemory, AttentionResult, AttentionStatus};
pub use workload::AttentionTask;
use workload::Pass;

/// One measurement of attention, alone or in its layer, and of its gradients.
///
/// ```
/// use tallow::bench::{AttentionRun, AttentionTask};
/// use tallow::memory::AttentionWorkload;
///
/// let workload = AttentionWorkload {
///     batch_size: 2,
///     sequence_length: 32,
///     head_dim: 8,
///     ..Default::default()
/// };
/// let run = AttentionRun {
///     task: AttentionTask::Alone(workload),
///     warmup_steps: 1,
///     iterations: 3,
///     ..Default::default()
/// };
/// let result = run.run(&tallow::device("cpu")?, |_, _| ())?;
/// let [forward, backward, both] = &result.times[..] else { unreachable!() };
/// assert_eq!(both.statistics.n, 3);
/// assert!(both.statistics.max_ms > forward.statistics.min_ms + backward.statistics.min_ms);
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionRun {
    /// The computation.
    pub task: AttentionTask,
    /// Eager, or planned for its shape by a [`compile::Step`](crate::compile::Step) on the CPU or a CUDA GPU: attention
    /// alone in f32, bf16 or f16, a layer with weights in f32.
    pub execution: Execution,
    /// Steps before the measured ones.
    pub warmup_steps: usize,
    /// Measured steps.
    pub iterations: usize,
    /// Fewer steps are measured where all of them take longer than this, as in [`Stopwatch::time_budget_ms`]. A run is
    /// skipped if one step at the rate `peak_flops` takes longer.
    pub time_budget_ms: Option<f64>,
    /// The seed of inputs and weights.
    pub seed: u64,
    /// The FLOP/s that MFU is relative to, such as a [measured rate of
    /// matmuls](crate::profile::DeviceRates::matmul_rate); `None` if unknown.
    pub peak_flops: Option<f64>,
    /// The memory limit: a run that needs more is not started. `None` for no limit.
    pub available_bytes: Option<u64>,
}

/// Eager attention alone: 5 steps for warm-up and 100 measured, no limits.
impl Default for AttentionRun {
    fn default() -> Self {
        Self {
            task: AttentionTask::default(),
            execution: Execution::Eager,
            warmup_steps: 5,
            iterations: 100,
            time_budget_ms: None,
            seed: 0,
            peak_flops: None,
            available_bytes: None,
        }
    }
}

impl AttentionRun {
    /// Times forward, backward and both in the same steps. Forward keeps its graph; backward starts from a gradient of
    /// ones. `on_step` receives each step and its time in ms. A run that does not fit in memory, is not supported or
    /// takes too long is a result with that [status](AttentionStatus), and nothing was allocated for it.
    ///
    /// FLOPs do not depend on the algorithm. Attention counts 4 Dh for each head and each pair of query and key that
    /// the mask leaves, and twice that in backward: flash's recomputation and naive's masked scores are not counted. A
    /// layer adds 8 B T D^2 for the projections, and 10 B T D^2 in backward, since x gets no gradient.
    ///
    /// # Errors
    /// A size of 0; heads that do not divide D; the ops' errors.
    pub fn run(&self, device: &Device, on_step: impl FnMut(Step, f64)) -> Result<AttentionResult> {
        let labels = self.task.labels();
        let sizes = [
            ("batch_size", labels.batch_size),
            ("heads", labels.heads),
            ("sequence_length", labels.context_length),
            ("head_dim", labels.head_dim.unwrap_or(1)),
            ("d_model", labels.d_model.unwrap_or(1)),
            ("iterations", self.iterations),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(Error::config("attention benchmark", field, "0")
                .must_be("at least 1", "there is nothing to measure"));
        }
        let predicted = self.predict(device)?;
        if predicted.status != AttentionStatus::Ok {
            return Ok(predicted);
        }
        match self.measure(device, on_step) {
            Err(error) if error.is_out_of_memory() => Ok(AttentionResult {
                status: AttentionStatus::OutOfMemory,
                reason: Some(error.to_string()),
                // The bytes available once the run has freed its memory.
                available_bytes: hardware::available_bytes_on(device).or(self.available_bytes),
                ..predicted
            }),
            measured => {
                let (times, memory) = measured?;
                let is_short = times[0].statistics.n < self.iterations;
                Ok(AttentionResult {
                    reason: is_short.then(|| "the time budget is spent".into()),
                    times,
                    memory,
                    ..predicted
                })
            }
        }
    }

    /// Returns the result of the first size, doubled from the smallest, that does not fit in the memory available: T of
    /// attention alone, D of a layer. `None` if the memory is unknown, or the algorithm does not support such heads.
    pub fn limit(&self, device: &Device) -> Option<AttentionResult> {
        self.available_bytes?;
        let sizes = (0..usize::BITS).map(|power| Self {
            task: self.task.of_size(1 << power),
            ..self.clone()
        });
        let mut predicted = sizes.map_while(|run| {
            let result = run.predict(device).ok();
            result.filter(|result| result.status != AttentionStatus::Unsupported)
        });
        predicted.find(|result| result.status == AttentionStatus::OutOfMemory)
    }

    /// Returns the algorithm's name, or `planned` and `planned-flash`.
    pub fn implementation(&self) -> &'static str {
        match (self.execution, self.task.attention().algorithm) {
            (Execution::Eager, algorithm) => algorithm.name(),
            (Execution::Planned, Algorithm::Naive) => "planned",
            (Execution::Planned, Algorithm::Flash) => "planned-flash",
        }
    }

    /// Returns a result without times: the labels, the predicted memory, and why the run cannot be measured, if so.
    fn predict(&self, device: &Device) -> Result<AttentionResult> {
        let mut result = AttentionResult {
            implementation: self.implementation(),
            warmup_steps: self.warmup_steps,
            iterations: self.iterations,
            time_budget_ms: self.time_budget_ms,
            available_bytes: self.available_bytes,
            reason: self.unsupported(device),
            ..self.task.labels()
        };
        if result.reason.is_some() {
            result.status = AttentionStatus::Unsupported;
            return Ok(result);
        }
        let breakdown = self.task.breakdown(self.execution, device)?;
        let flops: f64 = self.task.flops().iter().sum();
        let least_ms = self.peak_flops.map_or(0.0, |rate| 1e3 * flops / rate);
        let budget_ms = self.time_budget_ms.unwrap_or(f64::INFINITY);
        if let Some(bytes) = self.available_bytes
            && breakdown.peak_bytes() > bytes
        {
            result.status = AttentionStatus::OutOfMemory;
            result.reason = Some(format!("{breakdown}; {} available", format_mib(bytes)));
        } else if least_ms > budget_ms {
            result.status = AttentionStatus::OverTimeBudget;
            result.reason = Some(format!(
                "a step takes {least_ms:.0} ms at the rate of large matmuls, the budget is {budget_ms:.0} ms"
            ));
        }
        result.breakdown = Some(breakdown);
        Ok(result)
    }

    /// Returns why the algorithm or the execution does not support the task.
    fn unsupported(&self, device: &Device) -> Option<String> {
        let attention = self.task.attention();
        let (is_plannable, rule) = match &self.task {
            AttentionTask::Alone(own) => (
                matches!(own.dtype, DType::F32 | DType::BF16 | DType::F16),
                "attention is planned in f32, bf16 or f16",
            ),
            AttentionTask::Layer(layer) => (
                layer.dtype == DType::F32,
                "a layer is planned with weights in f32",
            ),
        };
        let is_planned = self.execution == Execution::Planned;
        if is_planned && (!is_plannable || device.is_metal()) {
            return Some(format!("{rule}, on the CPU or a CUDA GPU"));
        }
        let (head_dim, most) = (attention.head_dim, flash::MAX_HEAD_DIM);
        let multiple = match is_planned && device.is_cuda() {
            true => 16 / attention.dtype.size_in_bytes(),
            false => 1,
        };
        let wants = match attention.algorithm {
            Algorithm::Flash if head_dim > most => format!("flash takes heads of at most {most}"),
            Algorithm::Flash if !head_dim.is_multiple_of(multiple) => {
                format!("flash planned on a GPU takes heads of a multiple of {multiple}")
            }
            _ => return None,
        };
        Some(format!("{wants}, not {head_dim}"))
    }

    /// Returns the times of the phases, and the memory if it is counted.
    fn measure(
        &self,
        device: &Device,
        on_step: impl FnMut(Step, f64),
    ) -> Result<(Vec<PhaseTime>, Option<AttentionMemory>)> {
        let attention = self.task.attention();
        let meter = settled_meter(device, attention.dtype.size_in_bytes() == 2)?;
        let now = || meter.current_bytes().unwrap_or_default();
        let before = now();
        let mut pass = self.task.prepare(self.seed, self.execution, device)?;
        let resident = now().saturating_sub(before);
        let mut memory = AttentionMemory {
            model_bytes: resident,
            ..Default::default()
        };
        let timings = Stopwatch::new(device)
            .warmup(self.warmup_steps)
            .time_budget_ms(self.time_budget_ms)
            .on_step(on_step)
            .measure_phases(self.iterations, |lap| {
                // Relative to the start of the step: memory that kernels keep for later steps does not count.
                let start = now();
                let grown = |bytes: u64| resident + bytes.saturating_sub(start);
                let peak = || grown(meter.peak_bytes().unwrap_or_default());
                meter.reset_peak();
                let gradients = match &mut pass {
                    Pass::Eager(forward) => {
                        let output = lap.time("forward", forward)?;
                        memory.peak_bytes[0] = peak();
                        memory.before_backward_bytes = grown(now());
                        meter.reset_peak();
                        Some(lap.time("backward", move || backward_from_ones(output))?)
                    }
                    Pass::Planned(step, batch, d_output) => {
                        step.forward_backward_from(&*batch, d_output)?;
                        lap.add_phases(step.phase_times()?);
                        memory.peak_bytes[0] = peak();
                        None
                    }
                };
                memory.peak_bytes[1] = peak();
                memory.model_forward_backward_bytes = grown(now());
                Ok(gradients)
            })?;
        if let Pass::Planned(step, ..) = &pass
            && let Some(plan) = step.plan()
        {
            // The arena is allocated throughout; only the buffers still read count.
            let resident = resident.saturating_sub(plan.arena_bytes());
            let alive = |call| resident + plan.live_bytes_before(call);
            memory.model_bytes = resident;
            memory.before_backward_bytes = alive(plan.backward_begins());
            memory.model_forward_backward_bytes = alive(plan.backward_ends());
        }
        memory.peak_bytes[2] = memory.peak_bytes[0].max(memory.peak_bytes[1]);
        let tokens = attention.batch_size as f64 * attention.sequence_length as f64;
        let [forward, backward] = self.task.flops();
        let phases = timings.phases.into_iter().map(|(_, timing)| timing);
        let phases = phases.chain([timings.whole]);
        let times = phases.zip([forward, backward, forward + backward]);
        let times = times.map(|(timing, flops)| {
            let mut time = PhaseTime::new(timing, Some(tokens), Some(flops))?;
            time.set_mfu(self.peak_flops);
            Ok(time)
        });
        let times = times.collect::<Result<_>>()?;
        Ok((times, meter.current_bytes().map(|_| memory)))
    }
}
