//! The forward of a node, and what backward recomputes of it.

use super::super::op::{BufferRange, Phase};
use super::super::program::{Kind, Node};
use super::Lower;
use super::node_writer::NodeWriter;
use crate::Result;
use crate::graph::ValueId;
use crate::ops::lowering::{Calls, Slot, converted};

/// In forward no output has a gradient.
const NONE: [bool; 2] = [false; 2];

impl Lower<'_> {
    pub(super) fn forward_of(&mut self, i: usize) -> Result<()> {
        let program = self.program.clone();
        let node = &program.nodes[i];
        let signature = program.signature(node, NONE);
        // A sum that was computed in the segment before this one already exists when this segment is recomputed.
        let is_made = |second: ValueId| self.places[second.0].is_some();
        let calls = match (&node.kind, node.second) {
            (Kind::Norm(norm), Some(second)) if is_made(second) => {
                norm.of_sum().recompute_output(&signature)
            }
            _ => match node.kind.forward(&signature) {
                Some(calls) => calls,
                None => return Err(self.refused(node)),
            },
        };
        if let Some((read, check)) = calls.check {
            self.checks.push((node.extra_inputs[read].value, check));
        }
        if let Some((input, _)) = calls.aliases.first() {
            self.pass_on(node, *input);
            return Ok(());
        }
        if matches!(node.kind, Kind::Head(_)) {
            return self.loss_of(i, calls);
        }
        for value in node.computed_values() {
            let is_there = Some(value) == node.second && self.places[value.0].is_some();
            if !is_there {
                self.make(value, name_of(node, value), &program.value(value).shape);
            }
        }
        NodeWriter::new(&program, i, calls).all_calls(self)?;
        if node.recomputes_saved {
            for saved in &node.saved {
                self.places[saved.value.0] = None;
            }
        }
        Ok(())
    }

    /// Makes the output an alias of an input, or copies the input if the plan returns the output.
    fn pass_on(&mut self, node: &Node, input: usize) {
        let x = self.read(&node.inputs[input]);
        match self.places[node.output.0].is_none() {
            true => self.places[node.output.0] = Some(x),
            // The plan returns it.
            false => {
                let y = self.value(node.output);
                self.plan.call(converted(), [("x", x)], [("y", y)]);
            }
        }
    }

    /// Writes the head and loss of a step, with the gradients of their inputs.
    fn loss_of(&mut self, i: usize, mut calls: Calls) -> Result<()> {
        let mut written = std::mem::take(&mut calls.calls);
        let mut writer = NodeWriter::new(&self.program, i, calls);
        // Gradients live longer than logits, so their buffers are created first: the arena places buffers in this
        // order.
        for call in &mut written {
            writer.place_gradients(self, call);
            for (_, input) in writer.gradients_of(call) {
                writer.find(self, Slot::Gradient(input))?;
            }
        }
        for call in written {
            self.plan.phase = match writer.gradients_of(&call).is_empty() {
                true => Phase::Loss,
                false => Phase::LossGradient,
            };
            writer.call(self, call)?;
        }
        let inputs = 0..self.program.nodes[i].inputs.len();
        self.propagate(&mut writer, inputs);
        Ok(())
    }

    /// Recomputes a value into a new buffer from what is saved for backward. `None` if its node cannot do that cheaply.
    fn recompute_output(&mut self, value: ValueId) -> Result<Option<BufferRange>> {
        let program = self.program.clone();
        let Some(i) = program.maker(value) else {
            return Ok(None);
        };
        let node = &program.nodes[i];
        let Some(calls) = node.kind.recompute_output(&program.signature(node, NONE)) else {
            return Ok(None);
        };
        self.plan.path.clone_from(&node.path);
        let mut writer = NodeWriter::new(&program, i, calls);
        let saved = node.saved.iter().enumerate();
        let saved = saved.map(|(i, saved)| (Slot::Saved(i), saved.value));
        for (slot, value) in [(Slot::Output, node.output)].into_iter().chain(saved) {
            let (shape, dtype) = (&program.value(value).shape, program.value(value).dtype);
            let place = self.temporary(name_of(node, value), shape, dtype);
            writer.places.insert(slot, place);
        }
        writer.all_calls(self)?;
        writer.find(self, Slot::Output)
    }

    /// Returns whether the tensors that a node saves for backward have to be recomputed first.
    pub(super) fn lacks_saved(&self, i: usize) -> bool {
        let node = &self.program.nodes[i];
        let mut saved = node.saved.iter();
        node.recomputes_saved
            && self.program.needs_grad(node.output)
            && saved.any(|saved| self.places[saved.value.0].is_none())
    }

    /// Recomputes the tensors that a node saves for backward, before the gradient of its output is allocated.
    pub(super) fn recompute_saved(&mut self, i: usize) -> Result<()> {
        let program = self.program.clone();
        let node = &program.nodes[i];
        let Some(mut calls) = node.kind.forward(&program.signature(node, NONE)) else {
            return Err(self.refused(node));
        };
        let is_output = |slot: &Slot| *slot == Slot::Output;
        calls
            .calls
            .retain(|call| !call.writes.iter().any(is_output));
        let mut writer = NodeWriter::new(&program, i, calls);
        for (input, x) in node.inputs.iter().enumerate() {
            if x.view.is_none()
                && self.is_recomputed(x.value)
                && let Some(place) = self.recompute_output(x.value)?
            {
                writer.places.insert(Slot::Input(input), place);
            }
        }
        self.plan.path.clone_from(&node.path);
        for saved in &node.saved {
            self.make(saved.value, saved.name, &program.value(saved.value).shape);
        }
        writer.all_calls(self)
    }
}

fn name_of(node: &Node, value: ValueId) -> &'static str {
    let saved = node.saved.iter().find(|saved| saved.value == value);
    match saved {
        Some(saved) => saved.name,
        None if Some(value) == node.second => "sum",
        None => node.op,
    }
}
