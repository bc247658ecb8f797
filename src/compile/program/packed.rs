//! Packs weights: stacks them so that one matmul computes all outputs.

use super::Program;
use crate::graph::{Source, Target, Value, ValueId, ValueRef};
use candle_core::DType;

/// Stacked weights.
pub(super) struct Packed {
    pub weight: ValueRef,
    /// Its copy in half precision.
    pub copy: ValueRef,
    pub rows: usize,
    /// Whether it needs a gradient.
    pub needs_grad: bool,
}

impl Program {
    /// Stacks the weights of linear layers, given as pairs of node and input. On a GPU in half precision one matmul
    /// with more columns is faster. `None` if another node reads one of the weights, or if only some are trained.
    pub(super) fn packed(&mut self, maps: &[(usize, usize)]) -> Option<Packed> {
        if self.target != Target::Cuda {
            return None;
        }
        let copies = maps.iter().map(|map| self.copy_of(*map));
        let copies: Vec<ValueId> = copies.collect::<Option<_>>()?;
        let weights = copies.iter().map(|copy| self.copied(*copy));
        let weights: Vec<ValueId> = weights.collect::<Option<_>>()?;
        let first = self.value(weights[0]).clone();
        let width = |weight: &ValueId| self.value(*weight).shape[1];
        let mut all = weights.iter().enumerate();
        let fits = all.all(|(i, weight)| {
            self.readers(*weight).len() == 1
                && self.readers(copies[i]).len() == 1
                && self.value(*weight).dtype == DType::F32
                && self.needs_grad(*weight) == self.needs_grad(weights[0])
                && width(weight) == width(&weights[0])
                && !weights[..i].contains(weight)
        });
        if !fits {
            return None;
        }
        let rows = weights.iter().map(|weight| self.value(*weight).shape[0]);
        let rows = rows.sum();
        let needs_grad = maps
            .iter()
            .any(|(node, input)| self.nodes[*node].needs_grad[*input]);
        let stacked = Value {
            shape: vec![rows, first.shape[1]],
            ..first
        };
        let copy = Value {
            dtype: self.value(copies[0]).dtype,
            source: Source::Node,
            ..stacked.clone()
        };
        let weight = self.add(stacked, weights[0]);
        let copy = self.add(copy, copies[0]);
        self.stacks.insert(weight, weights);
        self.copies.insert(copy, weight);
        let whole = |value, tracked| ValueRef {
            value,
            view: None,
            tracked,
        };
        Some(Packed {
            weight: whole(weight, true),
            copy: whole(copy, false),
            rows,
            needs_grad,
        })
    }

    /// Returns the copy that the matmuls of a node read for an input.
    fn copy_of(&self, (node, input): (usize, usize)) -> Option<ValueId> {
        let node = &self.nodes[node];
        let weight = node.inputs[input].value;
        let mut reads = node.extra_inputs.iter().map(|read| read.value);
        reads.find(|read| self.copied(*read) == Some(weight))
    }
}
