//! Weights that one product reads, one under the other.

use super::Program;
use crate::graph::{Source, Target, Value, ValueId, ValueRef};
use candle_core::DType;

/// Weights as one.
pub(super) struct Packed {
    pub weight: ValueRef,
    /// Its copy in half precision.
    pub copy: ValueRef,
    /// How many rows it has.
    pub rows: usize,
    /// Whether its gradient is needed.
    pub passes: bool,
}

impl Program {
    /// The weights of some maps as one, on a GPU in half precision, where products of more columns are faster: given
    /// by the nodes that read them, and as which input. `None` unless these maps alone read them, and all of them are
    /// trained or none.
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
                && self.value(*weight).dtype == DType::F32
                && self.is_wanted(*weight) == self.is_wanted(weights[0])
                && width(weight) == width(&weights[0])
                && !weights[..i].contains(weight)
        });
        if !fits {
            return None;
        }
        let rows = weights.iter().map(|weight| self.value(*weight).shape[0]);
        let rows = rows.sum();
        let passes = maps
            .iter()
            .any(|(node, input)| self.nodes[*node].passes[*input]);
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
            passes,
        })
    }

    /// The copy that a node's products read for an input.
    fn copy_of(&self, (node, input): (usize, usize)) -> Option<ValueId> {
        let node = &self.nodes[node];
        let weight = node.inputs[input].value;
        let mut reads = node.reads.iter().map(|read| read.value);
        reads.find(|read| self.copied(*read) == Some(weight))
    }
}
