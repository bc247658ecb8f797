//! Whose time is whose: each moment of a step belongs to the innermost op, phase or step around it.
//!
//! With a GPU's kernels, an op's time is that of the kernels which it launched, and what is left of a phase or a step
//! without any is the GPU's idle time.

use super::cost;
use super::recording::{Recording, Span};
use crate::probe::{Kind, Parts};

pub(super) struct Tree {
    /// For each span the one around it on its thread. A number that is no earlier span's is left out.
    parent: Vec<Option<usize>>,
    /// For each span the outermost step around it, or that it is.
    pub step: Vec<Option<usize>>,
    /// For each span the innermost op, phase or outermost step around it.
    pub owner: Vec<Option<usize>>,
    /// For each op, phase and outermost step: its time without that of the ones that it owns.
    pub own_ns: Vec<u64>,
    /// For each op what its own time is made of.
    pub parts: Vec<Parts>,
    /// For each span its time with all that is inside.
    pub whole_ns: Vec<u64>,
    /// For each phase and outermost step: how long no kernel of it ran, without the phases that it owns. Nothing on
    /// the CPU.
    pub idle_ns: Vec<u64>,
    /// For each span whether it owns an op.
    pub holds_ops: Vec<bool>,
    /// The outermost steps.
    pub steps: Vec<usize>,
    /// For each outermost step, and for what is in none at the end: whether it ran as planned.
    planned: Vec<bool>,
}

impl Tree {
    pub fn new(recording: &Recording) -> Self {
        let spans = &recording.spans;
        let mut tree = Self {
            parent: vec![None; spans.len()],
            step: vec![None; spans.len()],
            owner: vec![None; spans.len()],
            own_ns: vec![0; spans.len()],
            parts: vec![Parts::default(); spans.len()],
            whole_ns: spans.iter().map(Span::duration_ns).collect(),
            idle_ns: vec![0; spans.len()],
            holds_ops: vec![false; spans.len()],
            steps: Vec::new(),
            planned: vec![false; spans.len() + 1],
        };
        // The outer comes before the inner, so that what is asked of a parent is known.
        for (i, span) in spans.iter().enumerate() {
            let parent = span.parent.filter(|parent| *parent < i);
            let step_around = parent.and_then(|parent| tree.step[parent]);
            tree.parent[i] = parent;
            let begins_step = span.kind == Kind::Step && step_around.is_none();
            tree.step[i] = if begins_step { Some(i) } else { step_around };
            if begins_step {
                tree.steps.push(i);
            }
            // The calls of a plan say what they cost; eager ops have formulas.
            let step = tree.step[i].unwrap_or(spans.len());
            tree.planned[step] |= span.cost.is_some();
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
        match recording.kernels.is_empty() {
            true => tree.part_on_the_host(spans),
            false => tree.take_kernels(recording),
        }
        tree
    }

    /// What ops' own time is made of, by what their kernels told; an op that is a product or a softmax and nothing else
    /// need not tell.
    fn part_on_the_host(&mut self, spans: &[Span]) {
        for (i, span) in spans.iter().enumerate().filter(|(_, span)| span.is_op()) {
            let own_ns = self.own_ns[i];
            let told = span.parts.sum_ns();
            self.parts[i] = if told > own_ns {
                span.parts.scaled(own_ns, told)
            } else if told > 0 {
                span.parts
            } else {
                cost::whole_part(span, own_ns, self.holds_ops[i])
            };
        }
    }

    /// Times by the kernels' in place of the host's.
    fn take_kernels(&mut self, recording: &Recording) {
        let spans = &recording.spans;
        // Phases and steps without the phases in them.
        let is_frame = |i: usize, tree: &Self| tree.is_owner(i, spans) && !spans[i].is_op();
        let mut frame: Vec<Option<usize>> = vec![None; spans.len()];
        for (i, span) in spans.iter().enumerate() {
            let around = self.parent[i].and_then(|parent| frame[parent]);
            frame[i] = around;
            if is_frame(i, self) {
                frame[i] = Some(i);
                self.idle_ns[i] = span.duration_ns();
                if let Some(around) = around {
                    self.idle_ns[around] = self.idle_ns[around].saturating_sub(span.duration_ns());
                }
            }
        }
        self.own_ns.fill(0);
        self.whole_ns.fill(0);
        for kernel in &recording.kernels {
            let Some(at) = kernel.span.filter(|at| *at < spans.len()) else {
                continue;
            };
            let ns = kernel.duration_ns();
            let owner = match self.is_owner(at, spans) {
                true => Some(at),
                false => self.owner[at],
            };
            if let Some(owner) = owner {
                self.own_ns[owner] += ns;
                self.parts[owner] += match spans[owner].name() == "softmax" {
                    true => cost::whole_part(&spans[owner], ns, true), // composed of candle's own
                    false => kernel.parts(),
                };
            }
            if let Some(frame) = frame[at] {
                self.idle_ns[frame] = self.idle_ns[frame].saturating_sub(ns);
            }
            let mut around = Some(at);
            while let Some(i) = around {
                self.whole_ns[i] += ns;
                around = self.parent[i];
            }
        }
    }

    /// Whether time is counted as span `i`'s.
    pub fn is_owner(&self, i: usize, spans: &[Span]) -> bool {
        match spans[i].kind {
            Kind::Op | Kind::OpBackward | Kind::Phase => true,
            Kind::Step => self.step[i] == Some(i),
            Kind::Module | Kind::Range => false,
        }
    }

    /// The op whose work it is that was done in span `i`; `i` itself where it is no op's.
    pub fn op_or_itself(&self, i: usize, spans: &[Span]) -> usize {
        match self.owner[i] {
            _ if spans[i].is_op() => i,
            Some(owner) if spans[owner].is_op() && !self.is_owner(i, spans) => owner,
            _ => i,
        }
    }

    /// Whether reports speak of span `i`; not, if there is no such span.
    pub fn counts(&self, i: usize) -> bool {
        let step = self.step.get(i);
        step.is_some_and(|step| self.steps.is_empty() || step.is_some())
    }

    /// Whether what span `i` is in ran as planned.
    pub fn is_planned(&self, i: usize) -> bool {
        self.planned[self.step[i].unwrap_or(self.planned.len() - 1)]
    }

    /// How many steps there were; `None` if it is not known.
    pub fn num_steps(&self) -> Option<usize> {
        (!self.steps.is_empty()).then_some(self.steps.len())
    }
}
