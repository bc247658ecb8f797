//! One call of a plan.

use super::buffer::{BufferId, Buffers};
use super::op::Op;
use crate::ops::lowering::Named;
use crate::probe::Path;
use std::fmt;
use std::ops::Range;

/// The part of a step that a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// From tokens to what the head reads; without a loss, to logits.
    Forward,
    /// Head and loss.
    Loss,
    /// The loss's gradient, and those of head and loss where they are computed with it, some rows at a time.
    LossGradient,
    /// The gradients of the rest.
    Backward,
    /// The gradients' norm.
    Clip,
    /// The update.
    Optimizer,
}

impl Phase {
    /// As reports and the probe call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Loss | Self::LossGradient => "loss",
            Self::Backward => "backward",
            Self::Clip => "clip",
            Self::Optimizer => "optimizer",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Some elements of a buffer, one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// Whose.
    pub buffer: BufferId,
    /// Which.
    pub elements: Range<usize>,
}

impl BufferRange {
    /// All of one.
    pub(super) fn whole(buffers: &Buffers, id: BufferId) -> Self {
        Self {
            buffer: id,
            elements: 0..buffers[id].elements(),
        }
    }
}

/// One kernel call.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What is done, and its sizes.
    pub op: Op,
    /// Where in the model, for example `layers.3.attn`.
    pub path: String,
    /// The outermost module that this is in; the root, if it is in none.
    pub module: Path,
    /// The part of the step.
    pub phase: Phase,
    /// Which of [`Plan::costs`](super::Plan::costs) it belongs to. `None` for the mean loss and its gradient, copies of
    /// weights that are made first, and the update.
    pub part: Option<usize>,
    /// What is read, by the op's names.
    pub reads: Named<BufferRange>,
    /// What is written, by the op's names.
    pub writes: Named<BufferRange>,
}

impl Call {
    /// What is read, and then what is written.
    pub fn operands(&self) -> impl Iterator<Item = &BufferRange> + Clone {
        self.reads.iter().chain(self.writes.iter())
    }
}
