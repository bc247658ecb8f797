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
            let x = &call.writes["x"];
            if bytes >= GROUP_BYTES && last != Some(x.buffer) {
                break;
            }
            bytes += x.elements.len() * self.buffer(x.buffer).dtype.size_in_bytes();
            last = Some(x.buffer);
            count += 1;
        }
        first..first + count.max(1)
    }
}
