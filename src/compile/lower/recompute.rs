//! Recomputation of checkpointed segments in backward.

use super::super::op::Phase;
use super::Lower;
use crate::Result;
use crate::graph::ValueId;

impl Lower<'_> {
    /// Recomputes the checkpointed segments that end with node `last`, whose backward comes next.
    pub(super) fn recompute_segments(&mut self, last: usize) -> Result<()> {
        let program = self.program.clone();
        let next = program.nodes.get(last + 1);
        let goes_on = |segment: &usize| next.is_some_and(|next| next.segments.contains(segment));
        let ending = program.nodes[last].segments.iter();
        for segment in ending.filter(|segment| !goes_on(segment)) {
            self.forget_segment(*segment);
            assert_eq!(self.plan.phase, Phase::Backward);
            for (i, node) in program.nodes.iter().enumerate() {
                if node.segments.contains(segment) {
                    self.run_forward(i)?;
                }
            }
        }
        Ok(())
    }

    /// Forgets the buffers of the values that a segment computes.
    fn forget_segment(&mut self, segment: usize) {
        let program = self.program.clone();
        let is_made = |value: usize| program.segments_of(ValueId(value)).contains(&segment);
        for (value, place) in self.places.iter_mut().enumerate() {
            if is_made(value) {
                *place = None;
            }
        }
        self.dense.retain(|(value, _), _| !is_made(*value));
    }
}
