//! What is left to candle: a graph from the first of its own results on.

use super::attach::{Attach, Slot, token};
use super::sums::Sums;
use crate::Result;
use candle_core::{Tensor, backprop::GradStore};
use std::sync::Arc;

/// Backward through the rest of `graph` by candle, which goes on from the gradients so far.
pub(super) fn by_candle(graph: &[Tensor], mut sums: Sums) -> Result<GradStore> {
    let variables = sums.variables().to_vec();
    let mut last: Option<Tensor> = None;
    for x in graph.iter().chain(&variables) {
        if let Some(sum) = sums.take(x) {
            let before = last.map_or_else(|| token(x), Ok)?;
            let slot = Arc::<Slot>::default();
            slot.put(Some(sum.gradient));
            last = Some(before.apply_op2(x, Attach(slot))?);
        }
    }
    match last {
        Some(last) => Ok(last.backward()?),
        None => sums.into_store(),
    }
}
