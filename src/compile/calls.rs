//! The loop over a plan's calls on any device, the events it reports to the probe, and the grouping of exchanges on
//! GPUs.

use super::op::Op;
use super::op::{BufferRange, Call, Phase};
use super::phase_times::Part;
use super::plan::Plan;
use crate::Result;
use crate::ops::lowering::Named;
use crate::probe::{self, Kind};
use candle_core::DType;
use std::ops::{ControlFlow, Range};

/// Runs the calls of a micro-batch in order. Returns `Break` if a call ended the step early, as after an overflow.
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

/// The phase that was last reported to the probe, open until the next begins.
#[derive(Default)]
pub(super) struct ProbedPhase(Option<(&'static str, probe::RangeGuard)>);

impl ProbedPhase {
    fn enter(&mut self, phase: Phase) {
        let name = Part::of(phase).name();
        if self.0.as_ref().is_none_or(|(last, _)| *last != name) {
            self.0 = None; // ends before the next begins
            self.0 = Some((name, probe::phase(name)));
        }
    }
}

/// Replays recorded calls of one phase and, while they run, reports to the probe an empty range for each call and the
/// call that each kernel belongs to. If `kernels` is `None`, only the phase is reported.
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
        // A range of its own: in a shared one its kernels would be attributed to other calls.
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
    probe::report_replay(calls.len(), &numbers.collect::<Vec<_>>());
    Ok(())
}

/// Runs a call inside an op range at its path in the model. Each call is reported as an op of its own with its own
/// cost; the phase tells forward from backward.
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
        let inputs: Vec<probe::Operand<'_>> = reads.iter().map(operand_of).collect();
        let operands = probe::Operands {
            inputs: &inputs,
            output: operand_of(written),
        };
        range.leave_costing(operands, plan.cost_of(call));
    }
    Ok(next)
}

fn operand_of((dims, dtype): &(Vec<usize>, DType)) -> probe::Operand<'_> {
    probe::Operand {
        dims,
        dtype: *dtype,
    }
}

/// Returns the shape of an operand: its buffer's, or its number of elements if it is a part of the buffer.
fn shape(plan: &Plan, operand: &BufferRange) -> (Vec<usize>, DType) {
    let buffer = plan.buffer_of(operand);
    let shape = match operand.elements.len() == buffer.elements() {
        true => buffer.shape.clone(),
        false => vec![operand.elements.len()],
    };
    (shape, buffer.dtype)
}

/// Consecutive exchanges, other than all-reduces, are grouped up to this size. Within a group all ranks send at the
/// same time. In smaller groups (8 to 128 MiB were tried) ranks often wait for each other, which costs more than the
/// first layer's longer wait for a large group.
const GROUP_BYTES: usize = 512 << 20;

impl Op {
    /// Returns whether it is an exchange with other ranks.
    pub fn is_exchange(&self) -> bool {
        matches!(self, Self::AllReduce { .. }) || self.is_grouped()
    }

    /// Returns whether it can be grouped with the exchanges that follow.
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
    /// Returns the exchange `first` and those after it, before call `end`, that are in its group. An all-reduce is
    /// alone. Others are grouped until they have [`GROUP_BYTES`]; exchanges of one buffer stay together.
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
    use super::super::phase_times::Parts;
    use super::super::{Batch, Step, StepConfig, StepRanks, Target};
    use super::*;
    use crate::distributed::{FullyShardConfig, ReplicatedConfig, Shard};
    use crate::model::{TransformerConfig, TransformerLM};
    use crate::precision::Precision;

    /// Returns the groups of exchanges in pieces of a plan.
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

    /// A rank that is profiled or timed runs its calls in pieces, but must group exchanges like the other ranks.
    #[test]
    fn pieces_do_not_part_exchanges() {
        let model = TransformerConfig {
            num_layers: 4,
            ..TransformerConfig::default()
        };
        let model = TransformerLM::meta(&model).unwrap();
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
                let batch = Batch::meta(4 * accumulation, 256).unwrap();
                let (plan, _) = Step::plan_for_model(Target::Cuda, &model, &config, batch).unwrap();
                let all = plan.per_micro_batch().start..plan.calls().len();
                let whole = [plan.per_micro_batch(), plan.per_micro_batch().end..all.end];
                let expected = groups(&plan, whole.clone());
                let exchanges = plan.calls()[all].iter();
                let exchanges = exchanges.filter(|call| call.op.is_exchange()).count();
                assert_eq!(expected.iter().map(Range::len).sum::<usize>(), exchanges);
                let parts = Parts::new(&plan);
                let pieces = whole.into_iter().flat_map(|calls| parts.pieces(calls));
                let pieces: Vec<_> = pieces.collect();
                assert!(pieces.len() > 2);
                assert_eq!(groups(&plan, pieces), expected);
            }
        }
    }
}
