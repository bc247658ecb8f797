//! The loop over a plan's calls, on any device; what the probe hears of it; and which exchanges a GPU begins at once.

use super::op::Op;
use super::plan::{BufferRange, Call, Phase, Plan};
use crate::Result;
use crate::ops::lowering::Named;
use crate::probe::{self, Kind};
use candle_core::DType;
use std::ops::{ControlFlow, Range};

/// Runs calls of a micro-batch in order, until one ends the step: whether it goes on.
pub(super) fn run(
    plan: &Plan,
    calls: Range<usize>,
    micro_batch: usize,
    mut compute: impl FnMut(usize, &Call) -> Result<ControlFlow<()>>,
) -> Result<ControlFlow<()>> {
    let mut phase = ProbedPhase::default();
    for index in calls.filter(|index| plan.is_run_in(*index, micro_batch)) {
        let call = &plan.calls()[index];
        let next = if probe::is_listening() {
            phase.enter(call.phase);
            run_probed(plan, call, || compute(index, call))?
        } else {
            compute(index, call)?
        };
        if next.is_break() {
            return Ok(next);
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// The phase that the probe was told of last, which lasts until the next.
#[derive(Default)]
pub(super) struct ProbedPhase(Option<(&'static str, probe::RangeGuard)>);

impl ProbedPhase {
    fn enter(&mut self, phase: Phase) {
        let name = phase.name();
        if self.0.as_ref().is_none_or(|(last, _)| *last != name) {
            self.0 = None; // ended before the next begins
            self.0 = Some((name, probe::phase(probed_phase(phase))));
        }
    }
}

/// Replays calls of one phase, and then, while they run, tells the probe of them: of their ranges, in which nothing
/// happens, and which call each kernel is of. Where that is not known the phase alone is told of.
#[cfg(feature = "cuda")]
pub(super) fn replay(
    plan: &Plan,
    calls: Range<usize>,
    kernels: Option<&[usize]>,
    phase: &mut ProbedPhase,
    launch: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let of = plan.calls()[calls.start].phase;
    let Some(kernels) = kernels else {
        // In a range of its own: in one with others its kernels would be taken for theirs.
        *phase = ProbedPhase::default();
        let mut own = ProbedPhase::default();
        own.enter(of);
        return launch();
    };
    phase.enter(of);
    launch()?;
    for call in &plan.calls()[calls.clone()] {
        let _goes_on = run_probed(plan, call, || Ok(ControlFlow::Continue(())))?;
    }
    let numbers = kernels.iter().map(|call| call - calls.start);
    probe::replayed(calls.len(), &numbers.collect::<Vec<_>>());
    Ok(())
}

/// Calls in stretches of one phase each, but that exchanges in a row are not parted: all ranks have to begin the same
/// ones at once, and not all may have somebody who listens.
#[cfg(any(feature = "cuda", test))]
pub(super) fn in_phases(plan: &Plan, calls: Range<usize>) -> Vec<Range<usize>> {
    let mut start = calls.start;
    let exchanges = |a: &Call, b: &Call| a.op.is_exchange() && b.op.is_exchange();
    let same = |a: &Call, b: &Call| a.phase.name() == b.phase.name() || exchanges(a, b);
    let stretches = plan.calls()[calls].chunk_by(same);
    let stretches = stretches.map(|stretch| {
        start += stretch.len();
        start - stretch.len()..start
    });
    stretches.collect()
}

/// Runs a call in an op's range at its place in the model. What is backward is said by the phase: each call is an op of
/// its own, and costs what it costs.
fn run_probed(
    plan: &Plan,
    call: &Call,
    compute: impl FnOnce() -> Result<ControlFlow<()>>,
) -> Result<ControlFlow<()>> {
    let name = call.op.name();
    let places = call.path.split('/');
    let path = places.fold(probe::current(), |path, place| path.child(place));
    let range = probe::op(Kind::Op, name, path.child(name));
    let next = compute()?;
    let operands = |operands: &Named<BufferRange>| operands.map(|operand| shape(plan, operand));
    let (reads, writes) = (operands(&call.reads), operands(&call.writes));
    if let Some(written) = writes.first() {
        let inputs: Vec<probe::Operand<'_>> = reads.iter().map(probed).collect();
        let operands = probe::Operands {
            inputs: &inputs,
            output: probed(written),
        };
        range.leave_costing(operands, plan.cost_of(call));
    }
    Ok(next)
}

fn probed((dims, dtype): &(Vec<usize>, DType)) -> probe::Operand<'_> {
    probe::Operand {
        dims,
        dtype: *dtype,
    }
}

/// The shape of an operand: its buffer's, or how many elements it is of that.
fn shape(plan: &Plan, operand: &BufferRange) -> (Vec<usize>, DType) {
    let buffer = plan.buffer_of(operand);
    let shape = match operand.elements.len() == buffer.elements() {
        true => buffer.shape.clone(),
        false => vec![operand.elements.len()],
    };
    (shape, buffer.dtype)
}

/// The phases that profiles know: loss belongs to forward, as in an eager step, though here its gradient comes with it.
fn probed_phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward | Phase::Loss | Phase::LossGradient => "forward",
        Phase::Backward => "backward",
        Phase::Clip | Phase::Optimizer => "optimizer",
    }
}

/// What is to or from one rank, or of parts, goes so many bytes at once. In a group all ranks send at the same time; in
/// smaller ones (8 to 128 MiB were tried) one often waits for another, which costs more than that the first layer waits
/// longer.
const GROUP_BYTES: usize = 512 << 20;

impl Op {
    /// Whether it is an exchange with other ranks.
    pub fn is_exchange(&self) -> bool {
        matches!(self, Self::AllReduce { .. }) || self.is_grouped()
    }

    /// Whether it is an exchange that goes with those after it.
    fn is_grouped(&self) -> bool {
        matches!(
            self,
            Self::Reduce { .. }
                | Self::Broadcast { .. }
                | Self::AllGather { .. }
                | Self::ReduceScatter { .. }
        )
    }
}

impl Plan {
    /// The exchange `first` and those after it, before call `end`, that go with it: an all-reduce none, else as many as
    /// [`GROUP_BYTES`] wants, or as are parts of one buffer.
    pub(super) fn exchanged_at_once(&self, first: usize, end: usize) -> Range<usize> {
        let calls = self.calls()[first..end].iter();
        let (mut bytes, mut last, mut count) = (0, None, 0);
        for call in calls.take_while(|call| call.op.is_grouped()) {
            let x = call.writes.operand("x");
            if bytes >= GROUP_BYTES && last != Some(x.buffer) {
                break;
            }
            bytes += x.elements.len() * self.buffer_of(x).dtype.size_in_bytes();
            last = Some(x.buffer);
            count += 1;
        }
        first..first + count.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::phase_times::PhaseClock;
    use super::super::{Batch, Step, StepConfig, StepRanks, Target};
    use super::*;
    use crate::distributed::{FullyShardConfig, ReplicatedConfig, Shard};
    use crate::model::TransformerConfig;
    use crate::precision::Precision;

    /// The groups of exchanges in pieces of a plan.
    fn groups(plan: &Plan, pieces: impl IntoIterator<Item = Range<usize>>) -> Vec<Range<usize>> {
        let mut groups = Vec::new();
        for piece in pieces {
            let mut index = piece.start;
            while index < piece.end {
                let group = plan.exchanged_at_once(index, piece.end);
                let is_exchange = plan.calls()[index].op.is_exchange();
                index = if is_exchange { group.end } else { index + 1 };
                groups.extend(Some(group).filter(|_| is_exchange));
            }
        }
        groups
    }

    /// A rank that is profiled or whose phases are timed runs in pieces, and exchanges the same at once as the others.
    #[test]
    fn pieces_do_not_part_exchanges() {
        let model = TransformerConfig {
            num_layers: 4,
            ..TransformerConfig::tiny()
        };
        let own = Shard {
            rank: 1,
            world_size: 2,
        };
        let parts = FullyShardConfig {
            bucket_bytes: 4 << 20,
            ..Default::default()
        };
        let exchange = ReplicatedConfig::default();
        for ranks in [
            StepRanks::FullySharded(parts, own),
            StepRanks::ShardedOptimizer(exchange, own),
            StepRanks::Replicated(exchange),
        ] {
            for accumulation in [1, 2] {
                let config = StepConfig {
                    precision: Precision::BF16,
                    clip_norm: Some(1.0),
                    accumulation,
                    ranks,
                    ..Default::default()
                };
                let batch = Batch::hollow(4 * accumulation, 256).unwrap();
                let (plan, _) = Step::plan_of(Target::Cuda, &model, &config, batch).unwrap();
                let all = plan.per_micro_batch().start..plan.calls().len();
                let whole = [plan.per_micro_batch(), plan.per_micro_batch().end..all.end];
                let expected = groups(&plan, whole.clone());
                let exchanges = plan.calls()[all].iter();
                let exchanges = exchanges.filter(|call| call.op.is_exchange()).count();
                assert_eq!(expected.iter().map(Range::len).sum::<usize>(), exchanges);
                let phases = whole
                    .iter()
                    .flat_map(|calls| in_phases(&plan, calls.clone()));
                let phases: Vec<_> = phases.collect();
                assert!(phases.len() > 3);
                assert_eq!(groups(&plan, phases), expected);
                let clock = PhaseClock::<usize>::new(&plan);
                let timed = whole.iter().flat_map(|calls| clock.pieces(calls.clone()));
                let timed = timed.flat_map(|calls| in_phases(&plan, calls));
                assert_eq!(groups(&plan, timed), expected);
            }
        }
    }
}
