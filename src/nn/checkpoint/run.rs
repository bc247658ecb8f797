//! A run of a function with a separate graph.

use super::refuse;
use crate::ops::{self, operand};
use crate::{Result, backward_from};
use candle_core::Tensor;

/// An input, detached from its graph.
#[derive(Clone)]
pub(super) struct Input {
    tensor: Tensor,
    /// Whether it had a graph.
    tracked: bool,
}

impl Input {
    pub fn new(tensor: &Tensor) -> Self {
        Self {
            tensor: tensor.detach(), // a variable too: its gradients inside and outside are kept apart
            tracked: tensor.track_op() && tensor.dtype().is_float(),
        }
    }
}

/// The output of a run, whose graph ends at the function's inputs.
pub(super) struct Run {
    /// The inputs; those that had a graph are copied into variables.
    inputs: Vec<Tensor>,
    output: Tensor,
}

/// A leaf of the graph of an output.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// An input, by index.
    Input(usize),
    /// A variable that the function reads, directly or through a captured tensor.
    Variable(Tensor),
}

impl Run {
    /// Runs `f` on copies of the inputs.
    pub fn new(
        f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
        inputs: impl Iterator<Item = Input>,
    ) -> Result<Self> {
        let leaf = |input: Input| match input.tracked {
            true => {
                let copied = operand("nn::checkpoint", &input.tensor)?;
                Ok(ops::variable_of(&copied)?.into_inner())
            }
            false => Ok(input.tensor),
        };
        let inputs: Vec<Tensor> = inputs.map(leaf).collect::<Result<_>>()?;
        let output = f(&inputs)?;
        Ok(Self { inputs, output })
    }

    /// Returns the leaves of the output's graph: inputs first, then variables in the graph's order, which is the same
    /// in each run.
    pub fn sources(&self) -> Vec<Source> {
        let nodes = self.output.sorted_nodes();
        let leaves: Vec<&Tensor> = nodes.into_iter().filter(|n| n.is_variable()).collect();
        let is_leaf = |x: &Tensor| leaves.iter().any(|leaf| leaf.id() == x.id());
        let is_input = |x: &Tensor| self.inputs.iter().any(|input| input.id() == x.id());
        let inputs = self.inputs.iter().enumerate();
        let inputs = inputs.filter(|(_, input)| is_leaf(input));
        let variables = leaves.iter().filter(|leaf| !is_input(leaf));
        inputs
            .map(|(i, _)| Source::Input(i))
            .chain(variables.map(|leaf| Source::Variable((*leaf).clone())))
            .collect()
    }

    /// Returns the output and frees its graph.
    pub fn into_output(self) -> Tensor {
        self.output.detach()
    }

    /// Whether this run has the same output shape, dtype and leaves as another.
    pub fn is_like<'a>(
        &self,
        output: &Tensor,
        sources: impl ExactSizeIterator<Item = &'a Source>,
    ) -> bool {
        let found = self.sources();
        let same = |(a, b): (&Source, &Source)| match (a, b) {
            (Source::Input(a), Source::Input(b)) => a == b,
            (Source::Variable(a), Source::Variable(b)) => a.id() == b.id(),
            _ => false,
        };
        (self.output.shape(), self.output.dtype()) == (output.shape(), output.dtype())
            && found.len() == sources.len()
            && found.iter().zip(sources).all(same)
    }

    /// Computes the gradients of `sources` from the output's gradient, and frees the graph.
    pub fn backward<'a>(
        self,
        d_output: &Tensor,
        sources: impl Iterator<Item = &'a Source>,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut gradients = backward_from(self.output, d_output)?;
        let gradients = sources.map(|source| {
            let gradient = match source {
                Source::Input(i) => gradients.remove(&self.inputs[*i]),
                Source::Variable(variable) => gradients.remove(variable),
            };
            match (gradient, source) {
                // candle's gradients may have a graph, and keep all of it.
                (Some(gradient), _) => Ok(Some(gradient.detach())),
                // Without a gradient backward would panic where the input came from.
                (None, Source::Input(i)) => Err(refuse(
                    format!("no gradient reaches input {i}, on which the output depends"),
                    "is every op between them differentiable? detach it if it needs none",
                )),
                (None, Source::Variable(_)) => Ok(None),
            }
        });
        gradients.collect()
    }
}
