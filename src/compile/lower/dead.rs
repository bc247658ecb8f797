//! Dead-call elimination, for example of statistics that no backward reads, or of the last matmul of a recomputed
//! segment.

use super::super::buffer::{BufferId, Buffers};
use super::super::op::Call;
use std::collections::HashSet;

/// Returns `calls` without those whose results nothing reads. `needed` are the buffers that are read afterwards;
/// buffers that the remaining calls read are added to it.
pub(super) fn remove_dead(
    calls: Vec<Call>,
    buffers: &Buffers,
    needed: &mut HashSet<BufferId>,
) -> Vec<Call> {
    let mut kept = Vec::with_capacity(calls.len());
    for call in calls.into_iter().rev() {
        let is_needed =
            |buffer: BufferId| needed.contains(&buffer) || !buffers[buffer].is_in_arena();
        if call.writes.iter().any(|operand| is_needed(operand.buffer)) {
            needed.extend(call.reads.iter().map(|operand| operand.buffer));
            if call.op.reads_what_it_writes() {
                needed.extend(call.writes.iter().map(|operand| operand.buffer));
            }
            kept.push(call);
        }
    }
    kept.reverse();
    kept
}
