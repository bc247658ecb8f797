//! Ops in the trace that is open.

use super::spec::Spec;
use crate::Result;
use crate::graph::{self, Call};
use crate::probe::Operand;
use candle_core::Tensor;
use std::sync::Arc;

/// Writes down a call of `op` on `inputs`, and returns its hollow output. `composed` is whether candle's own ops
/// compute it.
pub(crate) fn traced<C: Spec + Send + Sync + 'static>(
    name: &'static str,
    op: C,
    inputs: &[&Tensor],
    composed: bool,
) -> Result<Tensor> {
    let target = graph::target().unwrap_or_default();
    let operands: Vec<Operand<'_>> = inputs.iter().map(|x| (*x).into()).collect();
    let output = op.output(&operands);
    let op = Arc::new(op);
    let (reads, attributes) = (op.reads(), op.attributes());
    let kept = op.kept(&operands, target);
    let y = graph::record(Call {
        name,
        attributes,
        composed,
        inputs,
        reads: &reads,
        output,
        kept,
        is_tracked: false,
        held: op.clone(),
    })?;
    op.forwarded();
    Ok(y)
}
