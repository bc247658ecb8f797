//! Forward, event by event, and the buffers that a pass makes and needs.

use super::{Buffer, BufferName, Formula, elements};
use crate::graph::{Graph, Node, Target, TraceEvent, ValueId, ValueRef};
use crate::memory::MemoryKind::{self, Activations, Inputs, Logits, Scratch, WeightCasts};
use crate::op_table::lowering_of;
use crate::ops::WEIGHT_CAST;
use crate::ops::lowering::{Calls, Signature, Slot, Workspace};
use candle_core::DType;
use std::collections::HashMap;
use std::ops::Range;

pub(super) struct Pass<'a> {
    pub graph: &'a Graph,
    pub makers: Vec<Option<usize>>,
    /// Whether an op reads a value, or it is an output. (An op's read of what it saved itself does not count.)
    pub is_read: Vec<bool>,
    pub segments: Vec<Segment>,
    pub buffers: Vec<Buffer>,
    pub now: usize,
    /// The buffer of each value, from when it is made until it is dropped.
    pub buffer_of: Vec<Option<usize>>,
    /// The copies of the ids that nodes check, by the node's event.
    pub ids: HashMap<usize, usize>,
}

impl<'a> Pass<'a> {
    pub fn new(graph: &'a Graph, residents: impl IntoIterator<Item = Buffer>) -> Self {
        let mut is_read = vec![false; graph.values.len()];
        let read = graph
            .nodes()
            .flat_map(|node| node.inputs.iter().chain(&node.extra_inputs));
        for operand in read.chain(&graph.outputs) {
            is_read[operand.value.0] = true;
        }
        Self {
            graph,
            makers: graph.makers(),
            is_read,
            segments: segments(graph),
            buffers: residents.into_iter().collect(),
            now: 0,
            buffer_of: vec![None; graph.values.len()],
            ids: HashMap::new(),
        }
    }

    pub fn node(&self, event: usize) -> Option<&'a Node> {
        node(self.graph, event)
    }

    /// Returns the segment whose node is this event.
    pub fn segment_ended_by(&self, event: usize) -> Option<usize> {
        self.segments.binary_search_by_key(&event, |s| s.end).ok()
    }

    pub fn add(&mut self, buffer: Buffer) -> usize {
        self.buffers.push(Buffer {
            from: self.now,
            until: self.now,
            ..buffer
        });
        self.buffers.len() - 1
    }

    pub fn need(&mut self, buffer: usize) {
        let until = &mut self.buffers[buffer].until;
        *until = self.now.max(*until);
    }

    pub fn need_value(&mut self, value: ValueId) {
        if let Some(buffer) = self.buffer_of[value.0] {
            self.need(buffer);
        }
    }

    pub fn make(&mut self, event: usize, id: ValueId) -> usize {
        let (kind, what) = self.named(event, id);
        let value = self.graph.value(id);
        let (elements, width) = (elements(&value.shape), value.dtype.size_in_bytes());
        let buffer = self.add(Buffer::new(kind, what, id, elements, width));
        self.buffer_of[id.0] = Some(buffer);
        buffer
    }

    fn named(&self, event: usize, id: ValueId) -> (MemoryKind, BufferName) {
        let Some(node) = self.node(event) else {
            return (Activations, BufferName::Output(event));
        };
        if node.op == WEIGHT_CAST {
            return (WeightCasts, BufferName::Weight(node.inputs[0].value));
        }
        let mut results = self.graph.outputs.iter();
        let kind = match results.any(|output| output.value == node.output) {
            true => Logits,
            false => Activations,
        };
        match node.saved.iter().find(|kept| kept.value == id) {
            Some(kept) => (kind, BufferName::Named(kept.name)),
            None => (kind, BufferName::Output(event)),
        }
    }

    /// Makes a scratch buffer with as many elements as `like`, in its dtype.
    pub fn make_like(&mut self, like: &ValueRef, what: &'static str) -> usize {
        self.make_like_in(like, what, self.graph.value(like.value).dtype)
    }

    pub fn make_like_in(&mut self, like: &ValueRef, what: &'static str, dtype: DType) -> usize {
        let formula = match like.view {
            None => Formula::Of(like.value),
            Some(_) => "of a view".into(),
        };
        let elements = elements(self.graph.shape_of(like));
        let width = dtype.size_in_bytes();
        self.add(Buffer::new(Scratch, what, formula, elements, width))
    }

    pub fn make_workspace(&mut self, kind: MemoryKind, workspace: Workspace) -> usize {
        let (elements, width) = (workspace.elements, workspace.element_bytes);
        self.add(Buffer::new(
            kind,
            workspace.what,
            workspace.formula,
            elements,
            width,
        ))
    }

    /// Runs forward of these events: of the whole graph, or of a segment again. Again, values from outside that had
    /// been freed are made again, and returned.
    pub fn run(&mut self, events: Range<usize>, is_recomputation: bool) -> Vec<ValueId> {
        let mut recomputed = Vec::new();
        let end = events.end;
        for event in events {
            self.now += 1;
            match &self.graph.events[event] {
                TraceEvent::Node(node) => {
                    if is_recomputation {
                        recomputed.extend(self.recompute_missing(node));
                    }
                    self.forward_of(event, node, end);
                }
                TraceEvent::Drop(value) => self.drop_value(*value),
                TraceEvent::Enter | TraceEvent::Leave | TraceEvent::AutocastEnd => {}
            }
        }
        recomputed
    }

    /// Makes what a node reads and has been freed.
    pub fn recompute_missing(&mut self, node: &Node) -> Vec<ValueId> {
        let mut made = Vec::new();
        for operand in node.inputs.iter().chain(&node.extra_inputs) {
            let value = operand.value;
            if let (None, Some(maker)) = (self.buffer_of[value.0], self.makers[value.0]) {
                self.make(maker, value);
                made.push(value);
            }
        }
        made
    }

    /// Frees a value with its last tensor, and the node that made it.
    fn drop_value(&mut self, value: ValueId) {
        self.need_value(value);
        self.buffer_of[value.0] = None;
        if let Some(event) = self.makers[value.0]
            && let Some(node) = self.node(event)
            && node.output == value
        {
            self.drop_node(event, node);
        }
    }

    /// Frees what an op saved, except what others read.
    fn drop_node(&mut self, event: usize, node: &Node) {
        for kept in &node.saved {
            if !self.is_read[kept.value.0] {
                self.need_value(kept.value);
                self.buffer_of[kept.value.0] = None;
            }
        }
        if let Some(ids) = self.ids.remove(&event) {
            self.need(ids);
        }
    }

    fn forward_of(&mut self, event: usize, node: &'a Node, end: usize) {
        let signature = Signature::of(self.graph, node);
        let calls = lowering_of(node).map(|lowering| (lowering.forward)(&signature));
        let mut made: Vec<(Slot, usize)> = Vec::new();
        if let Some(calls) = &calls {
            if let Some(copy) = calls.checked_ids(&signature) {
                let copy = self.make_workspace(Inputs, copy);
                self.ids.insert(event, copy);
            }
            self.call(
                &signature,
                calls,
                &mut made,
                |_| true,
                |pass, slot| match slot {
                    Slot::Output => Some(pass.make(event, node.output)),
                    Slot::Saved(i) => Some(pass.make(event, node.saved[i].value)),
                    Slot::ExtraInput(i) => pass.buffer_of[node.extra_inputs[i].value.0],
                    _ => None,
                },
            );
        }
        let slots = (0..node.saved.len()).map(Slot::Saved).chain([Slot::Output]);
        for slot in slots {
            let value = match slot {
                Slot::Saved(i) => node.saved[i].value,
                _ => node.output,
            };
            match made.iter().find(|(other, _)| *other == slot) {
                Some((_, buffer)) => self.need(*buffer),
                None => {
                    self.make(event, value); // a copy, or output of a composed op
                }
            }
        }
        // An extra input is freed at its last read if nothing else holds it.
        let drops = self.graph.events[event + 1..end].iter();
        let drops = drops.map_while(|event| match event {
            TraceEvent::Drop(value) => Some(*value),
            _ => None,
        });
        let dropped: Vec<ValueId> = drops.collect();
        for operand in &node.extra_inputs {
            match calls.is_some() && dropped.contains(&operand.value) {
                true => self.buffer_of[operand.value.0] = None,
                false => self.need_value(operand.value),
            }
        }
        node.inputs
            .iter()
            .for_each(|operand| self.need_value(operand.value));
        if !self.graph.value(node.output).tracked {
            self.drop_node(event, node);
        }
        // A segment's node has copied the output made inside.
        if let Some(segment) = self.segment_ended_by(event) {
            self.drop_value(self.segments[segment].output);
        }
    }

    /// Runs the kernels of a pass, one tick each. `find` makes or finds buffers that are not scratch; `made` collects
    /// the buffers written.
    pub fn call(
        &mut self,
        signature: &Signature<'_>,
        calls: &Calls,
        made: &mut Vec<(Slot, usize)>,
        wants: impl Fn(usize) -> bool,
        mut find: impl FnMut(&mut Self, Slot) -> Option<usize>,
    ) {
        for (kernel, _) in calls.needed(wants) {
            self.now += 1;
            for slot in kernel.reads.iter().chain(kernel.writes.iter()) {
                let there = made.iter().find(|(other, _)| other == slot);
                let buffer = match (there, *slot) {
                    (Some((_, buffer)), _) => Some(*buffer),
                    (None, Slot::Scratch(i)) => {
                        let scratch = &calls.scratch[i];
                        let elements = elements(&scratch.shape);
                        let width = scratch.dtype.size_in_bytes();
                        Some(self.add(Buffer::new(Scratch, "scratch", "", elements, width)))
                    }
                    (None, slot) => find(self, slot),
                };
                let Some(buffer) = buffer else {
                    continue;
                };
                self.need(buffer);
                if there.is_none() {
                    made.push((*slot, buffer));
                }
            }
            if signature.target == Target::Cpu {
                let workspace = calls.workspace(kernel, signature);
                workspace.map(|workspace| self.make_workspace(Scratch, workspace));
            }
        }
    }
}

/// A function that backward recomputes, where a gradient reaches its output.
pub(super) struct Segment {
    /// Its events, without the drops at its end that free its graph.
    pub inside: Range<usize>,
    /// The event of the node that stands for it in the outer graph.
    pub end: usize,
    /// The copies of its inputs that it works on.
    pub copies: Vec<ValueId>,
    /// The inputs that were copied.
    pub inputs: Vec<ValueRef>,
    /// The last value made inside.
    pub output: ValueId,
}

fn node(graph: &Graph, event: usize) -> Option<&Node> {
    match graph.events.get(event) {
        Some(TraceEvent::Node(node)) => Some(node),
        _ => None,
    }
}

fn segments(graph: &Graph) -> Vec<Segment> {
    let is_drop = |event: &TraceEvent| matches!(event, TraceEvent::Drop(_));
    let mut open = Vec::new();
    let mut found = Vec::new();
    for (i, event) in graph.events.iter().enumerate() {
        match event {
            TraceEvent::Enter => open.push(i + 1),
            TraceEvent::Leave => {
                let Some(begin) = open.pop() else {
                    continue;
                };
                // Without a gradient there is neither a node nor a graph.
                let mut after = graph.events.iter().enumerate().skip(i + 1);
                let Some((end, TraceEvent::Node(last))) = after.find(|(_, event)| !is_drop(event))
                else {
                    continue;
                };
                if !last.ends_segment() {
                    continue;
                }
                let drops = graph.events[begin..i].iter().rev();
                let inside = begin..i - drops.take_while(|event| is_drop(event)).count();
                let copies = inside.clone().filter(|i| !is_drop(&graph.events[*i]));
                let copies = copies.map_while(|i| node(graph, i).filter(|node| node.is_leaf()));
                let copies: Vec<&Node> = copies.collect();
                found.push(Segment {
                    end,
                    inputs: copies.iter().map(|copy| copy.inputs[0].clone()).collect(),
                    copies: copies.iter().map(|copy| copy.output).collect(),
                    output: last.inputs[0].value,
                    inside,
                });
            }
            _ => {}
        }
    }
    found
}
