//! Attribution of time: each point in a step's time belongs to the innermost op, phase or step around it.
//!
//! With a GPU's kernels, an op's time is that of the kernels it launched, and the time of a phase or step without a
//! kernel is GPU idle time.

use super::recording::{self, Recording};
use crate::probe::{Kind, Parts};

/// The nesting of a recording's spans.
pub(super) struct Tree<'a> {
    recording: &'a Recording,
    pub nodes: Vec<Node>,
    /// The outermost steps.
    pub steps: Vec<usize>,
    /// For each outermost step whether it was planned; the last element is for spans outside of steps.
    planned: Vec<bool>,
}

#[derive(Clone, Default)]
pub(super) struct Node {
    /// The span around it on its thread; only indices of earlier spans are accepted.
    parent: Option<usize>,
    /// The outermost step around it; itself if it is that step.
    step: Option<usize>,
    /// The innermost op, phase or outermost step around it.
    pub owner: Option<usize>,
    /// For an op, phase or outermost step: its time without the time of those that it owns.
    pub own_ns: u64,
    /// For an op: the parts of its own time.
    pub parts: Parts,
    /// Its time with everything inside.
    pub whole_ns: u64,
    /// For a phase or outermost step: the time without a kernel of it, without the phases that it owns. 0 on the CPU.
    pub idle_ns: u64,
    pub holds_ops: bool,
}

impl<'a> Tree<'a> {
    pub fn new(recording: &'a Recording) -> Self {
        let spans = &recording.spans;
        let mut tree = Self {
            recording,
            nodes: vec![Node::default(); spans.len()],
            steps: Vec::new(),
            planned: vec![false; spans.len() + 1],
        };
        // Outer spans come before inner ones, so a parent's fields are set already.
        for (i, span) in spans.iter().enumerate() {
            let parent = span.parent.filter(|parent| *parent < i);
            let step_around = parent.and_then(|parent| tree.nodes[parent].step);
            tree.nodes[i].parent = parent;
            tree.nodes[i].whole_ns = span.duration_ns();
            let begins_step = span.kind == Kind::Step && step_around.is_none();
            tree.nodes[i].step = if begins_step { Some(i) } else { step_around };
            if begins_step {
                tree.steps.push(i);
            }
            tree.nodes[i].owner = parent.and_then(|parent| match tree.is_owner(parent) {
                true => Some(parent),
                false => tree.nodes[parent].owner,
            });
            // Calls of a plan report their cost; eager ops have formulas, but for parts of an op.
            let step = tree.nodes[i].step.unwrap_or(spans.len());
            let is_part = tree.nodes[i]
                .owner
                .is_some_and(|owner| spans[owner].is_op());
            tree.planned[step] |= span.cost.is_some() && !is_part;
            if !tree.is_owner(i) {
                continue;
            }
            tree.nodes[i].own_ns = span.duration_ns();
            if let Some(owner) = tree.nodes[i].owner {
                tree.nodes[owner].own_ns =
                    tree.nodes[owner].own_ns.saturating_sub(span.duration_ns());
                tree.nodes[owner].holds_ops |= span.is_op();
            }
        }
        match recording.kernels.is_empty() {
            true => tree.part_on_the_host(),
            false => tree.take_kernels(),
        }
        tree
    }

    /// Sets the parts of ops' own time from what their kernels reported. An op that is only a matmul or only a softmax
    /// needs no report.
    fn part_on_the_host(&mut self) {
        let spans = self.recording.spans.iter();
        for (i, span) in spans.enumerate().filter(|(_, span)| span.is_op()) {
            let own_ns = self.nodes[i].own_ns;
            let told = span.parts.sum_ns();
            self.nodes[i].parts = if told > own_ns {
                span.parts.scaled(own_ns, told)
            } else if told > 0 {
                span.parts
            } else {
                recording::whole_part(span, own_ns, self.nodes[i].holds_ops)
            };
        }
    }

    /// Replaces the host's times with those of the kernels.
    fn take_kernels(&mut self) {
        let (spans, kernels) = (&self.recording.spans, &self.recording.kernels);
        // Phases and steps, without the phases in them.
        let mut frame: Vec<Option<usize>> = vec![None; spans.len()];
        for (i, span) in spans.iter().enumerate() {
            let around = self.nodes[i].parent.and_then(|parent| frame[parent]);
            frame[i] = around;
            if self.is_owner(i) && !span.is_op() {
                frame[i] = Some(i);
                self.nodes[i].idle_ns = span.duration_ns();
                if let Some(around) = around {
                    self.nodes[around].idle_ns = self.nodes[around]
                        .idle_ns
                        .saturating_sub(span.duration_ns());
                }
            }
        }
        for node in &mut self.nodes {
            (node.own_ns, node.whole_ns) = (0, 0);
        }
        for kernel in kernels {
            let Some(at) = kernel.span.filter(|at| *at < spans.len()) else {
                continue;
            };
            let ns = kernel.duration_ns();
            let owner = match self.is_owner(at) {
                true => Some(at),
                false => self.nodes[at].owner,
            };
            if let Some(owner) = owner {
                self.nodes[owner].own_ns += ns;
                self.nodes[owner].parts += match spans[owner].name() == "softmax" {
                    true => recording::whole_part(&spans[owner], ns, true), // composed of candle's own ops
                    false => kernel.parts(),
                };
            }
            if let Some(frame) = frame[at] {
                self.nodes[frame].idle_ns = self.nodes[frame].idle_ns.saturating_sub(ns);
            }
            let mut around = Some(at);
            while let Some(i) = around {
                self.nodes[i].whole_ns += ns;
                around = self.nodes[i].parent;
            }
        }
    }

    /// Returns whether span `i` owns time.
    pub fn is_owner(&self, i: usize) -> bool {
        match self.recording.spans[i].kind {
            Kind::Op | Kind::OpBackward | Kind::Phase => true,
            Kind::Step => self.nodes[i].step == Some(i),
            Kind::Module | Kind::Range => false,
        }
    }

    /// Returns the op that owns the work of span `i`, or `i` itself if no op does.
    pub fn op_or_itself(&self, i: usize) -> usize {
        let spans = &self.recording.spans;
        match self.nodes[i].owner {
            Some(owner) if spans[owner].is_op() && !self.is_owner(i) => owner,
            _ => i,
        }
    }

    /// Returns whether reports cover span `i`; false for an index out of range.
    pub fn counts(&self, i: usize) -> bool {
        let node = self.nodes.get(i);
        node.is_some_and(|node| self.steps.is_empty() || node.step.is_some())
    }

    /// Returns whether the step around span `i` was planned.
    pub fn is_planned(&self, i: usize) -> bool {
        self.planned[self.nodes[i].step.unwrap_or(self.planned.len() - 1)]
    }

    /// Returns the number of steps; `None` if none were recorded.
    pub fn num_steps(&self) -> Option<usize> {
        (!self.steps.is_empty()).then_some(self.steps.len())
    }
}
