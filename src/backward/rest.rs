//! What is left to candle: a graph from the first of its own results on.

use super::seed::{AlsoSeed, Seed};
use super::sums::Sums;
use crate::Result;
use candle_core::{Tensor, backprop::GradStore};

/// Backward through the rest of `graph` by candle, which goes on from the gradients so far.
pub(super) fn by_candle(graph: &[Tensor], mut sums: Sums) -> Result<GradStore> {
    let mut seeded: Option<Tensor> = None;
    let variables = sums.variables().to_vec();
    for x in graph.iter().chain(&variables) {
        if let Some(sum) = sums.take(x) {
            seeded = Some(match seeded {
                None => x.apply_op1(Seed(sum.gradient))?,
                Some(scalar) => scalar.apply_op2(x, AlsoSeed(sum.gradient))?,
            });
        }
    }
    match seeded {
        Some(seeded) => Ok(seeded.backward()?),
        None => sums.into_store(),
    }
}
