//! Several phases of one step, each timed itself.

use super::{Step, Timing};
use crate::{Error, Result};
use candle_core::Device;
use std::time::Instant;

/// Times the named phases of a step and the step as a whole, over many steps.
///
/// A phase is timed on its own, never as a difference, so that no figure can be negative and noise in one does not
/// leak into another. The device is synchronised before and after each.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use tallow::bench::Laps;
///
/// let device = Device::Cpu;
/// let x = Tensor::ones((64, 64), DType::F32, &device)?;
/// let laps = Laps::new(&device).warmup(1).measure(3, |lap| {
///     let y = lap.time("product", || x.matmul(&x))?;
///     lap.time("sum", || y.sum_all())?;
///     Ok(())
/// })?;
/// assert_eq!(laps.phases[0].0, "product");
/// assert_eq!(laps.whole.samples_ms.len(), 3);
/// # Ok::<(), tallow::Error>(())
/// ```
pub struct Laps<'a> {
    device: &'a Device,
    warmup: usize,
    on_step: Option<Box<dyn FnMut(Step, f64) + 'a>>,
}

/// What [`Laps::measure`] found.
#[derive(Clone, Debug, Default)]
pub struct LapTimings {
    /// Each phase with its timing, in the order in which they first ran.
    pub phases: Vec<(&'static str, Timing)>,
    /// The steps as a whole: the phases, and what lies between them.
    pub whole: Timing,
}

/// One step under way.
pub struct Lap<'a> {
    device: &'a Device,
    phases: Vec<(&'static str, f64)>,
}

impl Lap<'_> {
    /// Runs `work` as (another stretch of) the phase called `phase`.
    ///
    /// # Errors
    /// Those of `work`, and the device's.
    pub fn time<T, E: Into<Error>>(
        &mut self,
        phase: &'static str,
        work: impl FnOnce() -> std::result::Result<T, E>,
    ) -> Result<T> {
        let (value, ms) = super::time_once(self.device, work)?;
        match self.phases.iter_mut().find(|(name, _)| *name == phase) {
            Some((_, total_ms)) => *total_ms += ms,
            None => self.phases.push((phase, ms)),
        }
        Ok(value)
    }
}

impl<'a> Laps<'a> {
    /// On `device`, without warm-up.
    pub fn new(device: &'a Device) -> Self {
        Self {
            device,
            warmup: 0,
            on_step: None,
        }
    }

    /// Runs `steps` steps first, whose times are kept apart.
    pub fn warmup(mut self, steps: usize) -> Self {
        self.warmup = steps;
        self
    }

    /// Calls `f` after every step, warm-up included, with the whole step's time in ms.
    pub fn on_step(mut self, f: impl FnMut(Step, f64) + 'a) -> Self {
        self.on_step = Some(Box::new(f));
        self
    }

    /// Runs `step` `steps` times after the warm-up. What it returns is dropped outside its time.
    ///
    /// # Errors
    /// No steps to measure; those of `step`; the device's.
    pub fn measure<T>(
        mut self,
        steps: usize,
        mut step: impl FnMut(&mut Lap<'_>) -> Result<T>,
    ) -> Result<LapTimings> {
        if steps == 0 {
            return Err(Error::Config {
                config: "Laps",
                field: "steps",
                expected: "at least 1".into(),
                got: "0".into(),
                hint: "a mean of nothing is no number".into(),
            });
        }
        let mut timings = LapTimings::default();
        for i in 0..self.warmup + steps {
            let warmup = i < self.warmup;
            let mut lap = Lap {
                device: self.device,
                phases: Vec::new(),
            };
            self.device.synchronize()?;
            let start = Instant::now();
            let value = step(&mut lap)?;
            self.device.synchronize()?;
            let whole_ms = start.elapsed().as_secs_f64() * 1e3;
            drop(value);
            let keep = |timing: &mut Timing, ms| match warmup {
                true => timing.warmup_ms.push(ms),
                false => timing.samples_ms.push(ms),
            };
            keep(&mut timings.whole, whole_ms);
            for (phase, ms) in lap.phases {
                let known = timings.phases.iter().position(|(name, _)| *name == phase);
                let place = known.unwrap_or_else(|| {
                    timings.phases.push((phase, Timing::default()));
                    timings.phases.len() - 1
                });
                keep(&mut timings.phases[place].1, ms);
            }
            if let Some(on_step) = &mut self.on_step {
                let (index, count) = match warmup {
                    true => (i, self.warmup),
                    false => (i - self.warmup, steps),
                };
                on_step(
                    Step {
                        warmup,
                        index,
                        count,
                    },
                    whole_ms,
                );
            }
        }
        Ok(timings)
    }
}
