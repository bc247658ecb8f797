//! Attention, alone or in its layer, timed by phase, with its memory.

use super::stopwatch::settled_meter;
use super::{Execution, Lap, LapTimings, Step, Stopwatch};
use crate::compile::{self, Batch, Plan};
use crate::memory::{
    AttentionWorkload, MemoryBreakdown, SelfAttentionWorkload, smallest_not_fitting,
};
use crate::report::{Fields, format_mib};
use crate::{Error, Result, backward};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use serde::Serialize;

mod workload;
use workload::Measurable;

/// How a forward and backward is measured: how often, for how long, within what.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Steps before the measured ones.
    pub warmup_steps: usize,
    /// Measured steps.
    pub iterations: usize,
    /// Take fewer steps where they take longer than this together, as
    /// [`Stopwatch::time_budget_ms`](super::Stopwatch::time_budget_ms) does. What could not take even one step in it
    /// at the peak rate is not tried.
    pub time_budget_ms: Option<f64>,
    /// The seed of inputs and weights.
    pub seed: u64,
    /// The most FLOP/s that the device can do; `None` where it is not known.
    pub peak_flops: Option<f64>,
    /// Bytes that may be used; what wants more is a row `OOM`. `None` asks nothing.
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

/// One measurement of an attention algorithm on random q, k, v (B, H, T, Dh): `softmax(q k^T / sqrt(Dh)) v` and its
/// gradients.
///
/// ```
/// use tallow::bench::{AttentionRun, Sampling};
/// use tallow::memory::AttentionWorkload;
///
/// let run = AttentionRun {
///     workload: AttentionWorkload { batch_size: 2, sequence_length: 32, head_dim: 8, ..Default::default() },
///     sampling: Sampling { warmup_steps: 1, iterations: 3, ..Default::default() },
///     ..Default::default()
/// };
/// let rows = run.run(&tallow::device("cpu")?, |_, _| ())?;
/// assert_eq!(rows.len(), 3); // forward, backward, forward+backward
/// assert_eq!(rows[2].get("n"), Some(&3.into()));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionRun<W = AttentionWorkload> {
    /// What is computed.
    pub workload: W,
    /// How it is measured.
    pub sampling: Sampling,
    /// Eager, or planned for its shape by a [`compile::Step`]: on the CPU or a CUDA GPU; attention alone in f32, bf16
    /// or f16, a layer with weights in f32.
    pub execution: Execution,
}

/// One measurement of a [`CausalSelfAttention`](crate::nn::CausalSelfAttention), with its four D x D projections, on
/// random x (B, T, D).
///
/// ```
/// use tallow::bench::{Sampling, SelfAttentionRun};
/// use tallow::memory::SelfAttentionWorkload;
///
/// let run = SelfAttentionRun {
///     workload: SelfAttentionWorkload { sequence_length: 16, d_model: 32, ..Default::default() },
///     sampling: Sampling { warmup_steps: 1, iterations: 3, ..Default::default() },
///     ..Default::default()
/// };
/// let rows = run.run(&tallow::device("cpu")?, |_, _| ())?;
/// assert_eq!(rows[0].get("phase"), Some(&"forward".into()));
/// # Ok::<(), tallow::Error>(())
/// ```
pub type SelfAttentionRun = AttentionRun<SelfAttentionWorkload>;

impl<W: Measurable> AttentionRun<W> {
    /// Measures, and returns a row each for `forward`, `backward` and `forward+backward`, all three timed in the same
    /// steps. Forward keeps its graph, as before a backward; backward starts from a gradient of ones.
    ///
    /// One row alone says what was not measured: `OOM`, decided from
    /// [`attention_breakdown`](crate::memory::attention_breakdown) before anything is allocated, with the sum;
    /// `unsupported`, for a head dimension that the algorithm does not take; `over time budget`. `reason` says why, and
    /// also why a row has fewer samples than were asked for. `on_step` is called after every step with the whole step's
    /// time in ms.
    ///
    /// FLOPs are 4 B H Dh for each pair of query and key that the mask leaves, and twice that backward, whatever the
    /// algorithm does: flash's second look at the scores is not counted, nor is what naive spends on masked ones.
    ///
    /// Memory is measured where a [`Tracker`](crate::memory::tracker::Tracker) is installed, on a GPU by its pool's
    /// counters: `before_backward_bytes` is what is alive between forward and backward, `peak_bytes` the most in the
    /// phase, q, k and v included in both.
    ///
    /// What is planned has its arena from the beginning to the end: all of it counts in `peak_bytes`, and in
    /// `before_backward_bytes` what of it backward or the caller reads. Out's gradient is one of its inputs, and its
    /// rows call it the implementation `planned`, or `planned-flash`.
    ///
    /// A [`SelfAttentionRun`]'s rows have these bytes in addition:
    ///
    /// - `model_bytes`: the weights and x; `model_forward_bytes`: with the graph that forward leaves behind;
    ///   `model_forward_backward_bytes`: after backward, the graph freed and the gradients allocated;
    /// - `forward_bytes` and `backward_bytes`: what each adds. The second is negative where the freed graph is larger
    ///   than the gradients.
    ///
    /// FLOPs of a layer: 8 B T D^2 for the projections and 4 B D for each pair of query and key that the causal mask
    /// leaves; in backward 10 B T D^2, since x is an input and gets no gradient, and 8 B D.
    ///
    /// # Errors
    /// A size of 0; heads that do not divide D; what cannot be planned; the ops' errors.
    pub fn run(&self, device: &Device, on_step: impl FnMut(Step, f64)) -> Result<Vec<Fields>> {
        let sizes = self.workload.sizes().into_iter();
        let mut sizes = sizes.chain([("iterations", self.sampling.iterations)]);
        if let Some((field, _)) = sizes.find(|(_, size)| *size == 0) {
            return Err(Error::config(W::NAME, field, "0")
                .must_be("at least 1", "there is nothing to measure"));
        }
        self.workload.check(self.execution, device)?;
        let refused = |breakdown, status, reason: String| {
            let mut row = self.row(breakdown, WHOLE, status);
            row.insert("reason", reason);
            row.insert("breakdown", terms(breakdown));
            vec![row]
        };
        if let Some(reason) = self.workload.unsupported(self.execution, device) {
            return Ok(refused(None, "unsupported", reason));
        }
        let breakdown = self.breakdown(device)?;
        let breakdown = Some(&breakdown);
        if let Some((status, reason)) = breakdown.and_then(|breakdown| self.refusal(breakdown)) {
            return Ok(refused(breakdown, status, reason));
        }
        let (timings, alive) = match self.measure(device, on_step) {
            Err(error) if error.is_out_of_memory() => {
                let mut rows = refused(breakdown, "OOM", error.to_string());
                // What is available once the run has freed its memory.
                if let Some(bytes) = crate::hardware::available_bytes_on(device) {
                    rows[0].insert("available_bytes", bytes);
                }
                return Ok(rows);
            }
            measured => measured?,
        };
        let [forward, backward] = self.workload.flops();
        let [(_, batch_size), _, (_, length), _] = self.workload.sizes();
        let tokens = batch_size as f64 * length as f64;
        let phases = timings
            .phases
            .iter()
            .map(|(phase, timing)| (*phase, timing));
        let rows = phases
            .chain([(WHOLE, &timings.whole)])
            .map(|(phase, timing)| {
                let flops = match phase {
                    FORWARD => forward,
                    BACKWARD => backward,
                    _ => forward + backward,
                };
                let peak = |alive: &Alive| match phase {
                    FORWARD => alive.forward_peak,
                    BACKWARD => alive.backward_peak,
                    _ => alive.forward_peak.max(alive.backward_peak),
                };
                let mut row = self.row(breakdown, phase, "ok");
                if timing.samples_ms.len() < self.sampling.iterations {
                    row.insert("reason", "the time budget is spent");
                }
                row.merge(timing.measured(tokens, Some(flops), self.sampling.peak_flops)?);
                let before_backward = alive.map(|alive| alive.before_backward);
                row.insert("before_backward_bytes", before_backward);
                row.insert("peak_bytes", alive.as_ref().map(peak));
                row.merge(alive.map_or_else(Fields::new, W::memory));
                row.insert("breakdown", terms(breakdown));
                Ok(row)
            });
        rows.collect()
    }

    /// The first size, doubled from the smallest, that does not fit in the memory available on `device`: T of attention
    /// alone, D of a layer. `None` if the memory is not known, or the algorithm does not support heads of this width.
    pub fn limit(&self, device: &Device) -> Option<Limit> {
        let available_bytes = self.sampling.available_bytes?;
        let at = |size| Self {
            workload: self.workload.of_size(size),
            ..self.clone()
        };
        let (size, breakdown) = smallest_not_fitting(available_bytes, |size| {
            let run = at(size);
            let unsupported = run.workload.unsupported(run.execution, device);
            unsupported.is_none().then(|| run.breakdown(device).ok())?
        })?;
        let workload = at(size).workload;
        let [_, _, (_, context_length), (_, width)] = workload.sizes();
        Some(Limit {
            implementation: self.implementation(),
            context_length,
            width,
            breakdown,
            available_bytes,
            composed_bytes: workload.composed_bytes(),
        })
    }

    fn implementation(&self) -> &'static str {
        workload::implementation(self.execution, self.workload.algorithm())
    }

    /// The memory of a run by its execution. A size too large to be planned is too large eagerly too.
    fn breakdown(&self, device: &Device) -> Result<MemoryBreakdown> {
        match self.workload.breakdown(self.execution, device) {
            Err(error) if error.is_out_of_memory() && self.execution == Execution::Planned => {
                self.workload.breakdown(Execution::Eager, device)
            }
            breakdown => breakdown,
        }
    }

    /// Status and reason of a run that does not fit in memory or in time, decided before anything is allocated.
    fn refusal(&self, breakdown: &MemoryBreakdown) -> Option<(&'static str, String)> {
        if let Some(available_bytes) = self.sampling.available_bytes
            && breakdown.peak_bytes() > available_bytes
        {
            let available = format_mib(available_bytes);
            return Some(("OOM", format!("{breakdown}; {available} available")));
        }
        let budget_ms = self.sampling.time_budget_ms?;
        let flops: f64 = self.workload.flops().iter().sum();
        let least_ms = 1e3 * flops / self.sampling.peak_flops?;
        (least_ms > budget_ms).then(|| {
            let reason = format!(
                "a step takes {least_ms:.0} ms at the peak rate, the budget is {budget_ms:.0} ms"
            );
            ("over time budget", reason)
        })
    }

    fn measure(
        &self,
        device: &Device,
        on_step: impl FnMut(Step, f64),
    ) -> Result<(LapTimings, Option<Alive>)> {
        let meter = settled_meter(device, self.workload.is_in_half())?;
        let now = || meter.current_bytes();
        let before = now();
        let mut pass = self
            .workload
            .prepare(self.sampling.seed, self.execution, device)?;
        let resident = now()
            .zip(before)
            .map(|(now, before)| now.saturating_sub(before));
        let mut alive = None;
        let timings = Stopwatch::new(device)
            .warmup(self.sampling.warmup_steps)
            .time_budget_ms(self.sampling.time_budget_ms)
            .on_step(on_step)
            .measure_phases(self.sampling.iterations, |lap| {
                // Beyond the start of the step, so that what kernels keep for later steps is of no kind.
                let start = now();
                let grown = |bytes: Option<u64>| {
                    let (bytes, start) = bytes.zip(start)?;
                    Some(resident? + bytes.saturating_sub(start))
                };
                meter.reset_peak();
                let mut after_forward = None;
                let gradients = pass.step(lap, || {
                    after_forward = Some((meter.peak_bytes(), now()));
                    meter.reset_peak();
                })?;
                let at_end = (meter.peak_bytes(), now());
                let (forward_peak, before_backward) = after_forward.unwrap_or(at_end);
                alive = (|| {
                    Some(Alive {
                        resident: resident?,
                        forward_peak: grown(forward_peak)?,
                        before_backward: grown(before_backward)?,
                        backward_peak: grown(at_end.0)?,
                        after_backward: grown(at_end.1)?,
                    })
                })();
                Ok(gradients)
            })?;
        let alive = match &pass {
            Pass::Planned(step, ..) => alive.zip(step.plan()).map(|(a, plan)| a.of_planned(plan)),
            Pass::Eager(_) => alive,
        };
        Ok((timings, alive))
    }

    /// The fields of every row, measured or not.
    fn row(&self, breakdown: Option<&MemoryBreakdown>, phase: &str, status: &str) -> Fields {
        let mut row = Fields::from_iter([("implementation", self.implementation())]);
        for (name, size) in self.workload.sizes() {
            let is_length = name == "sequence_length";
            row.insert(if is_length { "context_length" } else { name }, size);
        }
        row.merge(self.workload.labels());
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

/// A forward and its backward, ready to run again and again.
pub enum Pass {
    /// A forward with candle's graph, and backward through it.
    Eager(Box<dyn Fn() -> Result<Tensor>>),
    /// A planned forward, and its backward from this gradient of the output.
    Planned(Box<compile::Step<'static>>, Batch, Tensor),
}

impl Pass {
    /// Plans it and runs it once.
    pub fn planned(
        mut step: compile::Step<'static>,
        batch: Batch,
        d_output: Tensor,
    ) -> Result<Self> {
        step.time_phases(true);
        step.forward_backward_from(&batch, &d_output)?;
        Ok(Self::Planned(Box::new(step), batch, d_output))
    }

    /// Runs both, each as a phase of `lap`, and returns what is alive after backward. `between` is called after an
    /// eager forward.
    fn step(&mut self, lap: &mut Lap<'_>, between: impl FnOnce()) -> Result<Option<GradStore>> {
        match self {
            Self::Eager(forward) => {
                let output = lap.time(FORWARD, forward)?;
                between();
                lap.time(BACKWARD, move || backward(output)).map(Some)
            }
            Self::Planned(step, batch, d_output) => {
                step.forward_backward_from(&*batch, d_output)?;
                lap.add_phases(step.phase_times()?);
                Ok(None)
            }
        }
    }
}

/// The phases, in the order of their rows.
const FORWARD: &str = "forward";
const BACKWARD: &str = "backward";
const WHOLE: &str = "forward+backward";

/// Bytes alive at moments of one step, inputs and weights included.
#[derive(Clone, Copy)]
pub struct Alive {
    /// Before forward: inputs and weights.
    pub resident: u64,
    pub forward_peak: u64,
    pub before_backward: u64,
    pub backward_peak: u64,
    /// After backward, the graph gone and the gradients there.
    pub after_backward: u64,
}

impl Alive {
    /// Returns the memory that is used of a plan's, which is allocated all the time.
    fn of_planned(self, plan: &Plan) -> Self {
        let resident = self.resident.saturating_sub(plan.peak_bytes());
        Self {
            resident,
            before_backward: resident + plan.alive_bytes(plan.backward_begins()),
            after_backward: resident + plan.alive_bytes(plan.backward_ends()),
            ..self
        }
    }
}

/// The first size that does not fit in the memory available, as its breakdown predicts: nothing is run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limit {
    /// The implementation, as the rows name it.
    pub implementation: &'static str,
    /// T.
    pub context_length: usize,
    /// Dh or D.
    pub width: usize,
    /// The memory that it needs.
    pub breakdown: MemoryBreakdown,
    /// The memory available.
    pub available_bytes: u64,
    /// Scores and probabilities, B H T^2 elements each, and the output, as CS336's handout counts them; of attention
    /// alone.
    pub composed_bytes: Option<u64>,
}
