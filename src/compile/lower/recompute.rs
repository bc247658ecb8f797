//! What backward recomputes, with the same bits, instead of finding it there.

use super::super::plan::Phase;
use super::Lower;
use crate::Result;
use std::cell::Cell;

/// What is recomputed beside the graph's checkpointed segments: the first forms of each kind, so many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recompute {
    /// In how many norms the sum that they read: what it is the sum of stays, of which the stream does anyway. On a GPU
    /// in half precision, where the branch takes half as much as the sum.
    pub sums: usize,
    /// In how many gated maps gate and up: half of what a transformer's block leaves, and half of its products.
    pub gates: usize,
}

/// What is left of [`Recompute`] while forms are found.
pub(super) struct Choice {
    sums: Cell<usize>,
    gates: Cell<usize>,
}

impl Choice {
    pub fn new(recompute: Recompute) -> Self {
        Self {
            sums: Cell::new(recompute.sums),
            gates: Cell::new(recompute.gates),
        }
    }

    /// Whether the next sum is recomputed.
    pub fn takes_sum(&self) -> bool {
        takes(&self.sums)
    }

    /// How much of what was wanted there was.
    pub fn taken(&self, wanted: Recompute) -> Recompute {
        Recompute {
            sums: wanted.sums - self.sums.get(),
            gates: wanted.gates - self.gates.get(),
        }
    }

    /// Whether the next gate is recomputed.
    pub fn takes_gate(&self) -> bool {
        takes(&self.gates)
    }
}

fn takes(left: &Cell<usize>) -> bool {
    let count = left.get();
    left.set(count.saturating_sub(1));
    count > 0
}

impl Lower<'_> {
    /// Runs the checkpointed segments again whose last form is number `last`, for backward, which comes to it now.
    pub(super) fn recompute_segments(&mut self, last: usize) -> Result<()> {
        let program = self.program.clone();
        let forms = self.forms.clone();
        let at = |form: usize| forms.get(form).map(|placed| placed.at);
        let ending = program.segments.iter().filter(|segment| {
            let holds = |form| at(form).is_some_and(|at| segment.contains(&at));
            holds(last) && !holds(last + 1)
        });
        for segment in ending {
            self.forget(segment.clone());
            assert_eq!(self.plan.phase, Phase::Backward);
            for placed in forms.iter().filter(|placed| segment.contains(&placed.at)) {
                self.run_forward(placed)?;
            }
        }
        Ok(())
    }

    /// Forgets where the values lie that these nodes make: backward makes them again.
    fn forget(&mut self, nodes: std::ops::Range<usize>) {
        let program = self.program.clone();
        let is_made = |value: usize| {
            let maker = program.maker(crate::graph::ValueId(value));
            maker.is_some_and(|maker| nodes.contains(&maker))
        };
        for (value, place) in self.places.iter_mut().enumerate() {
            if is_made(value) {
                *place = None;
            }
        }
        self.dense.retain(|(value, _), _| !is_made(*value));
    }
}
