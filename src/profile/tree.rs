//! Whose time is whose: each moment of a step belongs to the innermost op, phase or step around it.

use super::recording::{Recording, Span};
use crate::probe::Kind;

/// What follows from how a recording's spans lie in each other.
pub(super) struct Tree {
    /// For each span the outermost step around it, or that it is.
    pub step: Vec<Option<usize>>,
    /// For each span the innermost op, phase or outermost step around it.
    pub owner: Vec<Option<usize>>,
    /// For each op, phase and outermost step: its time without that of the ones that it owns.
    pub own_ns: Vec<u64>,
    /// For each span whether it owns an op.
    pub holds_ops: Vec<bool>,
    /// The outermost steps.
    pub steps: Vec<usize>,
}

impl Tree {
    pub fn new(recording: &Recording) -> Self {
        let spans = &recording.spans;
        let mut tree = Self {
            step: vec![None; spans.len()],
            owner: vec![None; spans.len()],
            own_ns: vec![0; spans.len()],
            holds_ops: vec![false; spans.len()],
            steps: Vec::new(),
        };
        // The outer comes before the inner, so that what is asked of a parent is known.
        for (i, span) in spans.iter().enumerate() {
            let parent = span.parent;
            let step_around = parent.and_then(|parent| tree.step[parent]);
            let begins_step = span.kind == Kind::Step && step_around.is_none();
            tree.step[i] = if begins_step { Some(i) } else { step_around };
            if begins_step {
                tree.steps.push(i);
            }
            tree.owner[i] = parent.and_then(|parent| match tree.is_owner(parent, spans) {
                true => Some(parent),
                false => tree.owner[parent],
            });
            if !tree.is_owner(i, spans) {
                continue;
            }
            tree.own_ns[i] = span.duration_ns();
            if let Some(owner) = tree.owner[i] {
                tree.own_ns[owner] = tree.own_ns[owner].saturating_sub(span.duration_ns());
                tree.holds_ops[owner] |= span.is_op();
            }
        }
        tree
    }

    /// Whether time is counted as span `i`'s.
    pub fn is_owner(&self, i: usize, spans: &[Span]) -> bool {
        match spans[i].kind {
            Kind::Op | Kind::OpBackward | Kind::Phase => true,
            Kind::Step => self.step[i] == Some(i),
            Kind::Module | Kind::Range => false,
        }
    }

    /// Whether reports speak of span `i`.
    pub fn counts(&self, i: usize) -> bool {
        self.steps.is_empty() || self.step[i].is_some()
    }

    /// How many steps there were; `None` if it is not known.
    pub fn num_steps(&self) -> Option<usize> {
        (!self.steps.is_empty()).then_some(self.steps.len())
    }
}
