//! An op by itself: the calls that its lowering says.

use super::super::plan::BufferRange;
use super::form::{Form, Forms};
use super::program::Program;
use super::{Lower, no_planned_form, place_of};
use crate::Result;
use crate::graph::{Node, ValueId};
use crate::op_table;
use crate::ops::lowering::{Calls, KernelCall, Lowering, Named, Signature, Slot, converted};
use candle_core::DType;
use std::collections::HashMap;

struct Single {
    path: String,
    node: Node,
}

impl Single {
    fn lowering(&self, lower: &Lower<'_>) -> Result<Lowering> {
        op_table::lowering_of(&self.node).ok_or_else(|| self.refused(lower))
    }

    fn refused(&self, lower: &Lower<'_>) -> crate::Error {
        let what = match self.node.composed {
            true => " composed of candle's own ops",
            false => "",
        };
        no_planned_form(lower.job.function.op, self.node.op, &self.node.path, what)
    }

    /// The input whose gradient a call can add to that of a weight itself: all of one that is trained.
    fn sum_of_weight(&self, lower: &Lower<'_>, call: &KernelCall) -> Option<usize> {
        let Some(Slot::Gradient(input)) = call.writes.get(call.kernel.sum()?) else {
            return None;
        };
        let operand = &self.node.inputs[*input];
        let dtype = lower.program.graph.value(operand.value).dtype;
        let is_wide = matches!(dtype, DType::F32 | DType::F64);
        let is_whole = lower.program.is_leaf(operand) && lower.trained(operand.value).is_some();
        (is_wide && is_whole).then_some(*input)
    }

    /// Writes `calls` down; what is no value of the graph, `other` finds.
    fn write(
        &self,
        lower: &mut Lower<'_>,
        calls: Calls,
        other: &mut dyn FnMut(&mut Lower<'_>, Slot) -> BufferRange,
    ) -> Result<()> {
        let node = &self.node;
        let scratch = calls.scratch.iter();
        let scratch: Vec<BufferRange> = scratch
            .map(|(shape, dtype)| lower.scratch(shape, *dtype))
            .collect();
        let mut find = |lower: &mut Lower<'_>, slot| match slot {
            Slot::Input(i) => Some(lower.read(node.inputs.get(i)?)),
            Slot::Read(i) => Some(lower.read(node.reads.get(i)?)),
            Slot::Output => Some(lower.value(node.output)),
            Slot::Kept(i) => Some(lower.value(node.kept.get(i)?.value)),
            Slot::Scratch(i) => scratch.get(i).cloned(),
            slot => Some(other(lower, slot)),
        };
        for call in calls.calls {
            let mut all = |slots: &Named<Slot>| slots.try_map(|slot| find(lower, *slot));
            let operands = all(&call.reads).zip(all(&call.writes));
            // An op that keeps nothing, say, as attention of no queries does not.
            let (reads, writes) = operands.ok_or_else(|| self.refused(lower))?;
            lower.plan.call(call.kernel, reads, writes);
        }
        Ok(())
    }
}

impl Form for Single {
    fn path(&self) -> &str {
        &self.path
    }

    fn outputs(&self) -> Vec<ValueId> {
        vec![self.node.output]
    }

    fn forward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let program = lower.program.clone();
        let (node, graph) = (&self.node, program.graph);
        let calls = (self.lowering(lower)?.forward)(&Signature::of(graph, node));
        if let Some((read, check)) = calls.check {
            lower.checks.push((node.reads[read].value, check));
        }
        if let Some(input) = calls.same.first() {
            let operand = lower.read(&node.inputs[*input]);
            if lower.places[node.output.0].is_none() {
                lower.places[node.output.0] = Some(operand);
                return Ok(());
            }
            // What the plan gives out.
            let output = lower.value(node.output);
            let op = converted();
            lower.plan.call(op, [("x", operand)], [("y", output)]);
            return Ok(());
        }
        lower.make(node.output, node.op, &graph.value(node.output).shape);
        for kept in &node.kept {
            lower.make(kept.value, kept.name, &graph.value(kept.value).shape);
        }
        self.write(lower, calls, &mut |_, slot| {
            unreachable!("{slot:?} in a forward")
        })
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let program = lower.program.clone();
        let (node, graph) = (&self.node, program.graph);
        let Some(dy) = lower.gradients.get(node.output) else {
            return Ok(());
        };
        let signature = Signature::of(graph, node);
        let mut calls = (self.lowering(lower)?.backward)(&signature);
        let is_wanted = |input: usize| program.passes_through(node, input);
        // What no one reads: a gradient of tokens' weights that are frozen, say.
        calls.calls.retain(|call| {
            let of_inputs = |slot: &Slot| match slot {
                Slot::Gradient(input) => is_wanted(*input),
                _ => true,
            };
            call.writes.iter().any(of_inputs)
        });
        let same = std::mem::take(&mut calls.same);
        let wanted: Vec<usize> = (0..node.inputs.len()).filter(|i| is_wanted(*i)).collect();
        let mut made: HashMap<usize, BufferRange> = HashMap::new();
        for call in &mut calls.calls {
            if let Some(input) = self.sum_of_weight(lower, call) {
                let weight = node.inputs[input].value;
                let dtype = signature.inputs[input].dtype;
                let (gradient, accumulate) = lower.gradient_of_weights(&[weight], dtype);
                call.kernel = call.kernel.clone().accumulating(accumulate);
                made.insert(input, gradient);
            }
        }
        let sums: Vec<usize> = made.keys().copied().collect();
        self.write(lower, calls, &mut |lower, slot| match slot {
            Slot::OutputGradient => dy.clone(),
            Slot::Gradient(input) => {
                let x = &signature.inputs[input];
                let new = || lower.temporary("gradient", x.dims, x.dtype);
                made.entry(input).or_insert_with(new).clone()
            }
            slot => unreachable!("{slot:?} is a value"),
        })?;
        for input in wanted {
            if sums.contains(&input) {
                lower.gradient_done(&[node.inputs[input].value]);
            } else if let Some(gradient) = made.remove(&input) {
                lower.contribute(&node.inputs[input], gradient);
            }
            if same.contains(&input) {
                lower.contribute(&node.inputs[input], dy.clone());
            }
        }
        lower.gradients.take(node.output); // until here it is read
        Ok(())
    }
}

/// All nodes that are in no other form.
pub(super) fn find(program: &Program<'_>, forms: &mut Forms) {
    for (i, node) in program.nodes.iter().enumerate() {
        if forms.is_free(i) {
            let form = Single {
                path: place_of(node),
                node: node.clone(),
            };
            forms.add(i, [], form);
        }
    }
}
