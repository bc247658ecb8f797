//! Ops in the trace that is open.

use super::spec::{Spec, shaped};
use super::steps::steps_of;
use crate::Result;
use crate::graph::{self, Call};
use crate::ops::lowering::{Lowering, Signature};
use crate::probe::Operand;
use candle_core::Tensor;
use std::sync::Arc;

/// Writes down a call of `op` on `inputs`, and returns its hollow output. What the call does to memory is read off its
/// `lowering`; without one the op says it. What candle's own ops keep and take between them, where the call is
/// `composed` of them, is not known.
pub(crate) fn traced<C: Spec + Send + Sync + 'static>(
    name: &'static str,
    op: C,
    inputs: &[&Tensor],
    lowering: Option<Lowering>,
    composed: bool,
) -> Result<Tensor> {
    let target = graph::target().unwrap_or_default();
    let operands: Vec<Operand<'_>> = inputs.iter().map(|x| (*x).into()).collect();
    let output = op.output(&operands);
    let op = Arc::new(op);
    let (reads, attributes) = (op.reads(), op.attributes());
    let kept = op.kept(&operands, target);
    let call = Call {
        name,
        attributes: attributes.clone(),
        composed,
        inputs,
        reads: &reads,
        output: output.clone(),
        kept: kept.clone(),
        is_tracked: false,
        held: op.clone(),
    };
    let y = graph::record(call, |tracked| {
        let signature = Signature {
            attributes: &attributes,
            inputs: operands,
            reads: reads.iter().map(Into::into).collect(),
            output: shaped(&output.0, output.1),
            kept: kept
                .iter()
                .map(|(_, shape, dtype)| shaped(shape, *dtype))
                .collect(),
            target,
        };
        steps_of(&*op, lowering, &signature, tracked)
    })?;
    op.forwarded();
    Ok(y)
}
