//! Forward, event by event.

use super::ledger::{Buffer, Formula, Key, What};
use super::{Replay, elements};
use crate::graph::{MemoryStep, Node, TraceEvent, ValueId};
use crate::memory::MemoryKind;
use crate::ops::WEIGHT_CAST;

impl Replay<'_> {
    pub(super) fn forward(&mut self) {
        for (i, event) in self.graph.events.iter().enumerate() {
            match event {
                TraceEvent::Node(node) => {
                    self.forward_of(i, node);
                    self.copied(i);
                }
                TraceEvent::Drop(value) => self.dropped(*value),
                TraceEvent::Enter | TraceEvent::Leave | TraceEvent::AutocastEnd => {}
            }
        }
    }

    pub(super) fn forward_of(&mut self, event: usize, node: &Node) {
        let tracked = self.graph.value(node.output).tracked;
        // What is kept goes with the output's node, or with the op where there is no node.
        let kept_until = match tracked {
            true => self.gone[node.output.0],
            false => event,
        };
        let mut taken = Vec::new();
        for step in &node.forward {
            match step {
                MemoryStep::Output => self.make(event, node.output, self.gone[node.output.0]),
                MemoryStep::Keep(i) => self.make(event, node.kept[*i].value, kept_until),
                MemoryStep::Hold(room) => {
                    let count = self.count(event, kept_until);
                    let key = self.take_room(MemoryKind::Inputs, *room, count);
                    self.held.entry(event).or_default().push(key);
                }
                MemoryStep::Take(room) => {
                    taken.push(self.take_room(MemoryKind::Scratch, *room, 1.0))
                }
                MemoryStep::GiveBack(index) => self.ledger.give_back(taken[*index]),
                MemoryStep::Pass(room) => self.pass(*room),
                MemoryStep::DropRead(i) => self.free(node.reads[*i].value),
                MemoryStep::DropKept(i) => self.free(node.kept[*i].value),
                MemoryStep::Gradient(_) | MemoryStep::PassThrough(_) => {} // backward's
            }
        }
        for key in taken {
            self.ledger.give_back(key);
        }
        if !tracked {
            self.op_dropped(event, node);
        }
    }

    /// The last tensor of a value goes, and the node behind it.
    pub(super) fn dropped(&mut self, value: ValueId) {
        self.free(value);
        if let Some(event) = self.makers[value.0]
            && let Some(node) = self.node(event)
            && node.output == value
        {
            self.op_dropped(event, node);
        }
    }

    /// What an op holds goes with it, but for what others read.
    pub(super) fn op_dropped(&mut self, event: usize, node: &Node) {
        for kept in &node.kept {
            if !self.is_read[kept.value.0] {
                self.free(kept.value);
            }
        }
        for key in self.held.remove(&event).unwrap_or_default() {
            self.ledger.give_back(key);
        }
    }

    /// Takes the buffer of a value that an event makes.
    pub(super) fn make(&mut self, event: usize, value: ValueId, gone: usize) {
        let key = self.buffer_of(event, value, gone);
        self.rooms[value.0] = Some(key);
    }

    fn buffer_of(&mut self, event: usize, id: ValueId, gone: usize) -> Key {
        let (kind, what) = self.named(event, id);
        let value = self.graph.value(id);
        self.ledger.take(Buffer {
            kind,
            what,
            formula: Formula::Of(id),
            elements: elements(&value.shape),
            width: value.dtype.size_in_bytes(),
            count: self.count(event, gone),
        })
    }

    fn named(&self, event: usize, id: ValueId) -> (MemoryKind, What) {
        let Some(node) = self.node(event) else {
            return (MemoryKind::Activations, What::Output(event));
        };
        if node.op == WEIGHT_CAST {
            return (MemoryKind::WeightCasts, What::Weight(node.inputs[0].value));
        }
        let is_result = |id| self.graph.outputs.iter().any(|output| output.value == id);
        let kind = match is_result(node.output) {
            true => MemoryKind::Logits,
            false => MemoryKind::Activations,
        };
        let kept = node.kept.iter().find(|kept| kept.value == id);
        match kept {
            Some(kept) => (kind, What::Named(kept.name)),
            None => (kind, What::Output(event)),
        }
    }
}
