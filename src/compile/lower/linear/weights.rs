//! The weights that products read, and which of them may be one.

use super::super::super::plan::BufferRange;
use super::super::program::Program;
use super::super::{Job, Lower, Target};
use super::product;
use crate::graph::{self, Node, ValueId};
use crate::ops::lowering::Accumulate;
use candle_core::DType;

/// The weights of a product.
#[derive(Clone)]
pub(super) enum Weights {
    /// The model's: one, or several whose copies lie one under the other.
    Own(Vec<ValueId>),
    /// One that is computed, a view of one, or another in each run: what its gradient is of, and what products read.
    Other([graph::ValueRef; 2]),
}

impl Weights {
    /// The weight (F, D) of one map.
    pub fn of(program: &Program<'_>, job: &Job<'_>, node: &Node, input: usize) -> Self {
        let weight = &node.inputs[input];
        if is_own(program, job, node, input) {
            return Self::Own(vec![weight.value]);
        }
        let dtype = |input: usize| program.graph.value(node.inputs[input].value).dtype;
        let is_copied = |input: &usize| dtype(*input) != dtype(0);
        // Copies in half precision stand first in what a node reads, in the order of their weights.
        let read = match is_copied(&input) {
            true => &node.reads[(1..input).filter(is_copied).count()],
            false => weight,
        };
        Self::Other([weight.clone(), read.clone()])
    }

    /// As products in `dtype` read them.
    pub fn read(&self, lower: &mut Lower<'_>, dtype: DType) -> BufferRange {
        match self {
            Self::Own(weights) => lower.product_weight(weights, dtype),
            Self::Other([_, read]) => lower.read(read),
        }
    }

    /// Writes the product of two factors in `dtype` that is their gradient, of so many rows, columns and terms.
    pub fn add_gradient(
        &self,
        lower: &mut Lower<'_>,
        dtype: DType,
        sizes: [usize; 3],
        factors: [(&BufferRange, bool); 2],
    ) {
        match self {
            Self::Own(weights) => {
                let dtype = lower.dtype_of_product_gradient(weights, dtype);
                let (dw, accumulate) = lower.gradient_of_weights(weights, dtype);
                product(lower, sizes, factors, dw, accumulate);
                lower.gradient_done(weights);
            }
            Self::Other([weight, _]) => {
                let dtype = lower.program.graph.value(weight.value).dtype;
                let dw = lower.temporary("dweight", &sizes[..2], dtype);
                product(lower, sizes, factors, dw.clone(), Accumulate::Never);
                lower.contribute(weight, dw);
            }
        }
    }
}

/// Whether a node's input is a weight of the model, all of it: one whose copies last from run to run, and whose
/// gradient is a parameter's.
pub(in crate::compile::lower) fn is_own(
    program: &Program<'_>,
    job: &Job<'_>,
    node: &Node,
    input: usize,
) -> bool {
    let graph = program.graph;
    let weight = &node.inputs[input];
    let [x, dtype] = [0, input].map(|input| graph.value(node.inputs[input].value).dtype);
    let is_input = matches!(graph.value(weight.value).source, graph::Source::Input(_));
    let is_parameter = job.has_backward() && job.function.numbers.contains_key(&weight.value);
    program.is_leaf(weight)
        && (x == dtype || !is_input)
        && (is_parameter || !program.is_wanted(weight.value))
}

/// Whether the weights of some maps can be one: read by these maps alone, all of them trained or none.
/// Given by the nodes that read them, and as which input.
pub(in crate::compile::lower) fn can_be_packed(
    program: &Program<'_>,
    job: &Job<'_>,
    maps: &[(&Node, usize)],
    dtype: DType,
) -> bool {
    let weights = maps.iter().map(|(node, input)| node.inputs[*input].value);
    let weights: Vec<ValueId> = weights.collect();
    let is_trained = |weight: &ValueId| program.is_wanted(*weight);
    let reads = |weight: &ValueId| {
        let readers = program.readers(*weight).iter();
        readers
            .filter(|i| program.nodes[**i].op != "weight_cast")
            .count()
    };
    let graph = program.graph;
    let widths = |weight: &ValueId| graph.value(*weight).shape[1];
    let mut others = weights[1..].iter();
    let mut own = maps
        .iter()
        .map(|(node, input)| is_own(program, job, node, *input));
    job.function.target == Target::Cuda
        && own.all(|is_own| is_own)
        && dtype != DType::F32
        && weights
            .iter()
            .all(|weight| reads(weight) == 1 && graph.value(*weight).dtype == DType::F32)
        && others
            .all(|w| is_trained(w) == is_trained(&weights[0]) && widths(w) == widths(&weights[0]))
        && (0..weights.len()).all(|i| !weights[..i].contains(&weights[i]))
}
