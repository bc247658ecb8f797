//! How long each phase of a planned step took: the moments at which one phase ends and the next begins.

use super::plan::{Phase, Plan};
use crate::Result;
use std::ops::Range;

/// What the phases of one run took, in ms. Together they are the run without what comes before its first call and after
/// its last.
///
/// On a GPU each phase is recorded as a graph of its own, and times are those of events between the launches.
///
/// The gradients of head and loss are computed right after the loss, some rows at a time: their products belong to
/// backward, the loss itself to forward, as in an eager step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTimes {
    /// The forward and the loss.
    pub forward_ms: f64,
    /// The gradients.
    pub backward_ms: f64,
    /// Unscaling, clipping and the update; those of an optimizer in backward are here too.
    pub optimizer_ms: f64,
}

/// Which phase a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Forward,
    Backward,
    Optimizer,
}

/// The moments, of type `M`, at which a run went from one phase to another.
#[derive(Debug)]
pub(super) struct PhaseClock<M> {
    /// By the call's number.
    parts: Vec<Part>,
    /// When a piece began; `None` is the end of those before.
    moments: Vec<(Option<Part>, M)>,
}

impl<M> PhaseClock<M> {
    pub fn new(plan: &Plan) -> Self {
        Self {
            parts: parts(plan),
            moments: Vec::new(),
        }
    }

    pub fn pieces(&self, calls: Range<usize>) -> Vec<Range<usize>> {
        let mut start = calls.start;
        let same = self.parts[calls].chunk_by(|a, b| a == b);
        let pieces = same.map(|piece| {
            start += piece.len();
            start - piece.len()..start
        });
        pieces.collect()
    }

    pub fn start(&mut self) {
        self.moments.clear();
    }

    pub fn begins(&mut self, first: usize, now: M) {
        self.moments.push((Some(self.parts[first]), now));
    }

    /// The piece that began last is over, and no other follows at once.
    pub fn ends(&mut self, now: M) {
        self.moments.push((None, now));
    }

    /// What the last run's phases took; `None` before the first.
    pub fn times(&self, ms: impl Fn(&M, &M) -> Result<f64>) -> Result<Option<PhaseTimes>> {
        let mut times = PhaseTimes::default();
        for pair in self.moments.windows(2) {
            let [(part, begin), (_, end)] = pair else {
                continue;
            };
            let sum = match part {
                Some(Part::Forward) => &mut times.forward_ms,
                Some(Part::Backward) => &mut times.backward_ms,
                Some(Part::Optimizer) => &mut times.optimizer_ms,
                None => continue, // between the pieces
            };
            *sum += ms(begin, end)?;
        }
        Ok((!self.moments.is_empty()).then_some(times))
    }
}

fn parts(plan: &Plan) -> Vec<Part> {
    let part = plan.calls().iter().map(|call| match call.phase {
        Phase::Forward | Phase::Loss => Part::Forward,
        Phase::LossGradient | Phase::Backward => Part::Backward,
        Phase::Clip | Phase::Optimizer => Part::Optimizer,
    });
    let mut parts: Vec<Part> = part.collect();
    // Exchanges in a row are not parted: all ranks begin the same ones at once, whether or not they look at the clock.
    let is_exchange = |call: usize| plan.calls()[call].op.is_exchange();
    for call in 1..parts.len() {
        if is_exchange(call - 1) && is_exchange(call) {
            parts[call] = parts[call - 1];
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{Batch, Step};
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
        let batch = Batch::hollow(batch_size, sequence_length).unwrap();
        let plan = Step::plan_of(&Device::Cpu, &config, &Default::default(), batch);
        let (plan, _) = plan.unwrap();
        let losses = plan.calls().iter();
        let losses = losses.filter(|call| call.phase == Phase::LossGradient);
        assert!(losses.count() > 4); // of several chunks
        let mut found = [0.0; 3];
        for (call, part) in plan.calls().iter().zip(parts(&plan)) {
            found[part as usize] += call.op.flops();
        }
        let expected = [flops::forward, flops::backward];
        let expected = expected.map(|of| of(&config, batch_size, sequence_length).total());
        assert_eq!(found, [expected[0], expected[1], 0.0]);
    }

    #[test]
    fn moments_are_taken_between_phases() {
        let mut clock = PhaseClock {
            parts: vec![
                Part::Forward,
                Part::Forward,
                Part::Backward,
                Part::Forward,
                Part::Optimizer,
            ],
            moments: Vec::new(),
        };
        let ms = |from: &f64, to: &f64| Ok(to - from);
        assert_eq!(clock.times(ms).unwrap(), None);
        for _ in 0..2 {
            clock.start();
            let pieces = clock.pieces(0..5);
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
        assert_eq!(clock.pieces(1..3), [1..2, 2..3]);
    }
}
