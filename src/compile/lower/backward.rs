//! The backward of a node: buffers of its output gradients, deferred calls, and gradients passed to its inputs.

use super::super::program::{Node, Program};
use super::Lower;
use super::gradients::Deferred;
use super::node_writer::NodeWriter;
use crate::Result;
use crate::graph::ValueId;
use crate::ops::lowering::{Accumulate, Calls, KernelCall, Slot};
use std::collections::BTreeSet;

/// Returns, by node, whether its backward recomputes its output in the buffer of the output's gradient.
pub(super) fn nodes_recomputing_output(program: &Program) -> Vec<bool> {
    let recomputes = |node: &Node| {
        let signature = program.signature(node, [true; 2]);
        let calls = node.kind.backward(&signature);
        calls.is_some_and(|calls| calls.calls.iter().any(recomputes))
    };
    program.nodes.iter().map(recomputes).collect()
}

/// Returns whether a call overwrites the output's gradient with the output.
fn recomputes(call: &KernelCall) -> bool {
    call.writes.iter().any(|slot| *slot == Slot::OutputGradient)
}

impl Lower<'_> {
    /// Writes the calls of a node's backward and passes the gradients on to its inputs.
    pub(super) fn backward_of(&mut self, i: usize) -> Result<()> {
        let program = self.program.clone();
        let node = &program.nodes[i];
        let has_grad = [Some(node.output), node.second];
        let has_grad = has_grad.map(|value| value.is_some_and(|value| self.gradients.has(value)));
        let signature = program.signature(node, has_grad);
        let Some(mut calls) = node.kind.backward(&signature) else {
            return Err(self.refused(node));
        };
        let mut written = std::mem::take(&mut calls.calls);
        // Calls that only compute gradients nobody needs are left out, such as the gradient of frozen embeddings.
        written.retain(|call| {
            let is_read = |slot: &Slot| match calls.base(*slot) {
                Slot::Gradient(input) => node.needs_grad[input],
                _ => true,
            };
            call.writes.iter().any(is_read)
        });
        let mut writer = NodeWriter::new(&program, i, calls);
        self.take_gradients(&mut writer, &written, has_grad);
        let (x, late) = self.deferrable(&writer, &written).unzip();
        let late = late.unwrap_or_default();
        let (mut later, mut now) = (Vec::new(), Vec::new());
        for call in written {
            let gradients = writer.gradients_of(&call);
            match gradients.iter().any(|(_, input)| late.contains(input)) {
                true => later.push(call),
                false => now.push(call),
            }
        }
        if let Some(x) = x {
            self.defer(&mut writer, x, later, &late)?;
        }
        for mut call in now {
            writer.place_gradients(self, &mut call);
            let entries = call.writes.entries().iter();
            let mut second = entries.filter(|(_, slot)| *slot == Slot::SecondGradient);
            if has_grad[1]
                && let Some((name, _)) = second.next()
            {
                call.kernel = call.kernel.accumulating(name, Accumulate::Always);
            }
            let recomputes = recomputes(&call);
            writer.call(self, call)?;
            if recomputes && let Some(place) = writer.find(self, Slot::OutputGradient)? {
                let path = self.plan.path.clone();
                self.recomputed(node.output, place)?;
                self.plan.path = path;
            }
        }
        // The gradient of the second output stays registered until it is passed on, so that no call overwrites it.
        let second = node.second.zip(writer.places.get(&Slot::SecondGradient));
        if let Some((second, place)) = second {
            self.gradients.set(second, place.clone());
        }
        let inputs = (0..node.inputs.len()).filter(|input| !late.contains(input));
        self.propagate(&mut writer, inputs);
        self.gradients.take(node.output);
        if let Some(second) = node.second {
            self.gradients.take(second);
        }
        Ok(())
    }

    /// Finds the buffers of the output gradients. A gradient that the node's calls overwrite is copied if anything else
    /// reads it.
    fn take_gradients(
        &mut self,
        writer: &mut NodeWriter,
        calls: &[KernelCall],
        has_grad: [bool; 2],
    ) {
        let outputs = [
            (Slot::OutputGradient, Some(writer.node().output)),
            (Slot::SecondGradient, writer.node().second),
        ];
        for ((slot, value), has_grad) in outputs.into_iter().zip(has_grad) {
            let Some(value) = value.filter(|_| has_grad) else {
                continue;
            };
            let mut written = calls.iter().flat_map(|call| call.writes.iter());
            let place = match written.any(|other| *other == slot) {
                true => self.take_own(value),
                false => self.gradients.get(value),
            };
            if let Some(place) = place {
                writer.places.insert(slot, place);
            }
        }
    }

    /// Returns the inputs whose gradients can be computed later, and the value they depend on. These inputs are
    /// parameters, and the value is one that backward recomputes later. Deferring the calls means that forward's copy
    /// of the value does not have to stay alive until here.
    fn deferrable(
        &self,
        writer: &NodeWriter,
        calls: &[KernelCall],
    ) -> Option<(ValueId, BTreeSet<usize>)> {
        let node = writer.node();
        let (mut values, mut inputs) = (BTreeSet::new(), BTreeSet::new());
        for call in calls {
            let gradients = writer.gradients_of(call);
            let alone = gradients.len() == call.writes.entries().len();
            let mut of_call = gradients.iter().map(|(_, input)| &node.inputs[*input]);
            if !alone || !of_call.all(|input| self.is_trained(input)) {
                continue;
            }
            let late = call
                .reads
                .iter()
                .filter_map(|slot| self.recomputed_later(node, slot));
            let late: Vec<ValueId> = late.collect();
            if !late.is_empty() {
                inputs.extend(gradients.into_iter().map(|(_, input)| input));
                values.extend(late);
            }
        }
        match values.len() {
            1 => values.pop_first().map(|value| (value, inputs)),
            _ => None,
        }
    }

    /// Returns the value of an operand, if backward recomputes it later.
    fn recomputed_later(&self, node: &Node, slot: &Slot) -> Option<ValueId> {
        let Slot::Input(input) = slot else {
            return None;
        };
        let value = node.inputs[*input].value;
        self.is_recomputed(value).then_some(value)
    }

    /// Defers the calls that compute these inputs' gradients until `x` is recomputed.
    fn defer(
        &mut self,
        writer: &mut NodeWriter,
        x: ValueId,
        calls: Vec<KernelCall>,
        inputs: &BTreeSet<usize>,
    ) -> Result<()> {
        let program = self.program.clone();
        let mut later = NodeWriter::new(&program, writer.number(), Calls::default());
        later.calls.parts.clone_from(&writer.calls.parts);
        let mut buffers = Vec::new();
        for slot in calls.iter().flat_map(|call| call.reads.iter()) {
            if self.recomputed_later(writer.node(), slot).is_none()
                && let Some(place) = writer.find(self, *slot)?
            {
                buffers.push(place.buffer);
                later.places.insert(*slot, place);
            }
        }
        let inputs = inputs.clone();
        self.add_deferred(Deferred {
            x,
            buffers,
            cost_index: self.plan.cost_index,
            write: Box::new(move |lower: &mut Lower<'_>| {
                lower.plan.path.clone_from(&later.node().path);
                for mut call in calls {
                    later.place_gradients(lower, &mut call);
                    later.call(lower, call)?;
                }
                lower.propagate(&mut later, inputs.into_iter());
                Ok(())
            }),
        });
        Ok(())
    }

    /// Passes the gradients of some inputs on: to parameters, or to the values that the inputs are.
    pub(super) fn propagate(
        &mut self,
        writer: &mut NodeWriter,
        inputs: impl Iterator<Item = usize>,
    ) {
        let program = self.program.clone();
        let node = &program.nodes[writer.number()];
        for input in inputs.filter(|input| node.needs_grad[*input]) {
            let operand = &node.inputs[input];
            if writer.sums.contains_key(&input) && self.is_trained(operand) {
                self.gradient_done(&program.weights_of(operand.value));
            } else if let Some(gradient) = writer.places.remove(&Slot::Gradient(input)) {
                self.contribute(operand, gradient);
            }
            let mut same = writer.calls.aliases.iter();
            let same = same.find(|(same, _)| *same == input);
            if let Some(place) = same.and_then(|(_, slot)| writer.places.get(slot)) {
                self.contribute(operand, place.clone());
            }
        }
    }
}
