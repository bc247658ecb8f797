//! Backward as [`backward`](crate::backward()) runs it, node by node in candle's order.

use super::pass::Pass;
use super::{Buffer, BufferName, END, Formula};
use crate::graph::{Node, Source, Target, ValueId, ValueRef, View};
use crate::memory::MemoryKind;
use crate::op_table::{self, lowering_of};
use crate::ops::lowering::{Signature, Slot};
use crate::ops::strided::contiguous_order;
use candle_core::DType;
use std::collections::{BTreeMap, HashSet};

#[derive(Clone, Copy)]
pub(super) struct Gradient {
    buffer: usize,
    /// Whether no other gradient uses the buffer, so that gradients can be added in place.
    is_exclusive: bool,
}

impl Gradient {
    pub fn shared(buffer: usize) -> Self {
        Self {
            buffer,
            is_exclusive: false,
        }
    }

    fn own(buffer: usize) -> Self {
        Self {
            buffer,
            is_exclusive: true,
        }
    }
}

pub(super) type Gradients = BTreeMap<ValueId, Gradient>;

impl<'a> Pass<'a> {
    pub(super) fn backward(&mut self, root: ValueId, gradients: &mut Gradients) {
        for event in self.order(root) {
            self.now += 1;
            match (self.segment_ended_by(event), self.node(event)) {
                (Some(segment), _) => self.backward_of_segment(segment, gradients),
                (None, Some(node)) => self.backward_of(event, node, gradients),
                (None, None) => {}
            }
        }
    }

    /// Returns the nodes that `root` depends on, each before its inputs, in the order in which candle visits them.
    fn order(&self, root: ValueId) -> Vec<usize> {
        let mut order = Vec::new();
        let mut seen = HashSet::new();
        let mut path: Vec<(usize, &[ValueRef], usize)> = Vec::new();
        let mut next = Some(root);
        loop {
            let found = next.take().and_then(|value| self.graph_node_of(value));
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

    /// Returns the event that made a value, if candle's graph has a node for it. Variables have none, and a segment's
    /// copy of an input is a variable.
    fn graph_node_of(&self, value: ValueId) -> Option<usize> {
        let event = self.makers[value.0]?;
        let is_leaf = self.node(event).is_some_and(Node::is_leaf);
        (self.graph.value(value).tracked && !is_leaf).then_some(event)
    }

    fn depends_on(&self, event: usize) -> &[ValueRef] {
        match (self.segment_ended_by(event), self.node(event)) {
            (Some(segment), _) => &self.segments[segment].inputs,
            (None, Some(node)) => &node.inputs,
            (None, None) => &[],
        }
    }

    /// Marks everything that a node holds as needed until now, when backward reaches it.
    fn need_saved(&mut self, event: usize) {
        let Some(node) = self.node(event) else {
            return;
        };
        let operands = self.depends_on(event).iter().chain(&node.extra_inputs);
        let held = operands.map(|operand| operand.value);
        let held = held.chain(node.saved.iter().map(|kept| kept.value));
        let held: Vec<ValueId> = held.chain([node.output]).collect();
        held.into_iter().for_each(|value| self.need_value(value));
        if let Some(ids) = self.ids.remove(&event) {
            self.need(ids);
        }
    }

    fn backward_of(&mut self, event: usize, node: &'a Node, gradients: &mut Gradients) {
        let Some(incoming) = gradients.remove(&node.output) else {
            return self.need_saved(event);
        };
        let again = self.recompute_missing(node);
        let signature = Signature::of(self.graph, node);
        let mut made: Vec<(Slot, usize)> = Vec::new();
        let mut passed_on: Vec<(usize, Gradient)> = Vec::new();
        match lowering_of(node).map(|lowering| (lowering.backward)(&signature)) {
            Some(calls) => {
                let wants = |input: usize| node.inputs[input].tracked;
                self.call(
                    &signature,
                    &calls,
                    &mut made,
                    wants,
                    |pass, slot| match slot {
                        Slot::Gradient(i) => Some(pass.make_like(&node.inputs[i], GRADIENTS)),
                        Slot::ExtraInput(i) => pass.buffer_of[node.extra_inputs[i].value.0],
                        _ => None,
                    },
                );
                let same = Gradient {
                    is_exclusive: incoming.is_exclusive && calls.aliases.len() == 1,
                    ..incoming
                };
                let inputs = calls.aliases.iter().filter(|(input, _)| wants(*input));
                passed_on.extend(inputs.map(|(input, _)| (*input, same)));
            }
            None => {
                self.now += 1;
                let taken = op_table::of(node.op).and_then(|info| info.composed_backward);
                if let Some(taken) = taken {
                    self.make_workspace(MemoryKind::Scratch, taken(&signature));
                }
                for (i, input) in node.inputs.iter().enumerate() {
                    made.push((Slot::Gradient(i), self.make_like(input, GRADIENTS)));
                }
            }
        }
        for value in again {
            self.buffer_of[value.0] = None;
        }
        let of_inputs = made.into_iter().filter_map(|(slot, buffer)| match slot {
            Slot::Gradient(input) => Some((input, Gradient::own(buffer))),
            _ => None,
        });
        let mut of_inputs: Vec<(usize, Gradient)> = of_inputs.collect();
        of_inputs.extend(passed_on);
        of_inputs
            .iter()
            .for_each(|(_, gradient)| self.need(gradient.buffer));
        self.need_saved(event);
        self.need(incoming.buffer);
        for (i, gradient) in of_inputs {
            if node.inputs[i].tracked {
                self.add_gradient(&node.inputs[i], gradient, gradients);
            }
        }
    }

    fn add_gradient(&mut self, input: &ValueRef, gradient: Gradient, gradients: &mut Gradients) {
        self.now += 1;
        let new = match &input.view {
            None => gradient,
            Some(view) => self.gradient_of_base(input, view, gradient),
        };
        let sum = match gradients.remove(&input.value) {
            None => new,
            Some(before) => {
                let sum = match (before.is_exclusive, new.is_exclusive) {
                    (true, _) => before,
                    (false, true) => new,
                    (false, false) => Gradient::own(self.make_like(&base_of(input), GRADIENTS)),
                };
                for part in [before, new] {
                    let is_shared = |other: &Gradient| other.buffer == part.buffer;
                    match part.buffer == sum.buffer || gradients.values().any(is_shared) {
                        true => self.need(part.buffer),
                        false => self.buffers[part.buffer].until = self.now,
                    }
                }
                sum
            }
        };
        if let Source::Weight(_) = self.graph.value(input.value).source {
            let buffer = &mut self.buffers[sum.buffer];
            buffer.kind = MemoryKind::Gradients;
            buffer.name = BufferName::Weight(input.value);
            buffer.formula = Formula::Of(input.value);
            buffer.until = END;
        }
        gradients.insert(input.value, sum);
    }

    /// Returns the gradient of a value from the gradient of a view of it: unchanged, reordered, or padded with zeros.
    fn gradient_of_base(&mut self, input: &ValueRef, view: &View, gradient: Gradient) -> Gradient {
        let value = self.graph.value(input.value);
        let order = contiguous_order(view, &value.shape);
        // Dimensions of size 1 can be anywhere in the order.
        let long = |dim: &&usize| view.shape[**dim] != 1;
        if order
            .as_ref()
            .is_some_and(|order| order.iter().filter(long).is_sorted())
        {
            return gradient;
        }
        self.need(gradient.buffer);
        // With zeros around it, a half-precision gradient is summed in f32 and then rounded.
        if order.is_none() && value.dtype.size_in_bytes() < 4 {
            self.make_like_in(&base_of(input), "sums in f32", DType::F32);
        }
        Gradient::own(self.make_like(&base_of(input), GRADIENTS))
    }

    /// Runs a segment's forward again, then its backward. Gradients of values outside are added to theirs afterwards.
    fn backward_of_segment(&mut self, index: usize, gradients: &mut Gradients) {
        let segment = &self.segments[index];
        let (end, output, inside) = (segment.end, segment.output, segment.inside.clone());
        let inputs = segment.inputs.clone();
        let copies = segment.copies.clone();
        let Some(node) = self.node(end) else {
            return;
        };
        let Some(incoming) = gradients.remove(&node.output) else {
            return self.need_saved(end);
        };
        let there = self.buffer_of.clone();
        let recomputed = self.run(inside, true);
        let mut found = Gradients::new();
        found.insert(output, Gradient::shared(incoming.buffer));
        self.backward(output, &mut found);
        let with_segment = copies.iter().chain(&recomputed);
        with_segment.for_each(|value| self.need_value(*value));
        self.buffer_of = there;
        self.need_saved(end);
        self.need(incoming.buffer);
        let of_inputs: Vec<Option<Gradient>> =
            copies.iter().map(|copy| found.remove(copy)).collect();
        of_inputs
            .iter()
            .flatten()
            .for_each(|gradient| self.need(gradient.buffer));
        for (value, gradient) in found {
            let whole = ValueRef {
                value,
                view: None,
                tracked: true,
            };
            self.add_gradient(&whole, gradient, gradients);
        }
        for (input, gradient) in inputs.iter().zip(of_inputs) {
            if let Some(gradient) = gradient {
                self.add_gradient(input, gradient, gradients);
            }
        }
    }

    /// Frees the graph. Outputs other than the first live until now, and so does every value not dropped or needed
    /// since `began`.
    pub(super) fn end(&mut self, began: usize) {
        for output in self.graph.outputs.iter().skip(1) {
            self.need_value(output.value);
        }
        let held = self.buffer_of.iter().flatten().chain(self.ids.values());
        for buffer in held.copied().collect::<Vec<_>>() {
            if self.buffers[buffer].until < began {
                self.need(buffer);
            }
        }
    }

    /// Divides f16 gradients by the loss scale into f32, between backward and the optimizer, from the first weight to
    /// the last. Each f16 gradient is freed after its division.
    pub(super) fn unscale(&mut self) {
        let in_f16 = self.graph.weights().any(|(id, _)| {
            let weight = self.graph.value(id);
            weight.tracked && weight.dtype == DType::F16
        });
        if !in_f16 {
            return;
        }
        let gradients = self.buffers.iter().enumerate();
        let gradients = gradients
            .filter(|(_, buffer)| buffer.kind == MemoryKind::Gradients && buffer.until == END);
        let gradients: Vec<(usize, Buffer)> = gradients.map(|(i, buffer)| (i, *buffer)).collect();
        // Backward makes gradients from the last weight to the first.
        for (place, half) in gradients.into_iter().rev() {
            self.now += 1;
            let wide = self.add(Buffer { width: 4, ..half });
            self.buffers[wide].until = END;
            if self.graph.target == Target::Cuda {
                // The kernel widens before it multiplies, and multiplies by 0 to find values that are not finite.
                let (what, formula) = ("a gradient as it is unscaled", "of the largest");
                self.add(Buffer::new(
                    MemoryKind::Scratch,
                    what,
                    formula,
                    half.elements,
                    4,
                ));
            }
            self.buffers[place].until = self.now;
        }
    }
}

const GRADIENTS: &str = "gradients between ops";

fn base_of(operand: &ValueRef) -> ValueRef {
    ValueRef {
        view: None,
        ..*operand
    }
}
