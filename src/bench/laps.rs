//! Several phases of one step, each timed itself.

use super::{Stopwatch, Timing};
use crate::probe;
use crate::{Error, Result};
use candle_core::Device;

/// What [`Stopwatch::measure_phases`] found.
#[derive(Clone, Debug, Default)]
pub struct LapTimings {
    /// Each phase with its timing, in the order in which they first ran.
    pub phases: Vec<(&'static str, Timing)>,
    /// The steps as a whole: the phases, and what lies between them.
    pub whole: Timing,
}

impl LapTimings {
    /// Appends the steps of another measurement of the same work.
    pub(super) fn join(&mut self, later: Self) {
        let append = |timing: &mut Timing, later: Timing| {
            timing.samples_ms.extend(later.samples_ms);
            timing.warmup_ms.extend(later.warmup_ms);
        };
        for (phase, timing) in later.phases {
            match self.phases.iter_mut().find(|(name, _)| *name == phase) {
                Some((_, own)) => append(own, timing),
                None => self.phases.push((phase, timing)),
            }
        }
        append(&mut self.whole, later.whole);
    }
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
        let (value, ms) = {
            let _range = probe::phase(phase);
            super::time_once(self.device, work)?
        };
        self.add(phase, ms);
        Ok(value)
    }

    /// Records a stretch of a phase that was timed elsewhere.
    pub(super) fn add(&mut self, phase: &'static str, ms: f64) {
        match self.phases.iter_mut().find(|(name, _)| *name == phase) {
            Some((_, total_ms)) => *total_ms += ms,
            None => self.phases.push((phase, ms)),
        }
    }
}

impl<'a> Lap<'a> {
    /// One that allocates nothing in a step that is recorded.
    pub(super) fn with_room(device: &'a Device) -> Self {
        Self {
            device,
            phases: Vec::with_capacity(3),
        }
    }
}

impl Stopwatch<'_> {
    /// Times the named phases of a step and the step as a whole: runs `step` once for each warm-up step and then
    /// `steps` times. What it returns is dropped outside its time.
    ///
    /// A phase is timed on its own, never as a difference, so that no figure can be negative and noise in one does not
    /// leak into another. The device is synchronised before and after each.
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
    /// As [`measure`](Self::measure).
    pub fn measure_phases<T>(
        &mut self,
        steps: usize,
        mut step: impl FnMut(&mut Lap<'_>) -> Result<T>,
    ) -> Result<LapTimings> {
        let device = self.device.clone();
        let mut laps = Vec::new();
        let whole = self.measure(steps, || {
            let _step = probe::step();
            let mut lap = Lap {
                device: &device,
                phases: Vec::new(),
            };
            let value = step(&mut lap)?;
            laps.push(lap.phases);
            Ok::<_, Error>(value)
        })?;
        let mut phases: Vec<(&'static str, Timing)> = Vec::new();
        for (i, lap) in laps.into_iter().enumerate() {
            for (phase, ms) in lap {
                let known = phases.iter().position(|(name, _)| *name == phase);
                let place = known.unwrap_or_else(|| {
                    phases.push((phase, Timing::default()));
                    phases.len() - 1
                });
                let timing = &mut phases[place].1;
                match i < whole.warmup_ms.len() {
                    true => timing.warmup_ms.push(ms),
                    false => timing.samples_ms.push(ms),
                }
            }
        }
        Ok(LapTimings { phases, whole })
    }
}
