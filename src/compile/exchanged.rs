//! Which exchanges of a plan a GPU begins at once.

use super::op::Op;
use super::plan::Plan;
use std::ops::Range;

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
    use super::super::calls::in_phases;
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
