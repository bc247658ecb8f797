//! Backward, as candle runs it.
//!
//! The graph stays whole until the end, but for segments with one of their own. Nodes are taken in candle's order; each
//! has its output's gradient, makes its inputs' gradients, and these are added, one after another, to what is there
//! already: to zeros at first.

use super::ledger::Key;
use super::{Replay, elements};
use crate::graph::{MemoryStep, Node, ValueId, ValueRef};
use crate::memory::MemoryKind;
use std::collections::{HashMap, HashSet};

/// Gradients that are there, by their tensor.
pub(super) type Gradients = HashMap<ValueId, Key>;

impl Replay<'_> {
    /// Backward from `root`, whose gradient is among `gradients`.
    pub(super) fn backward(&mut self, root: ValueId, gradients: &mut Gradients) {
        for event in self.order(root) {
            match self.segment_ended_by(event) {
                Some(segment) => self.backward_of_segment(segment, gradients),
                None => {
                    if let Some(node) = self.node(event) {
                        self.backward_of(event, node, gradients);
                    }
                }
            }
        }
    }

    /// The nodes behind `root`, each before all that it depends on, in the order in which candle visits them.
    pub(super) fn order(&self, root: ValueId) -> Vec<usize> {
        let mut order = Vec::new();
        let mut seen = HashSet::new();
        let mut path: Vec<(usize, &[ValueRef], usize)> = Vec::new();
        let mut next = Some(root);
        loop {
            let found = next.take().and_then(|value| self.maker_behind(value));
            if let Some(event) = found
                && seen.insert(event)
            {
                path.push((event, self.depends_on(event), 0));
            }
            let Some((event, inputs, place)) = path.last_mut() else {
                break;
            };
            match inputs.get(*place) {
                Some(input) => {
                    *place += 1;
                    next = input.tracked.then_some(input.value);
                }
                None => {
                    order.push(*event);
                    path.pop();
                }
            }
        }
        order.reverse();
        order
    }

    /// The event behind a value that has one in candle's graph: not behind a variable.
    fn maker_behind(&self, value: ValueId) -> Option<usize> {
        let event = self.makers[value.0]?;
        let is_node = self.graph.value(value).tracked && !self.is_leaf(event);
        is_node.then_some(event)
    }

    /// What a node's gradients go to.
    fn depends_on(&self, event: usize) -> &[ValueRef] {
        match (self.segment_ended_by(event), self.node(event)) {
            (Some(segment), _) => &self.segments[segment].inputs,
            (None, Some(node)) => &node.inputs,
            (None, None) => &[],
        }
    }

    fn backward_of(&mut self, event: usize, node: &Node, gradients: &mut Gradients) {
        let incoming = gradients.remove(&node.output);
        let mut taken = Vec::new();
        let mut made: Vec<(&ValueRef, Option<Key>)> = Vec::new();
        for step in &node.backward {
            match step {
                MemoryStep::Gradient {
                    of,
                    if_tracked,
                    taking,
                } => {
                    let input = &node.inputs[*of];
                    if *if_tracked && !input.tracked {
                        continue;
                    }
                    let what = "gradients as an op makes them";
                    let key = self.take(MemoryKind::Scratch, what, input, 1.0);
                    if let Some(room) = taking {
                        self.pass(*room);
                    }
                    made.push((input, Some(key)));
                }
                MemoryStep::PassThrough(of) => {
                    let input = &node.inputs[*of];
                    let made_of_it = self.summed(node, input);
                    made.push((input, made_of_it));
                }
                MemoryStep::Take(room) => {
                    taken.push(self.take_room(MemoryKind::Scratch, *room, 1.0))
                }
                MemoryStep::GiveBack => {
                    if let Some(key) = taken.pop() {
                        self.ledger.give_back(key);
                    }
                }
                MemoryStep::Pass(room) => self.pass(*room),
                MemoryStep::DropKept(i) => self.free(node.kept[*i].value),
                MemoryStep::Output
                | MemoryStep::Keep(_)
                | MemoryStep::Hold(_)
                | MemoryStep::DropRead(_) => {} // forward's
            }
        }
        for key in taken {
            self.ledger.give_back(key);
        }
        for (input, key) in made {
            self.add_to(event, input, gradients);
            if let Some(key) = key {
                self.ledger.give_back(key);
            }
        }
        if let Some(key) = incoming {
            self.ledger.give_back(key);
        }
    }

    /// The gradient of an input that was broadcast, as candle makes it of the output's: by a node of its own.
    fn summed(&mut self, node: &Node, input: &ValueRef) -> Option<Key> {
        let whole = ValueRef {
            value: node.output,
            view: None,
            tracked: true,
        };
        if elements(self.graph.shape_of(input)) == elements(self.graph.shape_of(&whole)) {
            return None;
        }
        let what = "zeros that a gradient is added to";
        let zeros = self.take(MemoryKind::Scratch, what, &whole, 1.0);
        let sum = self.take(MemoryKind::Scratch, "gradients between ops", &whole, 1.0);
        self.ledger.give_back(zeros);
        let what = "gradients as an op makes them";
        let key = self.take(MemoryKind::Scratch, what, input, 1.0);
        self.ledger.give_back(sum);
        Some(key)
    }

    /// The sum of a new gradient and what was there takes the place of that. A view has a node, and a gradient, of its
    /// own.
    pub(super) fn add_to(&mut self, event: usize, input: &ValueRef, gradients: &mut Gradients) {
        let what = "zeros that a gradient is added to";
        let of_view = input.view.is_some().then(|| {
            let zeros = self.take(MemoryKind::Scratch, what, input, 1.0);
            let sum = self.take(MemoryKind::Scratch, "gradients between ops", input, 1.0);
            self.ledger.give_back(zeros);
            sum
        });
        let whole = ValueRef {
            view: None,
            ..*input
        };
        let before = gradients.remove(&input.value);
        let before = before.unwrap_or_else(|| self.take(MemoryKind::Scratch, what, &whole, 1.0));
        let sum = match self.is_weight(input.value) {
            true => self.weight_gradient(event, input.value),
            false => self.take(MemoryKind::Scratch, "gradients between ops", &whole, 1.0),
        };
        self.ledger.give_back(before);
        if let Some(key) = of_view {
            self.ledger.give_back(key);
        }
        gradients.insert(input.value, sum);
    }
}
