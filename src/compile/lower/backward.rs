//! Gradients: every node's backward in reverse, and their sums where a value is read several times.

use super::super::op::Op;
use super::super::plan::{Operand, Phase};
use super::{Lower, signature};
use crate::graph::{self, ValueId};
use crate::ops::arithmetic::sum;
use crate::ops::lowering::Slot;
use crate::ops::strided;
use crate::{Error, Result};
use candle_core::DType;
use std::collections::HashMap;

impl Lower<'_> {
    /// The gradients of the parameters, from the loss.
    pub(super) fn gradients(&mut self, loss: &Operand) -> Result<Vec<Operand>> {
        self.plan.phase = Phase::Backward;
        self.plan.path = String::new();
        let output = &self.graph.outputs[0];
        let dtype = self.graph.value(output.value).dtype;
        let dloss = self.temporary("gradient of the loss", &[loss.elements.len()], dtype);
        let one = Op::Kernel(strided::filled(1.0));
        self.plan.call_on(one, Vec::new(), vec![dloss.clone()]);
        let mut gradients = Gradients::new();
        self.contribute(&mut gradients, output, dloss);
        let nodes: Vec<_> = self.graph.nodes().collect();
        for node in nodes.into_iter().rev() {
            if !self.flow.is_wanted(node.output) {
                continue;
            }
            if let Some(dy) = gradients.remove(&node.output) {
                self.backward(&mut gradients, node, dy)?;
            }
        }
        let parameters = self.wanted.parameters.iter();
        let found = parameters.map(|trained| {
            gradients
                .remove(&trained.value)
                .ok_or_else(|| Error::Order {
                    op: self.op,
                    problem: format!("no gradient of {}", trained.name),
                    hint: "a bug of this crate: the weight was said to be reached".into(),
                })
        });
        found.collect()
    }

    /// The calls of a node's backward, and the gradients that they give.
    fn backward(
        &mut self,
        gradients: &mut Gradients,
        node: &graph::Node,
        dy: Operand,
    ) -> Result<()> {
        let lowering = self.lowering(node)?;
        let signature = signature(self.graph, node);
        self.plan.path = super::place_of(&node.path, node.op);
        if let Some(early) = self.early.remove(&node.output) {
            for (input, gradient) in early {
                self.contribute(gradients, &node.inputs[input], gradient);
            }
            return Ok(());
        }
        let mut calls = (lowering.backward)(&signature);
        let is_wanted = |input: usize| self.hands_on(node, input);
        // What is written for nobody: a gradient of tokens' weights that are frozen, say.
        calls.calls.retain(|call| {
            let of_inputs = |slot: &Slot| match slot {
                Slot::Gradient(input) => is_wanted(*input),
                _ => true,
            };
            call.writes.iter().any(of_inputs)
        });
        let same = std::mem::take(&mut calls.same);
        let same: Vec<usize> = same.into_iter().filter(|i| is_wanted(*i)).collect();
        let wanted: Vec<bool> = (0..node.inputs.len()).map(is_wanted).collect();
        let mut made: HashMap<usize, Operand> = HashMap::new();
        let shapes: Vec<_> = signature
            .inputs
            .iter()
            .map(|x| (x.dims.to_vec(), x.dtype))
            .collect();
        self.calls(node, calls, &mut |lower, slot| match slot {
            Slot::OutputGradient => dy.clone(),
            Slot::Gradient(input) => {
                let (shape, dtype) = &shapes[input];
                let new = || lower.temporary("gradient", shape, *dtype);
                made.entry(input).or_insert_with(new).clone()
            }
            slot => unreachable!("{slot:?} is a value"),
        })?;
        for input in (0..node.inputs.len()).filter(|input| wanted[*input]) {
            if let Some(gradient) = made.remove(&input) {
                self.contribute(gradients, &node.inputs[input], gradient);
            }
            if same.contains(&input) {
                self.contribute(gradients, &node.inputs[input], dy.clone());
            }
        }
        Ok(())
    }

    /// Adds the gradient of what `operand` shows to that of its value.
    fn contribute(&mut self, gradients: &mut Gradients, operand: &graph::Operand, dx: Operand) {
        let base = self.value(operand.value);
        let value = self.graph.value(operand.value);
        let shape = self.graph.shape_of(operand).to_vec();
        let is_in_order = operand.view.as_ref().is_none_or(strided::is_contiguous);
        let is_whole = is_in_order && dx.elements.len() == base.elements.len();
        let dx = match is_whole {
            true => dx,
            false => {
                let all = || strided::broadcast(&shape, &shape);
                let view = operand.view.clone().unwrap_or_else(all);
                self.scattered(dx, view, base.elements.len(), value.dtype)
            }
        };
        let sum_of_both = match gradients.remove(&operand.value) {
            None => dx,
            Some(before) => {
                let after = self.temporary("gradient", &[base.elements.len()], value.dtype);
                let (reads, writes) = (vec![before, dx], vec![after.clone()]);
                self.plan.call_on(Op::Kernel(sum()), reads, writes);
                after
            }
        };
        gradients.insert(operand.value, sum_of_both);
    }

    /// A gradient of so many elements, zeros but for what `dx` adds by the places of `view`; sums are rounded once.
    fn scattered(
        &mut self,
        dx: Operand,
        view: graph::View,
        elements: usize,
        dtype: DType,
    ) -> Operand {
        let wide = match dtype {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        };
        let sums = self.temporary("gradient", &[elements], wide);
        let kernel = Op::Kernel(strided::scatter(view));
        self.plan.call_on(kernel, vec![dx], vec![sums.clone()]);
        if wide == dtype {
            return sums;
        }
        let rounded = self.temporary("gradient", &[elements], dtype);
        let cast = Op::Kernel(crate::ops::converted());
        self.plan.call_on(cast, vec![sums], vec![rounded.clone()]);
        rounded
    }
}

/// Of values, as far as they are known.
type Gradients = HashMap<ValueId, Operand>;
