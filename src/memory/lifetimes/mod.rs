//! When each buffer of an eager pass is alive, from its graph alone.
//!
//! Time is counted in moments, one for each call of a kernel and each event of the graph. A buffer is alive from the
//! moment in which it is made to the last in which something needs it:
//!
//! - **A value** lives until the last of: its last read; its drop, as the trace has recorded it; the backward of every
//!   op that has it as an input, reads it beside its inputs, has made it or keeps it (candle's nodes hold all of
//!   these). A cast of a weight that an autocast region holds is dropped where the region ends, if no op holds it.
//! - **A segment** that is recomputed makes its values again in backward, which live as those of the whole graph do.
//!   The copies of its inputs, and what it reads from outside and is gone there, live until backward is through the
//!   segment.
//! - **A gradient** lives from the first op that makes or passes on a part of it to the backward of the op that has
//!   made its value; a weight's to the end. The first part is taken as it is, later parts are added to it, so that they
//!   live for the addition alone. An op that passes its output's gradient on makes nothing: that is one buffer under
//!   two names, which is not added to in place where several inputs get it.
//! - **Scratch** of an op lives from the first of its kernels that writes it to the last that reads it, and what a
//!   kernel takes for itself while it runs. Ids that an op checks are copied, and live as long as what it keeps.

mod backward;
mod pass;

use super::{MemoryKind, Mode};
use crate::graph::{Graph, Node, ValueId};
use backward::{Gradient, Gradients};
use pass::Pass;

#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer {
    pub kind: MemoryKind,
    pub what: What,
    pub formula: Formula,
    /// In f64: exact to 2^53, and no overflow beyond.
    pub elements: f64,
    pub width: usize,
    /// The moment in which it is made,
    from: usize,
    /// and the last in which it is needed.
    until: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Named(&'static str),
    /// A weight, or what has its size.
    Weight(ValueId),
    /// The output of the node that is this event.
    Output(usize),
}

/// How many elements a buffer has, as reports write it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Formula {
    Letters(&'static str),
    Of(ValueId),
}

impl From<&'static str> for What {
    fn from(name: &'static str) -> Self {
        Self::Named(name)
    }
}

impl From<&'static str> for Formula {
    fn from(letters: &'static str) -> Self {
        Self::Letters(letters)
    }
}

impl From<ValueId> for Formula {
    fn from(value: ValueId) -> Self {
        Self::Of(value)
    }
}

const END: usize = usize::MAX;

impl Buffer {
    /// One that is there before the pass and after it.
    pub fn new(
        kind: MemoryKind,
        what: impl Into<What>,
        formula: impl Into<Formula>,
        elements: f64,
        width: usize,
    ) -> Self {
        Self {
            kind,
            what: what.into(),
            formula: formula.into(),
            elements,
            width,
            from: 0,
            until: END,
        }
    }

    pub fn bytes(&self) -> f64 {
        self.elements * self.width as f64
    }

    fn is_alive(&self, moment: usize) -> bool {
        (self.from..=self.until).contains(&moment)
    }
}

/// What is alive in a pass when it matters.
pub(super) struct Lifetimes {
    /// The most that is alive at once, in bytes. In f64, which goes on where bytes in 64 bits end.
    pub peak_bytes: f64,
    /// What is alive then,
    pub at_peak: Vec<Buffer>,
    /// and when forward is done.
    pub after_forward: Vec<Buffer>,
}

impl Lifetimes {
    /// Of sizes that no graph can have: one tensor alone cannot be addressed.
    pub fn beyond(mut residents: Vec<Buffer>) -> Self {
        let (kind, what) = (MemoryKind::Activations, "more than can be addressed");
        residents.push(Buffer::new(kind, what, "2^63 and more", f64::INFINITY, 1));
        Self {
            peak_bytes: f64::INFINITY,
            at_peak: residents.clone(),
            after_forward: residents,
        }
    }

    /// Those of `graph`, as far as `mode` goes, with `residents` there from the beginning.
    pub fn of(graph: &Graph, mode: Mode, residents: impl IntoIterator<Item = Buffer>) -> Self {
        let mut pass = Pass::new(graph, residents);
        pass.run(0..graph.events.len(), false);
        pass.now += 1;
        let after_forward = pass.now;
        if mode.has_backward()
            && let Some(output) = graph.outputs.first()
        {
            pass.now += 1;
            let mut gradients = Gradients::new();
            let buffer = pass.make_like(output, "the output's gradient");
            if elements(graph.shape_of(output)) <= 1.0 {
                pass.buffers[buffer].elements = 0.0; // a scalar is less than a tensor's record
            }
            gradients.insert(output.value, Gradient::shared(buffer));
            pass.backward(output.value, &mut gradients);
            pass.end(after_forward);
            if mode == Mode::TrainStep {
                pass.unscale();
            }
        } else {
            pass.end(END);
        }
        let (peak_bytes, peak) = peak(&pass.buffers, pass.now);
        let alive = |moment| {
            let buffers = pass.buffers.iter().filter(|buffer| buffer.is_alive(moment));
            buffers.copied().collect()
        };
        Self {
            peak_bytes,
            at_peak: alive(peak),
            after_forward: alive(after_forward),
        }
    }
}

/// The most bytes that are alive at once until the moment `last`, and when.
fn peak(buffers: &[Buffer], last: usize) -> (f64, usize) {
    let mut change = vec![0.0; last + 2];
    for buffer in buffers {
        change[buffer.from] += buffer.bytes();
        if buffer.until <= last {
            change[buffer.until + 1] -= buffer.bytes();
        }
    }
    let mut alive_bytes = 0.0;
    let (mut peak_bytes, mut peak) = (0.0, 0);
    for (moment, change) in change.iter().enumerate().take(last + 1) {
        alive_bytes += change;
        if alive_bytes > peak_bytes {
            (peak_bytes, peak) = (alive_bytes, moment);
        }
    }
    (peak_bytes, peak)
}

/// The values that forward makes and that are there when it is done, with the nodes that make or keep them.
pub(super) fn after_forward(graph: &Graph) -> Vec<(ValueId, &Node)> {
    let mut pass = Pass::new(graph, []);
    pass.run(0..graph.events.len(), false);
    let values = pass.of.iter().enumerate();
    let there = values.filter_map(|(i, buffer)| buffer.map(|_| i));
    let there = there.filter_map(|i| Some((ValueId(i), pass.node(pass.makers[i]?)?)));
    there.collect()
}

/// In f64: no overflow.
pub(super) fn elements(shape: &[usize]) -> f64 {
    shape.iter().map(|dim| *dim as f64).product()
}
