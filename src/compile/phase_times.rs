//! Phase times of a planned step, measured at the points where one phase ends and the next begins.

use super::op::Phase;
use super::plan::Plan;
use crate::Result;
use std::ops::Range;

/// The time of each phase of a run, in ms. Their sum is the run from its first call to its last.
///
/// On a GPU each phase is recorded as a CUDA graph of its own, and is timed by events between the launches.
///
/// The gradients of head and loss are computed right after the loss, some rows at a time. Their matmuls count as
/// backward and the loss itself as forward, as in an eager step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTimes {
    /// Forward and loss.
    pub forward_ms: f64,
    /// Gradients.
    pub backward_ms: f64,
    /// Unscaling, clipping and the update, including the updates of an optimizer in backward.
    pub optimizer_ms: f64,
}

/// A phase of a step, as the stopwatch and profiles divide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Forward,
    Backward,
    Optimizer,
}

impl Part {
    pub fn of(phase: Phase) -> Self {
        match phase {
            Phase::Forward | Phase::Loss => Self::Forward,
            Phase::LossGradient | Phase::Backward => Self::Backward,
            Phase::Clip | Phase::Optimizer => Self::Optimizer,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
        }
    }
}

/// The phase of each call, by index.
#[derive(Debug)]
pub(super) struct Parts(Vec<Part>);

impl Parts {
    pub fn new(plan: &Plan) -> Self {
        let part = plan.calls().iter().map(|call| Part::of(call.phase));
        let mut parts: Vec<Part> = part.collect();
        // Consecutive exchanges are not split: all ranks must group them alike, whether or not they measure times.
        let is_exchange = |call: usize| plan.calls()[call].op.is_exchange();
        for call in 1..parts.len() {
            if is_exchange(call - 1) && is_exchange(call) {
                parts[call] = parts[call - 1];
            }
        }
        Self(parts)
    }

    /// Splits calls into runs of one phase each.
    pub fn pieces(&self, calls: Range<usize>) -> Vec<Range<usize>> {
        let mut start = calls.start;
        let same = self.0[calls].chunk_by(|a, b| a == b);
        let pieces = same.map(|piece| {
            start += piece.len();
            start - piece.len()..start
        });
        pieces.collect()
    }
}

/// A clock that records when a run changes phase. `M` is the type of a point in time.
#[derive(Debug)]
pub(super) struct PhaseClock<M> {
    pub parts: Parts,
    /// The start of each piece and its phase; `None` marks the end of the pieces before it.
    times: Vec<(Option<Part>, M)>,
}

impl<M> PhaseClock<M> {
    pub fn new(plan: &Plan) -> Self {
        Self {
            parts: Parts::new(plan),
            times: Vec::new(),
        }
    }

    pub fn start(&mut self) {
        self.times.clear();
    }

    pub fn begins(&mut self, first: usize, now: M) {
        self.times.push((Some(self.parts.0[first]), now));
    }

    /// Marks the end of the last piece, if no other follows immediately.
    pub fn ends(&mut self, now: M) {
        self.times.push((None, now));
    }

    /// Returns the phase times of the last run, or `None` before the first.
    pub fn times(&self, ms: impl Fn(&M, &M) -> Result<f64>) -> Result<Option<PhaseTimes>> {
        let mut times = PhaseTimes::default();
        for pair in self.times.windows(2) {
            let [(part, begin), (_, end)] = pair else {
                continue;
            };
            let sum = match part {
                Some(Part::Forward) => &mut times.forward_ms,
                Some(Part::Backward) => &mut times.backward_ms,
                Some(Part::Optimizer) => &mut times.optimizer_ms,
                None => continue, // a gap between pieces
            };
            *sum += ms(begin, end)?;
        }
        Ok((!self.times.is_empty()).then_some(times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{Batch, Step};
    use crate::model::{TransformerConfig, TransformerLM, flops};
    use candle_core::Device;

    /// Backward includes the head's gradients: FLOPs of forward and backward equal those of an eager step.
    #[test]
    fn each_phase_has_the_products_of_its_own() {
        let config = TransformerConfig {
            vocab_size: 9000, // the head runs on some rows of logits at a time
            context_length: 512,
            d_model: 32,
            num_layers: 2,
            num_heads: 2,
            d_ff: 64,
            ..Default::default()
        };
        let (batch_size, sequence_length) = (2, 400);
        let batch = Batch::meta(batch_size, sequence_length).unwrap();
        let model = TransformerLM::meta(&config).unwrap();
        let plan = Step::plan_for_model(&Device::Cpu, &model, &Default::default(), batch);
        let (plan, _) = plan.unwrap();
        let losses = plan.calls().iter();
        let losses = losses.filter(|call| call.phase == Phase::LossGradient);
        assert!(losses.count() > 4); // several chunks
        let mut found = [0.0; 3];
        for (call, part) in plan.calls().iter().zip(Parts::new(&plan).0) {
            found[part as usize] += call.op.flops();
        }
        let expected = [flops::forward, flops::backward];
        let expected = expected.map(|of| of(&config, batch_size, sequence_length).total());
        assert_eq!(found, [expected[0], expected[1], 0.0]);
    }

    #[test]
    fn moments_are_taken_between_phases() {
        let mut clock = PhaseClock {
            parts: Parts(vec![
                Part::Forward,
                Part::Forward,
                Part::Backward,
                Part::Forward,
                Part::Optimizer,
            ]),
            times: Vec::new(),
        };
        let ms = |from: &f64, to: &f64| Ok(to - from);
        assert_eq!(clock.times(ms).unwrap(), None);
        for _ in 0..2 {
            clock.start();
            let pieces = clock.parts.pieces(0..5);
            assert_eq!(pieces, [0..2, 2..3, 3..4, 4..5]);
            for (piece, now) in pieces.into_iter().zip([1.0, 4.0, 8.0, 16.0]) {
                clock.begins(piece.start, now);
            }
            clock.ends(32.0);
            clock.begins(4, 33.0);
            clock.ends(34.0);
            let times = PhaseTimes {
                forward_ms: 3.0 + 8.0,
                backward_ms: 4.0,
                optimizer_ms: 16.0 + 1.0,
            };
            assert_eq!(clock.times(ms).unwrap(), Some(times));
        }
        assert_eq!(clock.parts.pieces(1..3), [1..2, 2..3]);
    }
}
