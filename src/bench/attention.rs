//! Attention, alone or in its layer, timed by phase, with its memory.

use super::row::PhaseTime;
use super::stopwatch::settled_meter;
use super::{Execution, LapTimings, Step, Stopwatch};
use crate::attention::{Algorithm, flash};
use crate::backward::backward_from_ones;
use crate::memory::{AttentionWorkload, MemoryBreakdown, smallest_not_fitting};
use crate::report::{Fields, format_mib};
use crate::{Error, Result};
use candle_core::Device;

mod workload;
pub use workload::AttentionTask;
use workload::Pass;

/// The phases, in the order of their rows.
const FORWARD: &str = "forward";
const BACKWARD: &str = "backward";
const WHOLE: &str = "forward+backward";

/// The number of steps, their time limit and their memory limit.
///
/// [`AttentionRun`] has an example.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Steps before the measured ones.
    pub warmup_steps: usize,
    /// Measured steps.
    pub iterations: usize,
    /// Fewer steps are measured where all of them take longer than this, as in
    /// [`Stopwatch::time_budget_ms`](super::Stopwatch::time_budget_ms). A run is skipped if one step at the rate
    /// `peak_flops` takes longer.
    pub time_budget_ms: Option<f64>,
    /// The seed of inputs and weights.
    pub seed: u64,
    /// The FLOP/s that MFU is relative to, such as a [measured rate of
    /// matmuls](crate::profile::DeviceRates::matmul_rate); `None` if unknown.
    pub peak_flops: Option<f64>,
    /// The memory limit: a run that needs more is a row `OOM`. `None` for no limit.
    pub available_bytes: Option<u64>,
}

/// 5 and 100 steps, no limits.
impl Default for Sampling {
    fn default() -> Self {
        Self {
            warmup_steps: 5,
            iterations: 100,
            time_budget_ms: None,
            seed: 0,
            peak_flops: None,
            available_bytes: None,
        }
    }
}

/// One measurement of attention, alone or in its layer, and of its gradients.
///
/// ```
/// use tallow::bench::{AttentionRun, AttentionTask, Sampling};
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
///     sampling: Sampling { warmup_steps: 1, iterations: 3, ..Default::default() },
///     ..Default::default()
/// };
/// let rows = run.run(&tallow::device("cpu")?, |_, _| ())?;
/// assert_eq!(rows.len(), 3); // forward, backward, forward+backward
/// assert_eq!(rows[2].get("n"), Some(&3.into()));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionRun {
    /// The computation.
    pub task: AttentionTask,
    /// The number of steps and the limits.
    pub sampling: Sampling,
    /// Eager, or planned for its shape by a [`compile::Step`](crate::compile::Step) on the CPU or a CUDA GPU: attention
    /// alone in f32, bf16 or f16, a layer with weights in f32.
    pub execution: Execution,
}

impl AttentionRun {
    /// Returns a row each for `forward`, `backward` and `forward+backward`, all three timed in the same steps. Forward
    /// keeps its graph; backward starts from a gradient of ones. `on_step` receives each step and its time in ms.
    ///
    /// A run that was not measured is a single row with a `reason`. Its status is `OOM` (by
    /// [`attention_breakdown`](crate::memory::attention_breakdown), before anything is allocated), `unsupported` (heads
    /// too wide for the algorithm, or a dtype that is not planned) or `over time budget`.
    ///
    /// FLOPs do not depend on the algorithm. Attention counts 4 Dh for each head and each pair of query and key that
    /// the mask leaves, and twice that in backward: flash's recomputation and naive's masked scores are not counted. A
    /// layer adds 8 B T D^2 for the projections, and 10 B T D^2 in backward, since x gets no gradient.
    ///
    /// Memory is measured where a [`Tracker`](crate::memory::tracker::Tracker) is installed, on a GPU by its pool's
    /// counters. `before_backward_bytes` is alive between forward and backward, `peak_bytes` is the peak of the phase;
    /// both include the inputs. A planned run counts its whole arena in `peak_bytes`, and in `before_backward_bytes`
    /// the buffers that backward or the caller still reads.
    ///
    /// A layer's rows also have `model_bytes` (weights and x), `model_forward_bytes` (with the graph),
    /// `model_forward_backward_bytes` (with the gradients, after the graph is freed) and the differences
    /// `forward_bytes` and `backward_bytes`. The last is negative where the graph is larger than the gradients.
    ///
    /// # Errors
    /// A size of 0; heads that do not divide D; the ops' errors.
    pub fn run(&self, device: &Device, on_step: impl FnMut(Step, f64)) -> Result<Vec<Fields>> {
        let mut sizes = self.task.sizes().to_vec();
        sizes.push(("iterations", self.sampling.iterations));
        if let Some((field, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(Error::config("attention benchmark", field, "0")
                .must_be("at least 1", "there is nothing to measure"));
        }
        if let Some(reason) = self.unsupported(&self.task, device) {
            return Ok(vec![self.refused(None, "unsupported", reason)]);
        }
        let breakdown = self.task.breakdown(self.execution, device)?;
        if let Some((status, reason)) = self.refusal(&breakdown) {
            return Ok(vec![self.refused(Some(&breakdown), status, reason)]);
        }
        let (timings, alive) = match self.measure(device, on_step) {
            Err(error) if error.is_out_of_memory() => {
                let mut row = self.refused(Some(&breakdown), "OOM", error.to_string());
                // The bytes available once the run has freed its memory.
                if let Some(bytes) = crate::hardware::available_bytes_on(device) {
                    row.insert("available_bytes", bytes);
                }
                return Ok(vec![row]);
            }
            measured => measured?,
        };
        let attention = self.task.attention();
        let tokens = attention.batch_size as f64 * attention.sequence_length as f64;
        let [forward, backward] = self.task.flops();
        let mut rows = Vec::new();
        for (phase, timing) in timings.phases.iter().chain([&(WHOLE, timings.whole)]) {
            let (flops, peak) = match *phase {
                FORWARD => (forward, alive.map(|alive| alive.forward_peak)),
                BACKWARD => (backward, alive.map(|alive| alive.backward_peak)),
                _ => (forward + backward, alive.map(|alive| alive.peak())),
            };
            let mut row = self.row(Some(&breakdown), phase, "ok");
            if timing.samples_ms.len() < self.sampling.iterations {
                row.insert("reason", "the time budget is spent");
            }
            let mut time = PhaseTime::new(timing.clone(), Some(tokens), Some(flops))?;
            time.set_mfu(self.sampling.peak_flops);
            row.merge(Fields::of(&time)?);
            row.insert(
                "before_backward_bytes",
                alive.map(|alive| alive.before_backward),
            );
            row.insert("peak_bytes", peak);
            if let (AttentionTask::Layer(_), Some(alive)) = (&self.task, alive) {
                row.merge(alive.fields());
            }
            row.insert("breakdown", terms(Some(&breakdown)));
            rows.push(row);
        }
        Ok(rows)
    }

    /// Returns the first size, doubled from the smallest, that does not fit in the memory available on `device`: T of
    /// attention alone, D of a layer. `None` if the memory is unknown, or the algorithm does not support such heads.
    pub fn limit(&self, device: &Device) -> Option<Limit> {
        let available_bytes = self.sampling.available_bytes?;
        let (size, breakdown) = smallest_not_fitting(available_bytes, |size| {
            let task = self.task.of_size(size);
            let unsupported = self.unsupported(&task, device);
            let breakdown = || task.breakdown(self.execution, device).ok();
            unsupported.is_none().then(breakdown)?
        })?;
        let task = self.task.of_size(size);
        let [.., (_, width)] = task.sizes();
        Some(Limit {
            implementation: self.implementation(),
            attention: task.attention(),
            width,
            breakdown,
            available_bytes,
        })
    }

    /// Returns the algorithm's name, or `planned` and `planned-flash`.
    pub fn implementation(&self) -> &'static str {
        match (self.execution, self.task.attention().algorithm) {
            (Execution::Eager, algorithm) => algorithm.name(),
            (Execution::Planned, Algorithm::Naive) => "planned",
            (Execution::Planned, Algorithm::Flash) => "planned-flash",
        }
    }

    /// Returns why the algorithm or the execution does not support a task.
    fn unsupported(&self, task: &AttentionTask, device: &Device) -> Option<String> {
        let attention = task.attention();
        let (head_dim, most) = (attention.head_dim, flash::MAX_HEAD_DIM);
        let multiple = 16 / attention.dtype.size_in_bytes();
        let is_planned = self.execution == Execution::Planned;
        let (is_plannable, rule) = task.is_plannable();
        if is_planned && (!is_plannable || device.is_metal()) {
            return Some(format!("{rule}, on the CPU or a CUDA GPU"));
        }
        match attention.algorithm {
            Algorithm::Flash if head_dim > most => Some(format!(
                "flash takes heads of at most {most}, not {head_dim}"
            )),
            Algorithm::Flash
                if is_planned && device.is_cuda() && !head_dim.is_multiple_of(multiple) =>
            {
                Some(format!(
                    "flash planned on a GPU takes heads of a multiple of {multiple}, not {head_dim}"
                ))
            }
            _ => None,
        }
    }

    /// Returns status and reason of a run over its limits of memory or time, before anything is allocated.
    fn refusal(&self, breakdown: &MemoryBreakdown) -> Option<(&'static str, String)> {
        if let Some(available_bytes) = self.sampling.available_bytes
            && breakdown.peak_bytes() > available_bytes
        {
            let available = format_mib(available_bytes);
            return Some(("OOM", format!("{breakdown}; {available} available")));
        }
        let budget_ms = self.sampling.time_budget_ms?;
        let flops: f64 = self.task.flops().iter().sum();
        let least_ms = 1e3 * flops / self.sampling.peak_flops?;
        (least_ms > budget_ms).then(|| {
            let reason = format!(
                "a step takes {least_ms:.0} ms at the rate of large matmuls, the budget is {budget_ms:.0} ms"
            );
            ("over time budget", reason)
        })
    }

    fn measure(
        &self,
        device: &Device,
        on_step: impl FnMut(Step, f64),
    ) -> Result<(LapTimings, Option<Alive>)> {
        let is_in_half = self.task.attention().dtype.size_in_bytes() == 2;
        let meter = settled_meter(device, is_in_half)?;
        let now = || meter.current_bytes().unwrap_or_default();
        let before = now();
        let Sampling { seed, .. } = self.sampling;
        let mut pass = self.task.prepare(seed, self.execution, device)?;
        let resident = now().saturating_sub(before);
        let mut alive = Alive {
            resident,
            ..Default::default()
        };
        let timings = Stopwatch::new(device)
            .warmup(self.sampling.warmup_steps)
            .time_budget_ms(self.sampling.time_budget_ms)
            .on_step(on_step)
            .measure_phases(self.sampling.iterations, |lap| {
                // Relative to the start of the step: memory that kernels keep for later steps does not count.
                let start = now();
                let grown = |bytes: u64| resident + bytes.saturating_sub(start);
                let peak = || grown(meter.peak_bytes().unwrap_or_default());
                meter.reset_peak();
                let gradients = match &mut pass {
                    Pass::Eager(forward) => {
                        let output = lap.time(FORWARD, forward)?;
                        (alive.forward_peak, alive.before_backward) = (peak(), grown(now()));
                        meter.reset_peak();
                        Some(lap.time(BACKWARD, move || backward_from_ones(output))?)
                    }
                    Pass::Planned(step, batch, d_output) => {
                        step.forward_backward_from(&*batch, d_output)?;
                        lap.add_phases(step.phase_times()?);
                        alive.forward_peak = peak();
                        None
                    }
                };
                (alive.backward_peak, alive.after_backward) = (peak(), grown(now()));
                Ok(gradients)
            })?;
        if let Pass::Planned(step, ..) = &pass
            && let Some(plan) = step.plan()
        {
            // The arena is allocated throughout; only the buffers still read count.
            alive.resident = resident.saturating_sub(plan.arena_bytes());
            alive.before_backward = alive.resident + plan.live_bytes_before(plan.backward_begins());
            alive.after_backward = alive.resident + plan.live_bytes_before(plan.backward_ends());
        }
        Ok((timings, meter.current_bytes().map(|_| alive)))
    }

    /// Returns the row of a run that was not measured.
    fn refused(&self, breakdown: Option<&MemoryBreakdown>, status: &str, reason: String) -> Fields {
        let mut row = self.row(breakdown, WHOLE, status);
        row.insert("reason", reason);
        row.insert("breakdown", terms(breakdown));
        row
    }

    /// Returns the fields of every row, measured or not.
    fn row(&self, breakdown: Option<&MemoryBreakdown>, phase: &str, status: &str) -> Fields {
        let mut row = Fields::from_iter([("implementation", self.implementation())]);
        for (name, size) in self.task.sizes() {
            let is_length = name == "sequence_length";
            row.insert(if is_length { "context_length" } else { name }, size);
        }
        row.merge(self.task.labels());
        row.insert("warmup_steps", self.sampling.warmup_steps);
        row.insert("iterations", self.sampling.iterations);
        row.insert("time_budget_ms", self.sampling.time_budget_ms);
        row.insert("phase", phase);
        row.insert("status", status);
        row.insert("reason", None::<String>);
        let before_backward = breakdown.map(|breakdown| breakdown.before_backward_bytes);
        row.insert("estimate_before_backward_bytes", before_backward);
        row.insert("estimate_bytes", breakdown.map(MemoryBreakdown::peak_bytes));
        row.insert("available_bytes", self.sampling.available_bytes);
        row
    }
}

fn terms(breakdown: Option<&MemoryBreakdown>) -> serde_json::Value {
    serde_json::to_value(breakdown).unwrap_or_default()
}

/// Bytes alive in one step, inputs and weights included.
#[derive(Clone, Copy, Default)]
struct Alive {
    /// Before forward: inputs and weights.
    resident: u64,
    forward_peak: u64,
    before_backward: u64,
    backward_peak: u64,
    /// After backward: the graph is freed, the gradients are allocated.
    after_backward: u64,
}

impl Alive {
    fn peak(&self) -> u64 {
        self.forward_peak.max(self.backward_peak)
    }

    /// Returns the fields of a layer's row.
    fn fields(&self) -> Fields {
        let added = |after: u64, before: u64| after as i64 - before as i64;
        let (before, after) = (self.before_backward, self.after_backward);
        let mut fields = Fields::new();
        fields.insert("model_bytes", self.resident);
        fields.insert("model_forward_bytes", before);
        fields.insert("model_forward_backward_bytes", after);
        fields.insert("forward_bytes", added(before, self.resident));
        fields.insert("backward_bytes", added(after, before));
        fields
    }
}

/// The first size that does not fit in the memory available, by its predicted breakdown.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// The implementation, as in the rows.
    pub implementation: &'static str,
    /// The attention of this size.
    pub attention: AttentionWorkload,
    /// Dh or D.
    pub width: usize,
    /// The memory that it needs.
    pub breakdown: MemoryBreakdown,
    /// The memory available.
    pub available_bytes: u64,
}
