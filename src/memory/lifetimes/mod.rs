//! Lifetimes of the buffers of an eager pass, computed from its graph alone.
//!
//! Time is counted in ticks: one for each kernel call and one for each event of the graph. A buffer is alive from the
//! tick that makes it to the last that needs it:
//!
//! - **A value** lives until the last of: its last read; its drop, as the trace recorded it; the backward of every op
//!   that has it as an input or extra input, has made it, or has saved it (candle's nodes hold all of these). A cast of
//!   a weight that an autocast region holds is dropped at the end of the region, unless an op holds it.
//! - **A recomputed segment** makes its values again in backward, with the lifetimes of a whole graph. The copies of
//!   its inputs live until the segment's backward is done, and so do values from outside that had been freed and are
//!   made again.
//! - **A gradient** lives from the first op that makes or passes on a part of it to the backward of the op that made
//!   its value; a weight's gradient lives to the end. The first part becomes the sum. Later parts are added to it, so
//!   they live only for the addition. An op that passes on its output's gradient makes no buffer: two gradients share
//!   one, which is not added to in place if several inputs get it.
//! - **Scratch** of an op lives from the first of its kernels that writes it to the last that reads it. A kernel's
//!   workspace lives while the kernel runs. Ids that an op checks are copied, and the copy lives as long as what the op
//!   saves.

mod backward;
mod pass;

use super::{MemoryKind, Mode};
use crate::graph::{Graph, Node, ValueId};
use backward::{Gradient, Gradients};
use pass::Pass;

#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer {
    pub kind: MemoryKind,
    pub name: BufferName,
    pub formula: Formula,
    /// In f64: exact to 2^53, without overflow beyond.
    pub elements: f64,
    pub width: usize,
    /// The tick that makes it.
    from: usize,
    /// The last tick that needs it.
    until: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum BufferName {
    Named(&'static str),
    /// A weight, or a buffer of its size.
    Weight(ValueId),
    /// The output of the node at this event.
    Output(usize),
}

/// The number of elements of a buffer, as reports write it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Formula {
    Letters(&'static str),
    Of(ValueId),
}

impl From<&'static str> for BufferName {
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
    /// Creates a buffer that is alive before, during and after the pass.
    pub fn new(
        kind: MemoryKind,
        what: impl Into<BufferName>,
        formula: impl Into<Formula>,
        elements: f64,
        width: usize,
    ) -> Self {
        Self {
            kind,
            name: what.into(),
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

/// The peak of a pass, and the buffers alive then and after forward.
pub(super) struct Lifetimes {
    /// The peak, in f64: sums of bytes beyond 64 bits do not overflow.
    pub peak_bytes: f64,
    /// Buffers alive at the peak.
    pub at_peak: Vec<Buffer>,
    /// Buffers alive when forward is done.
    pub after_forward: Vec<Buffer>,
}

impl Lifetimes {
    /// Returns lifetimes for sizes that cannot be traced, because one tensor alone exceeds the address space.
    pub fn beyond(mut residents: Vec<Buffer>) -> Self {
        let (kind, what) = (MemoryKind::Activations, "more than can be addressed");
        residents.push(Buffer::new(kind, what, "2^63 and more", f64::INFINITY, 1));
        Self {
            peak_bytes: f64::INFINITY,
            at_peak: residents.clone(),
            after_forward: residents,
        }
    }

    /// Computes the lifetimes of `graph` as far as `mode` goes, with `residents` alive from the beginning, and
    /// `update`, scratch memory of the optimizer, at the end of a training step.
    pub fn of(
        graph: &Graph,
        mode: Mode,
        residents: impl IntoIterator<Item = Buffer>,
        update: Option<Buffer>,
    ) -> Self {
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
                pass.buffers[buffer].elements = 0.0; // a scalar is smaller than a tensor's record
            }
            gradients.insert(output.value, Gradient::shared(buffer));
            pass.backward(output.value, &mut gradients);
            pass.end(after_forward);
            if mode == Mode::TrainStep {
                pass.unscale();
                pass.now += 1;
                update.map(|scratch| pass.add(scratch));
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

/// Returns the peak in bytes up to tick `last`, and its tick.
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

/// Returns the values that forward makes and that are alive when it is done, with the nodes that made or saved them.
pub(super) fn after_forward(graph: &Graph) -> Vec<(ValueId, &Node)> {
    let mut pass = Pass::new(graph, []);
    pass.run(0..graph.events.len(), false);
    let values = pass.buffer_of.iter().enumerate();
    let there = values.filter_map(|(i, buffer)| buffer.map(|_| i));
    let there = there.filter_map(|i| Some((ValueId(i), pass.node(pass.makers[i]?)?)));
    there.collect()
}

/// Returns the number of elements in f64, which does not overflow.
pub(super) fn elements(shape: &[usize]) -> f64 {
    shape.iter().map(|dim| *dim as f64).product()
}
