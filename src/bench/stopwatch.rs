//! Timing of steps, and of the phases inside them, on devices that run asynchronously.

use std::fmt;
use std::hint::black_box;
use std::time::Instant;

use candle_core::Device;
use indexmap::IndexMap;
use serde::Serialize;

use crate::compile::PhaseTimes;
use crate::memory::Meter;
use crate::report::Statistics;
use crate::{Error, Result, ops, probe};

/// Times repeated runs of the same work, after a warm-up.
///
/// The device is synchronized before each step starts and before it counts as ended. A sample therefore holds all work
/// of that step, on the host and on the device, and none of other steps. The result of the work is dropped before the
/// next step, outside the measured time.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::bench::Stopwatch;
///
/// let device = Device::Cpu;
/// let x = Tensor::ones((64, 64), DType::F32, &device)?;
/// let timing = Stopwatch::new(&device).warmup(2).measure(5, || x.matmul(&x))?;
/// assert_eq!(timing.samples_ms.len(), 5);
/// println!("{:.2} ms", timing.statistics()?.mean_ms);
/// # Ok::<(), tallow::Error>(())
/// ```
pub struct Stopwatch<'a> {
    device: Device,
    warmup_steps: usize,
    time_budget_ms: Option<f64>,
    on_step: Option<Box<OnStep<'a>>>,
}

/// The fraction of a time budget that the warm-up may use.
const WARMUP_SHARE: f64 = 0.25;

/// The number of steps measured whatever the time budget: a single one has no spread.
const LEAST_STEPS: usize = 2;

type OnStep<'a> = dyn FnMut(Step, f64) + 'a;

/// Identifies the step that has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Whether it was a warm-up step, which the statistics leave out.
    pub warmup: bool,
    /// The index among steps of its kind, from 0.
    pub index: usize,
    /// The requested number of steps of its kind.
    pub count: usize,
}

/// `warm-up 1/5` or `step 1/10`.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.warmup { "warm-up" } else { "step" };
        write!(f, "{kind} {}/{}", self.index + 1, self.count)
    }
}

/// The time of every step, in the order of execution.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Timing {
    /// The measured steps, in milliseconds.
    pub samples_ms: Vec<f64>,
    /// The warm-up steps, in milliseconds. The first one shows the start-up costs.
    pub warmup_ms: Vec<f64>,
}

impl Timing {
    /// Returns mean, deviation, median and extremes of the measured steps.
    ///
    /// # Errors
    /// [`Error::Data`] if there are no measured steps. A timing from [`Stopwatch::measure`] has at least one.
    pub fn statistics(&self) -> Result<Statistics> {
        Statistics::new(&self.samples_ms)
    }

    fn append(&mut self, later: Self) {
        self.samples_ms.extend(later.samples_ms);
        self.warmup_ms.extend(later.warmup_ms);
    }
}

impl<'a> Stopwatch<'a> {
    /// Creates a stopwatch for work on `device`, without warm-up.
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            warmup_steps: 0,
            time_budget_ms: None,
            on_step: None,
        }
    }

    /// Sets the number of steps before the measured ones: first steps fill caches and memory pools and compile kernels.
    pub fn warmup(mut self, steps: usize) -> Self {
        self.warmup_steps = steps;
        self
    }

    /// Limits the time, which reduces the number of steps if they are slow. No further warm-up step starts once a
    /// quarter of `budget_ms` is used, and no further measured step once all of it is. One warm-up step and two
    /// measured steps run in any case, if that many are requested. Only the time of steps counts.
    pub fn time_budget_ms(mut self, budget_ms: Option<f64>) -> Self {
        self.time_budget_ms = budget_ms;
        self
    }

    /// Sets a function that is called after every step, including warm-up, with its time in milliseconds: for progress,
    /// or to print each step. It runs outside the measured time.
    pub fn on_step(mut self, report: impl FnMut(Step, f64) + 'a) -> Self {
        self.on_step = Some(Box::new(report));
        self
    }

    /// Runs `work` once for each warm-up step and then `steps` times, and returns the time of each.
    ///
    /// `work` may fail with tallow's or candle's error. A closure that ends in `Ok(..)` names it:
    /// `Ok::<_, tallow::Error>(())`.
    ///
    /// # Errors
    /// [`Error::Config`] if `steps` is 0; else the first error of `work` or of synchronizing the device, after which no
    /// step runs.
    pub fn measure<T, E: Into<Error>>(
        &mut self,
        steps: usize,
        mut work: impl FnMut() -> std::result::Result<T, E>,
    ) -> Result<Timing> {
        if steps == 0 {
            return Err(Error::config("Stopwatch", "steps", "0").must_be(
                "at least 1",
                "measure one step or more; only the warm-up may be 0",
            ));
        }
        let budget_ms = self.time_budget_ms.unwrap_or(f64::INFINITY);
        let mut timing = Timing::default();
        let mut spent_ms = 0.0;
        for (warmup, count, least, limit_ms) in [
            (true, self.warmup_steps, 1, WARMUP_SHARE * budget_ms),
            (false, steps, LEAST_STEPS, budget_ms),
        ] {
            let times_ms = match warmup {
                true => &mut timing.warmup_ms,
                false => &mut timing.samples_ms,
            };
            for index in 0..count {
                if index >= least && spent_ms >= limit_ms {
                    break;
                }
                let (result, ms) = time_once(&self.device, &mut work)?;
                drop(result);
                times_ms.push(ms);
                spent_ms += ms;
                if let Some(on_step) = &mut self.on_step {
                    let step = Step {
                        warmup,
                        index,
                        count,
                    };
                    on_step(step, ms);
                }
            }
        }
        Ok(timing)
    }

    /// Times the named phases of a step and the step as a whole: runs `step` once for each warm-up step and then
    /// `steps` times. Its result is dropped outside the measured time.
    ///
    /// Each phase is timed on its own, never as a difference. So no time can be negative, and noise in one phase does
    /// not affect another. The device is synchronized before and after each phase.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use tallow::bench::Stopwatch;
    ///
    /// let device = Device::Cpu;
    /// let x = Tensor::ones((64, 64), DType::F32, &device)?;
    /// let laps = Stopwatch::new(&device).warmup(1).measure_phases(3, |lap| {
    ///     let y = lap.time("product", || x.matmul(&x))?;
    ///     lap.time("sum", || y.sum_all())?;
    ///     Ok(())
    /// })?;
    /// assert_eq!(laps.phases[0].0, "product");
    /// assert_eq!(laps.whole.samples_ms.len(), 3);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`measure`](Self::measure).
    pub fn measure_phases<T>(
        &mut self,
        steps: usize,
        mut step: impl FnMut(&mut Lap<'_>) -> Result<T>,
    ) -> Result<LapTimings> {
        let device = self.device.clone();
        let mut laps = Vec::new();
        let whole = self.measure(steps, || {
            let _step = probe::step();
            let mut lap = Lap::new(&device);
            let value = step(&mut lap)?;
            laps.push(lap.phases);
            Ok::<_, Error>(value)
        })?;
        let mut phases = IndexMap::<_, Timing>::new();
        for (i, lap) in laps.into_iter().enumerate() {
            for (phase, ms) in lap {
                let timing = phases.entry(phase).or_default();
                match i < whole.warmup_ms.len() {
                    true => timing.warmup_ms.push(ms),
                    false => timing.samples_ms.push(ms),
                }
            }
        }
        let phases = phases.into_iter().collect();
        Ok(LapTimings { phases, whole })
    }
}

/// Runs `work` once, and returns its result and its time in milliseconds. The device is synchronized before and after.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// let device = Device::Cpu;
/// let (zeros, ms) = tallow::bench::time_once(&device, || Tensor::zeros(8, DType::F32, &device))?;
/// assert_eq!(zeros.dims(), [8]);
/// assert!(ms >= 0.0);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of `work` and of synchronizing the device.
pub fn time_once<T, E: Into<Error>>(
    device: &Device,
    work: impl FnOnce() -> std::result::Result<T, E>,
) -> Result<(T, f64)> {
    device.synchronize()?;
    let start = Instant::now();
    let result = black_box(work().map_err(Into::into)?);
    device.synchronize()?;
    let ms = start.elapsed().as_secs_f64() * 1e3;
    Ok((result, ms))
}

/// The result of [`Stopwatch::measure_phases`].
#[derive(Clone, Debug, Default)]
pub struct LapTimings {
    /// Each phase with its timing, in the order of first execution.
    pub phases: Vec<(&'static str, Timing)>,
    /// The whole steps: the phases and the time between them.
    pub whole: Timing,
}

impl LapTimings {
    pub(super) fn join(&mut self, later: Self) {
        for (phase, timing) in later.phases {
            match self.phases.iter_mut().find(|(known, _)| *known == phase) {
                Some((_, earlier)) => earlier.append(timing),
                None => self.phases.push((phase, timing)),
            }
        }
        self.whole.append(later.whole);
    }
}

/// A step in progress, which times its phases.
pub struct Lap<'a> {
    device: &'a Device,
    phases: IndexMap<&'static str, f64>,
}

impl<'a> Lap<'a> {
    /// Creates a lap that allocates nothing in a recorded step of up to three phases.
    pub(super) fn new(device: &'a Device) -> Self {
        Self {
            device,
            phases: IndexMap::with_capacity(3),
        }
    }

    /// Times `work` as the phase `phase`. If the phase has run before in this step, the times are added.
    ///
    /// # Errors
    /// Those of `work` and of synchronizing the device.
    pub fn time<T, E: Into<Error>>(
        &mut self,
        phase: &'static str,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> Result<T> {
        let (value, ms) = {
            let _range = probe::phase(phase);
            time_once(self.device, work)?
        };
        *self.phases.entry(phase).or_default() += ms;
        Ok(value)
    }

    /// Adds the times of a planned step's phases, except those that are 0.
    pub(super) fn add_phases(&mut self, times: Option<PhaseTimes>) {
        let times = times.unwrap_or_default();
        let phases = [
            ("forward", times.forward_ms),
            ("backward", times.backward_ms),
            ("optimizer", times.optimizer_ms),
        ];
        for (phase, ms) in phases.into_iter().filter(|(_, ms)| *ms > 0.0) {
            *self.phases.entry(phase).or_default() += ms;
        }
    }
}

/// Returns a meter for the next run. Memory dropped by earlier runs has been freed, and threads have allocated the
/// packing scratch that they keep until the process ends.
pub(super) fn settled_meter(device: &Device, is_in_half: bool) -> Result<Meter> {
    ops::reserve_scratch(is_in_half)?;
    let meter = Meter::new(device);
    meter.settle()?;
    Ok(meter)
}
