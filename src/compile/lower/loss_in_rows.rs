//! The pass *loss in rows*: head and loss of some rows at a time, with their gradients at once, so that the logits of all rows
//! are never there, and none is kept.

use super::super::build::rows_on_cpu;
use super::super::op::Op;
use super::super::plan::Operand;
use super::{Lower, part};
use crate::graph;
use crate::ops::lowering::Ids;
use crate::ops::product::{Factor, product};
use crate::ops::reduce;
use crate::ops::{converted, linear_cross_entropy};

impl Lower<'_> {
    /// Whether a node is the loss itself, made of a head: its gradient is 1, and can be computed forward.
    pub(super) fn is_head_and_loss(&self, node: &graph::Node) -> bool {
        let outputs = &self.graph.outputs;
        node.op == linear_cross_entropy::NAME
            && self.flow.is_wanted(node.output)
            && outputs
                .first()
                .is_some_and(|output| output.value == node.output)
            && !self.is_read_again(node)
            && node
                .inputs
                .iter()
                .chain(&node.reads)
                .all(|x| !self.graph.shape_of(x).contains(&0))
    }

    /// Whether anything else reads the loss: then its gradient is not 1.
    fn is_read_again(&self, node: &graph::Node) -> bool {
        let mut inputs = self.graph.nodes().flat_map(|node| &node.inputs);
        inputs.any(|input| input.value == node.output)
    }

    /// The loss, and the gradients of its inputs, x (N, D) and the weight (V, D), where they are wanted.
    pub(super) fn loss_in_rows(&mut self, node: &graph::Node) -> Vec<(usize, Operand)> {
        let (graph, x_of, weight_of) = (self.graph, &node.inputs[0], &node.inputs[1]);
        let [classes, width] = [0, 1].map(|dim| graph.shape_of(weight_of)[dim]);
        let x_dtype = graph.value(x_of.value).dtype;
        let weight_dtype = graph.value(weight_of.value).dtype;
        let (x, weight) = (self.read(x_of), self.read(weight_of));
        let rows = x.elements.len() / width;
        let read = match &node.reads[..] {
            [copy, _] => self.read(copy),
            _ => weight,
        };
        let targets_of = &node.reads[node.reads.len() - 1];
        let ids = Ids {
            read: node.reads.len() - 1,
            bound: classes,
            ignore: None,
        };
        self.ids.push((targets_of.value, ids));
        let targets = self.read(targets_of);

        let wanted = [0, 1].map(|input| self.hands_on(node, input));
        let dx = wanted[0].then(|| self.temporary("dx", &[rows, width], x_dtype));
        // Rounded once, when the sums over all rows are there.
        let wide = graph.value(node.output).dtype;
        let dw = wanted[1].then(|| self.temporary("dweight", &[classes, width], wide));
        let losses = self.temporary("losses", &[rows], wide);
        let most = rows_on_cpu(rows, classes);
        for start in (0..rows).step_by(most) {
            let count = most.min(rows - start);
            let some = |x: &Operand, width: usize| part(x, start * width, count * width);
            let logits = self.temporary("logits", &[count, classes], x_dtype);
            let of_logits = Factor::new(count, classes);
            let (of_x, of_weight) = (Factor::new(count, width), Factor::new(classes, width));
            let mut call = |op, reads, writes| self.plan.call_on(op, reads, writes);
            call(
                Op::Kernel(product(of_x, of_weight.t(), false)),
                vec![some(&x, width), read.clone()],
                vec![logits.clone()],
            );
            let loss = Op::CrossEntropy {
                rows: count,
                classes,
                counted: rows,
            };
            // The logits become their gradient.
            let written = vec![logits.clone(), some(&losses, 1)];
            call(loss, vec![some(&targets, 1)], written);
            if let Some(dx) = &dx {
                call(
                    Op::Kernel(product(of_logits, of_weight, false)),
                    vec![logits.clone(), read.clone()],
                    vec![some(dx, width)],
                );
            }
            if let Some(dw) = &dw {
                call(
                    Op::Kernel(product(of_logits.t(), of_x, start > 0)),
                    vec![logits, some(&x, width)],
                    vec![dw.clone()],
                );
            }
        }
        let mean = Op::Kernel(reduce::sum_of(1.0 / rows as f64));
        let loss = self.arena("loss", node.output);
        self.places[node.output.0] = Some(loss.clone());
        self.plan.call_on(mean, vec![losses], vec![loss]);
        let dw = dw.map(|sums| match weight_dtype == wide {
            true => sums,
            false => {
                let rounded = self.temporary("dweight", &[classes, width], weight_dtype);
                let cast = Op::Kernel(converted());
                self.plan.call_on(cast, vec![sums], vec![rounded.clone()]);
                rounded
            }
        });
        let gradients = [dx, dw].into_iter().enumerate();
        gradients
            .filter_map(|(input, gradient)| Some((input, gradient?)))
            .collect()
    }
}
