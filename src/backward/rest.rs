//! What is left to candle: a graph from the first of its own results on.

use super::seed::Seed;
use super::sums::Sums;
use crate::Result;
use candle_core::{DType, Tensor, backprop::GradStore};

/// Backward through the rest of `graph` by candle, which goes on from the gradients so far.
pub(super) fn by_candle(graph: &[Tensor], mut sums: Sums) -> Result<GradStore> {
    let variables = sums.variables().to_vec();
    let mut seeded: Option<Tensor> = None;
    for x in graph.iter().chain(&variables) {
        if let Some(sum) = sums.take(x) {
            let scalar = match seeded {
                None => Tensor::zeros((), DType::F32, x.device())?,
                Some(scalar) => scalar,
            };
            seeded = Some(scalar.apply_op2(x, Seed(sum.gradient))?);
        }
    }
    match seeded {
        Some(seeded) => Ok(seeded.backward()?),
        None => sums.into_store(),
    }
}
