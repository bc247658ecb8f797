//! Backward, as [`backward`](crate::backward()) runs it: node by node, in candle's order, and what a node held is freed
//! when it is done.

use super::gradients::{BETWEEN, Gradient, Gradients};
use super::ledger::Key;
use super::{Repeat, Replay, elements};
use crate::graph::{MemoryStep, Node, ValueId, ValueRef};
use crate::memory::MemoryKind;
use std::collections::HashSet;

impl Replay<'_> {
    /// Backward from `root`, whose gradient is among `gradients`.
    pub(super) fn backward(&mut self, root: ValueId, gradients: &mut Gradients) {
        let order = self.order(root);
        self.hold(&order);
        let mut done: Option<Repeat> = None;
        for event in order {
            if done.as_ref().is_some_and(|r| r.stretch.contains(&event)) {
                continue;
            }
            if let Some(repeat) = self.repeat_of(event) {
                self.backward_of_many(&repeat, gradients);
                done = Some(repeat);
                continue;
            }
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

    /// The values that a node has alive while it is there.
    fn held_by(&self, event: usize) -> Vec<ValueId> {
        let Some(node) = self.node(event) else {
            return Vec::new();
        };
        let reads = node.reads.iter().enumerate();
        let reads = reads.filter(|(i, _)| !node.forward.contains(&MemoryStep::DropRead(*i)));
        let operands = self.depends_on(event).iter();
        let operands = operands.chain(reads.map(|(_, read)| read));
        let made = node.kept.iter().map(|kept| kept.value);
        let values = operands.map(|operand| operand.value).chain(made);
        values.chain([node.output]).collect()
    }

    /// These nodes are there.
    fn hold(&mut self, order: &[usize]) {
        for event in order {
            self.waiting.insert(*event);
            for value in self.held_by(*event) {
                self.holders[value.0] += 1;
            }
        }
    }

    /// Backward has come through a node: it goes, and what it alone held.
    pub(super) fn passed(&mut self, event: usize) {
        if !self.waiting.remove(&event) {
            return;
        }
        for value in self.held_by(event) {
            self.holders[value.0] -= 1;
            let is_returned = self.graph.outputs.iter().skip(1).any(|x| x.value == value);
            if self.holders[value.0] == 0 && !is_returned {
                self.free(value);
            }
        }
        for key in self.held.remove(&event).unwrap_or_default() {
            self.ledger.give_back(key);
        }
    }

    fn backward_of(&mut self, event: usize, node: &Node, gradients: &mut Gradients) {
        let Some(incoming) = gradients.take(node.output) else {
            return self.passed(event);
        };
        let passes_on = node
            .backward
            .iter()
            .filter(|step| matches!(step, MemoryStep::PassThrough(_)));
        let is_passed_on_alone = passes_on.count() == 1;
        let mut taken = Vec::new();
        let mut made: Vec<(&ValueRef, Gradient)> = Vec::new();
        for step in &node.backward {
            match step {
                MemoryStep::Gradient(of) => {
                    let input = &node.inputs[*of];
                    let key = self.take(MemoryKind::Scratch, BETWEEN, input, 1.0);
                    made.push((input, Gradient { key, is_own: true }));
                }
                MemoryStep::PassThrough(of) => {
                    let input = &node.inputs[*of];
                    let gradient = match self.summed(node, input) {
                        Some(key) => Gradient { key, is_own: true },
                        None => Gradient {
                            is_own: incoming.is_own && is_passed_on_alone,
                            ..self.share(incoming.key)
                        },
                    };
                    made.push((input, gradient));
                }
                MemoryStep::Take(room) => {
                    taken.push(self.take_room(MemoryKind::Scratch, *room, 1.0))
                }
                MemoryStep::GiveBack(index) => self.ledger.give_back(taken[*index]),
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
        self.passed(event);
        self.release(incoming.key);
        for (input, gradient) in made {
            match input.tracked {
                true => self.add_to(event, input, gradient, gradients),
                false => self.release(gradient.key),
            }
        }
    }

    /// The gradient of an input that was broadcast, as candle sums the output's.
    fn summed(&mut self, node: &Node, input: &ValueRef) -> Option<Key> {
        let output = elements(&self.graph.value(node.output).shape);
        let is_broadcast = elements(self.graph.shape_of(input)) != output;
        is_broadcast.then(|| self.take(MemoryKind::Scratch, BETWEEN, input, 1.0))
    }

    /// The stretch around an event that stands for several.
    fn repeat_of(&self, event: usize) -> Option<Repeat> {
        let mut repeats = self.repeats.iter();
        repeats.find(|r| r.stretch.contains(&event)).cloned()
    }

    /// Backward of stretches that are alike, from one end to the other: each frees what it held, and makes its weights'
    /// gradients, so that between the ends are the moments of both, and none that is worse.
    fn backward_of_many(&mut self, repeat: &Repeat, gradients: &mut Gradients) {
        let events: Vec<usize> = repeat
            .stretch
            .clone()
            .filter(|i| self.node(*i).is_some())
            .collect();
        let is_inside = |maker: Option<usize>| maker.is_some_and(|i| repeat.stretch.contains(&i));
        for event in &events {
            self.passed(*event);
        }
        let mut incoming = None;
        for event in &events {
            let Some(node) = self.node(*event) else {
                continue;
            };
            self.free(node.output);
            incoming = gradients.take(node.output).or(incoming);
        }
        for event in events {
            let Some(node) = self.node(event) else {
                continue;
            };
            for input in node.inputs.iter().filter(|input| input.tracked) {
                let (value, maker) = (input.value, self.makers[input.value.0]);
                if gradients.has(value) || !self.graph.value(node.output).tracked {
                    continue;
                }
                if self.is_weight(value) {
                    let buffer = self.weight_gradient(event, value);
                    let key = self.ledger.take(buffer);
                    gradients.insert(value, Gradient { key, is_own: true });
                } else if !is_inside(maker)
                    && let Some(gradient) = incoming.take()
                {
                    gradients.insert(value, gradient);
                }
            }
        }
    }
}
