//! A forward and its backward, measured: the part that all benchmarks of single layers share.

use super::planned_run::add_phases;
use super::{Execution, Lap, LapTimings, Step, Stopwatch, Timing};
use crate::compile::{self, Batch, Plan};
use crate::memory::{MemoryBreakdown, Meter};
use crate::report::{Fields, format_mib};
use crate::{Error, Result, backward, ops};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use serde::Serialize;

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

/// What is measured, and what is known about it beforehand.
pub(super) struct Passes<'a> {
    pub sampling: &'a Sampling,
    /// What stands at the beginning of each row.
    pub labels: Fields,
    /// B T.
    pub tokens: f64,
    pub forward_flops: f64,
    pub backward_flops: f64,
    /// What it takes, or why it cannot run at all.
    pub breakdown: std::result::Result<MemoryBreakdown, String>,
    /// Whether products are in half precision.
    pub in_half: bool,
}

/// A forward and its backward, ready to run again and again.
pub(super) enum Pass {
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
                add_phases(lap, step.phase_times()?);
                Ok(None)
            }
        }
    }
}

/// The phases, in the order of their rows.
pub(super) const FORWARD: &str = "forward";
pub(super) const BACKWARD: &str = "backward";
pub(super) const WHOLE: &str = "forward+backward";

/// Bytes alive at moments of one step, inputs and weights included.
#[derive(Clone, Copy)]
pub(super) struct Alive {
    /// Before forward: inputs and weights.
    pub resident: u64,
    pub forward_peak: u64,
    pub before_backward: u64,
    pub backward_peak: u64,
    /// After backward, the graph gone and the gradients there.
    pub after_backward: u64,
}

impl Alive {
    /// What is needed of memory that is there all the time, as that of a plan.
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

type Moment = fn(&Alive) -> u64;

impl Passes<'_> {
    /// One row a phase; or one row in all, for what cannot run, does not fit in memory or in time. `prepare` makes the
    /// inputs, and is not called in those cases. `memory` adds bytes to every row.
    pub fn run(
        &self,
        device: &Device,
        prepare: impl FnOnce() -> Result<Pass>,
        on_step: impl FnMut(Step, f64),
        memory: impl Fn(&Alive) -> Fields,
    ) -> Result<Vec<Fields>> {
        if let Some((status, reason)) = self.refusal() {
            return Ok(vec![self.unmeasured(status, &reason)]);
        }
        let (timings, alive) = match self.measure(device, prepare, on_step) {
            Err(error) if error.is_out_of_memory() => {
                let mut row = self.unmeasured("OOM", &error.to_string());
                // What there is once it has given back what it had.
                if let Some(bytes) = crate::hardware::available_bytes_on(device) {
                    row.insert("available_bytes", bytes);
                }
                return Ok(vec![row]);
            }
            measured => measured?,
        };
        let [forward, backward] = [self.forward_flops, self.backward_flops];
        let mut measured: Vec<(&str, &Timing, f64, Moment)> = Vec::new();
        for (phase, timing) in &timings.phases {
            measured.push(match *phase {
                FORWARD => (FORWARD, timing, forward, |alive| alive.forward_peak),
                _ => (BACKWARD, timing, backward, |alive| alive.backward_peak),
            });
        }
        measured.push((WHOLE, &timings.whole, forward + backward, |alive| {
            alive.forward_peak.max(alive.backward_peak)
        }));
        let rows = measured.into_iter().map(|(phase, timing, flops, peak)| {
            let mut row = self.measured_row(phase, timing, flops)?;
            let before_backward = alive.as_ref().map(|alive| alive.before_backward);
            row.insert("before_backward_bytes", before_backward);
            row.insert("peak_bytes", alive.as_ref().map(peak));
            row.merge(alive.as_ref().map(&memory).unwrap_or_default());
            row.insert("breakdown", self.account_value());
            Ok(row)
        });
        rows.collect()
    }

    /// The row of what was not run, or not to its end.
    fn unmeasured(&self, status: &str, reason: &str) -> Fields {
        let mut row = self.row(WHOLE, status);
        row.insert("reason", reason);
        row.insert("breakdown", self.account_value());
        row
    }

    fn measured_row(&self, phase: &str, timing: &Timing, flops: f64) -> Result<Fields> {
        let statistics = timing.statistics()?;
        let mut row = self.row(phase, "ok");
        if statistics.n < self.sampling.iterations {
            row.insert("reason", "the time budget is spent");
        }
        row.merge(timing.fields()?);
        row.insert("noisy", statistics.noisy());
        row.merge(self.rates(flops, statistics.median_ms));
        Ok(row)
    }

    /// Status and reason, decided before anything is allocated.
    fn refusal(&self) -> Option<(&'static str, String)> {
        let breakdown = match &self.breakdown {
            Ok(breakdown) => breakdown,
            Err(reason) => return Some(("unsupported", reason.clone())),
        };
        if let Some(available_bytes) = self.sampling.available_bytes
            && breakdown.peak_bytes() > available_bytes
        {
            let available = format_mib(available_bytes);
            return Some(("OOM", format!("{breakdown}; {available} available")));
        }
        let budget_ms = self.sampling.time_budget_ms?;
        let flops = self.forward_flops + self.backward_flops;
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
        prepare: impl FnOnce() -> Result<Pass>,
        on_step: impl FnMut(Step, f64),
    ) -> Result<(LapTimings, Option<Alive>)> {
        // What threads keep for packing is the process's, and no step's.
        ops::reserve_scratch(self.in_half)?;
        let meter = Meter::new(device);
        let now = || meter.current_bytes();
        meter.settle()?; // what an earlier run has dropped is not this one's
        let before = now();
        let mut pass = prepare()?;
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

    /// What every row says, measured or not.
    fn row(&self, phase: &str, status: &str) -> Fields {
        let mut row = self.labels.clone();
        row.insert("warmup_steps", self.sampling.warmup_steps);
        row.insert("iterations", self.sampling.iterations);
        row.insert("time_budget_ms", self.sampling.time_budget_ms);
        row.insert("phase", phase);
        row.insert("status", status);
        row.insert("reason", None::<String>);
        let breakdown = self.breakdown.as_ref().ok();
        let before_backward = breakdown.map(|breakdown| breakdown.before_backward_bytes);
        row.insert("estimate_before_backward_bytes", before_backward);
        row.insert("estimate_bytes", breakdown.map(MemoryBreakdown::peak_bytes));
        row.insert("available_bytes", self.sampling.available_bytes);
        row
    }

    fn account_value(&self) -> serde_json::Value {
        serde_json::to_value(self.breakdown.as_ref().ok()).unwrap_or_default()
    }

    fn rates(&self, flops: f64, median_ms: f64) -> Fields {
        let seconds = median_ms / 1e3;
        let rate = flops / seconds;
        let mut fields = Fields::new();
        fields.insert("tokens_per_s", self.tokens / seconds);
        fields.insert("flops", flops);
        fields.insert("flops_per_s", rate);
        let mfu = self.sampling.peak_flops.map(|peak| 100.0 * rate / peak);
        fields.insert("mfu_percent", mfu);
        fields
    }
}

/// What a run takes, by its execution. What is too large to be planned for is too large for any memory, eagerly too.
pub(super) fn breakdown(
    execution: Execution,
    eager: impl Fn() -> Result<MemoryBreakdown>,
    planned: impl FnOnce() -> Result<MemoryBreakdown>,
) -> Result<MemoryBreakdown> {
    match execution {
        Execution::Eager => eager(),
        Execution::Planned => match planned() {
            Err(error) if error.is_out_of_memory() => eager(),
            breakdown => breakdown,
        },
    }
}

/// A run's size that must be there.
pub(super) fn at_least_one(config: &'static str, sizes: &[(&'static str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((field, _)) => {
            Err(Error::config(config, field, "0")
                .must_be("at least 1", "there is nothing to measure"))
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
