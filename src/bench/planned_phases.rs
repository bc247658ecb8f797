//! The phases of a planned step, timed at the calls where they begin.

use super::laps::Lap;
use crate::Result;
use crate::compile::{Phase, Plan};
use crate::probe::{self, Event, Kind, Listener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Times the calls of a plan as the executor makes them, one after another on this thread. On a GPU a step is one
/// launch, and there is nothing to time.
pub(super) struct PlannedPhases {
    clock: Arc<Clock>,
    _listening: probe::Listening,
}

/// The phases, in the order of their rows.
const PHASES: [&str; 3] = ["forward", "backward", "optimizer"];

/// What hears the calls.
struct Clock {
    /// Which of [`PHASES`] each call belongs to, in the order of a step.
    phases: Vec<usize>,
    thread: ThreadId,
    step: Mutex<StepTimes>,
}

#[derive(Default)]
struct StepTimes {
    calls: usize,
    /// The end of the last call; the beginning of the first.
    last: Option<Instant>,
    spent: [Duration; PHASES.len()],
}

impl PlannedPhases {
    /// Listens until it is dropped.
    pub fn new(plan: &Plan) -> Self {
        let clock = Arc::new(Clock {
            phases: phases(plan),
            thread: thread::current().id(),
            step: Mutex::default(),
        });
        Self {
            _listening: probe::listen(clock.clone()),
            clock,
        }
    }

    /// Runs `work`, which makes the calls of one step, and records how long each phase of it was. What is before the
    /// first call and after the last is of no phase.
    pub fn time<T>(
        &self,
        lap: &mut Lap<'_>,
        whole: &'static str,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        *self.clock.step() = StepTimes::default();
        let value = {
            let _range = probe::phase(whole);
            work()?
        };
        let spent = self.clock.step().spent;
        for (phase, spent) in PHASES.into_iter().zip(spent) {
            if !spent.is_zero() {
                lap.add(phase, spent.as_secs_f64() * 1e3);
            }
        }
        Ok(value)
    }
}

impl Clock {
    fn step(&self) -> MutexGuard<'_, StepTimes> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_call(&self, event: &Event<'_>) -> bool {
        event.kind == Kind::Op && thread::current().id() == self.thread
    }
}

impl Listener for Clock {
    fn entered(&self, event: &Event<'_>) {
        if self.is_call(event) {
            self.step().last.get_or_insert(event.at);
        }
    }

    fn left(&self, event: &Event<'_>) {
        if !self.is_call(event) {
            return;
        }
        let mut step = self.step();
        let since = step.last.replace(event.at).unwrap_or(event.at);
        if let Some(&phase) = self.phases.get(step.calls) {
            step.spent[phase] += event.at.saturating_duration_since(since);
        }
        step.calls += 1;
    }
}

/// The phase of each call of a step, in the order in which the CPU's executor makes them.
fn phases(plan: &Plan) -> Vec<usize> {
    let micro_batch = plan.per_micro_batch();
    let before = 0..micro_batch.start;
    let after = micro_batch.end..plan.calls().len();
    let repeated = (0..plan.micro_batches()).flat_map(|_| micro_batch.clone());
    let of_call = of_calls(plan);
    let order = before.chain(repeated).chain(after);
    order.map(|call| of_call[call]).collect()
}

/// The phase of each call of a plan. The gradients of head and loss are computed right after the loss, some rows at a
/// time: the products that read the gradient of the logits belong to backward, the loss itself to forward.
fn of_calls(plan: &Plan) -> Vec<usize> {
    let mut logits_gradient = None;
    let of_call = plan.calls().iter().map(|call| match call.phase {
        Phase::Forward => 0,
        Phase::Loss => {
            if call.op.name() == "cross_entropy" {
                logits_gradient = Some(call.writes["logits"].buffer); // in place
            }
            let mut read = call.reads.iter();
            let is_gradient =
                call.op.is_product() && read.any(|operand| Some(operand.buffer) == logits_gradient);
            usize::from(is_gradient || call.op.name() == "loss_gradient")
        }
        Phase::Backward => 1,
        Phase::Clip | Phase::Optimizer => 2,
    });
    of_call.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{PlanConfig, TrainStep};
    use crate::model::{TransformerConfig, flops};
    use candle_core::Device;

    /// Backward has the head's gradients too: by FLOPs, forward and backward are what they are eagerly.
    #[test]
    fn each_phase_has_the_products_of_its_own() {
        let config = TransformerConfig {
            vocab_size: 9000, // some rows of logits at a time
            context_length: 512,
            d_model: 32,
            num_layers: 2,
            num_heads: 2,
            d_ff: 64,
            ..Default::default()
        };
        let (batch_size, sequence_length) = (2, 400);
        let plan = PlanConfig {
            batch_size,
            sequence_length,
            ..Default::default()
        };
        let (plan, _) = TrainStep::plan_on(&Device::Cpu, &config, &plan).unwrap();
        let losses = plan.calls().iter();
        let losses = losses.filter(|call| call.op.name() == "cross_entropy");
        assert!(losses.count() > 1);
        let mut found = [0.0; PHASES.len()];
        for (call, phase) in plan.calls().iter().zip(of_calls(&plan)) {
            found[phase] += call.op.flops();
        }
        let expected = [flops::forward, flops::backward];
        let expected = expected.map(|of| of(&config, batch_size, sequence_length).total());
        assert_eq!(found, [expected[0], expected[1], 0.0]);
    }
}
