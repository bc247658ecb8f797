//! Segments, which are recomputed in backward: one node outside, and a graph inside that lasts for a moment.

use super::gradients::{Gradient, Gradients};
use super::ledger::{Buffer, Formula, Key, What};
use super::{Replay, elements, node};
use crate::graph::{CHECKPOINT, Graph, MemoryStep, TraceEvent, ValueId, ValueRef};
use crate::memory::MemoryKind;
use std::collections::HashSet;
use std::ops::Range;

/// A segment that has a node outside.
pub(super) struct Segment {
    /// The events between its beginning and its end.
    pub inside: Range<usize>,
    /// The node that stands for it outside.
    end: usize,
    /// What gradients go to outside, beside weights,
    pub inputs: Vec<ValueRef>,
    /// and the copies that it works on, as events.
    copies: Vec<usize>,
    /// The last that is made inside.
    pub output: ValueId,
    /// What is made inside and is there until the graph inside goes.
    retained: HashSet<ValueId>,
}

impl Segment {
    /// What is made inside and goes with the graph inside.
    pub fn retained(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.retained.iter().copied()
    }
}

/// The segments of a graph, in the order of their ends.
pub(super) fn found(graph: &Graph, makers: &[Option<usize>]) -> Vec<Segment> {
    let mut open = Vec::new();
    let mut found: Vec<Segment> = Vec::new();
    for (i, event) in graph.events.iter().enumerate() {
        match event {
            TraceEvent::Enter => open.push(i),
            TraceEvent::Leave => {
                let Some(begin) = open.pop() else {
                    continue;
                };
                // Without a gradient there is no node, and no graph.
                let after = graph.events.iter().enumerate().skip(i + 1);
                let mut after = after.filter(|(_, event)| !matches!(event, TraceEvent::Drop(_)));
                let Some((end, TraceEvent::Node(node))) = after.next() else {
                    continue;
                };
                if node.op != CHECKPOINT {
                    continue;
                }
                let inside = begin + 1..i;
                let copies: Vec<usize> = leading_copies(graph, inside.clone()).collect();
                let inputs = copies.iter().filter_map(|copy| super::node(graph, *copy));
                let mut segment = Segment {
                    end,
                    inputs: inputs.map(|copy| copy.inputs[0].clone()).collect(),
                    copies,
                    output: node.inputs[0].value,
                    retained: HashSet::new(),
                    inside,
                };
                segment.retained = retained(graph, makers, &found, &segment);
                found.push(segment);
            }
            _ => {}
        }
    }
    found
}

/// The copies of inputs that a segment begins with.
fn leading_copies(graph: &Graph, inside: Range<usize>) -> impl Iterator<Item = usize> + '_ {
    let events = inside.filter(|i| !matches!(graph.events[*i], TraceEvent::Drop(_)));
    events.take_while(|i| node(graph, *i).is_some_and(|node| node.op == "copy"))
}

/// What the graph behind a segment's output holds, of that which is made inside.
fn retained(
    graph: &Graph,
    makers: &[Option<usize>],
    inner: &[Segment],
    segment: &Segment,
) -> HashSet<ValueId> {
    let mut retained = HashSet::new();
    let mut next = vec![segment.output];
    while let Some(value) = next.pop() {
        let Some(event) = makers[value.0].filter(|event| segment.inside.contains(event)) else {
            continue;
        };
        let Some(node) = node(graph, event) else {
            continue;
        };
        if !retained.insert(value) || !graph.value(node.output).tracked {
            continue;
        }
        retained.extend(node.kept.iter().map(|kept| kept.value));
        if let Some(inner) = inner.iter().find(|inner| inner.end == event) {
            next.extend(inner.inputs.iter().map(|input| input.value));
            continue;
        }
        if segment.copies.contains(&event) {
            continue;
        }
        next.extend(node.inputs.iter().map(|input| input.value));
        let is_kept = |i: usize| !node.forward.contains(&MemoryStep::DropRead(i));
        let reads = node.reads.iter().enumerate();
        let reads = reads.filter(|(i, _)| is_kept(*i));
        next.extend(reads.map(|(_, read)| read.value));
    }
    retained
}

impl Replay<'_> {
    /// The segment that the node stands for which is this event.
    pub(super) fn segment_ended_by(&self, event: usize) -> Option<usize> {
        let found = self.segments.binary_search_by_key(&event, |s| s.end);
        found.ok()
    }

    /// Whether an event makes a variable, a segment's copy of an input.
    pub(super) fn is_leaf(&self, event: usize) -> bool {
        self.segments.iter().any(|s| s.copies.contains(&event))
    }

    /// A segment's node has copied what was made inside; if the graph inside has gone, so does that.
    pub(super) fn copied(&mut self, event: usize) {
        let segment = self.segment_ended_by(event).map(|i| &self.segments[i]);
        if let Some(segment) = segment {
            self.dropped(segment.output);
        }
    }

    /// The graph inside is made again, and backward comes through it. Gradients found inside are then added outside.
    pub(super) fn backward_of_segment(&mut self, index: usize, gradients: &mut Gradients) {
        let (end, output) = (self.segments[index].end, self.segments[index].output);
        let Some(node) = self.node(end) else {
            return;
        };
        let Some(incoming) = gradients.take(node.output) else {
            return;
        };
        let remade = self.run_again(index);
        let mut found = Gradients::default();
        found.insert(output, self.share(incoming.key));
        self.backward(output, &mut found);
        self.free_inside(index);
        for key in remade {
            self.ledger.give_back(key);
        }
        self.passed(end);
        self.release(incoming.key);
        let segment = &self.segments[index];
        let leaves = segment.copies.iter().filter_map(|copy| self.node(*copy));
        let inputs = leaves.zip(segment.inputs.clone());
        let of_inputs: Vec<(ValueRef, Option<Gradient>)> = inputs
            .map(|(leaf, input)| (input, found.take(leaf.output)))
            .collect();
        for (value, gradient) in found.into_values() {
            let whole = ValueRef {
                value,
                view: None,
                tracked: true,
            };
            self.add_to(end, &whole, gradient, gradients);
        }
        for (input, gradient) in of_inputs {
            if let Some(gradient) = gradient {
                self.add_to(end, &input, gradient, gradients);
            }
        }
    }

    /// A weight's gradient, as often as its node stands for one.
    pub(super) fn weight_gradient(&self, event: usize, weight: ValueId) -> Buffer {
        let value = self.graph.value(weight);
        Buffer {
            kind: MemoryKind::Gradients,
            what: What::Weight(weight),
            formula: Formula::Of(weight),
            elements: elements(&value.shape),
            width: value.dtype.size_in_bytes(),
            count: self.count(event, usize::MAX),
        }
    }

    /// Makes the graph inside again. Returns what it has recomputed of what is outside: weights' copies, whose region
    /// is over.
    fn run_again(&mut self, index: usize) -> Vec<Key> {
        let mut remade = Vec::new();
        for event in self.segments[index].inside.clone() {
            match &self.graph.events[event] {
                TraceEvent::Node(node) => {
                    for read in node.inputs.iter().chain(&node.reads) {
                        let gone = self.rooms[read.value.0].is_none();
                        if let Some(maker) = self.makers[read.value.0].filter(|_| gone) {
                            self.make(maker, read.value, usize::MAX);
                            remade.extend(self.rooms[read.value.0]);
                        }
                    }
                    self.forward_of(event, node);
                    self.copied(event);
                }
                TraceEvent::Drop(value) if !self.segments[index].retained.contains(value) => {
                    self.dropped(*value);
                }
                _ => {}
            }
        }
        remade
    }

    /// The graph inside goes.
    fn free_inside(&mut self, index: usize) {
        for event in self.segments[index].inside.clone() {
            if let Some(node) = self.node(event) {
                self.dropped(node.output);
                for kept in &node.kept {
                    self.free(kept.value);
                }
            }
        }
    }
}
