//! The costs of all ops, and those of spans.

use super::recording::{OperandShape, Span};
use crate::ops::cost::{Cost, OpCost};
use crate::ops::info;
use crate::probe::{Kind, Operand, Operands};
use std::sync::LazyLock;

/// The formulas of all ops that have one: x, y and the like are the tensors' bytes, N rows, the other letters as in the
/// crate's legend.
///
/// ```
/// for op in tallow::profile::op_costs() {
///     println!("{}: {}; {}", op.op, op.flops, op.bytes);
/// }
/// ```
pub fn op_costs() -> &'static [OpCost] {
    static COSTS: LazyLock<Vec<OpCost>> =
        LazyLock::new(|| info::all().filter_map(|info| info.cost).collect());
    &COSTS
}

/// The entry of the op called `name`.
pub(super) fn entry(name: &str) -> Option<&'static OpCost> {
    op_costs().iter().find(|entry| entry.op == name)
}

/// The cost of a span.
pub(super) fn of(span: &Span) -> Option<Cost> {
    let inputs: Vec<Operand<'_>> = span.inputs.iter().map(OperandShape::operand).collect();
    let operands = Operands {
        inputs: &inputs,
        output: span.output.as_ref()?.operand(),
    };
    let entry = entry(&span.name())?;
    match span.kind {
        Kind::Op => (entry.forward)(&operands),
        Kind::OpBackward => entry.backward?(&operands),
        _ => None,
    }
}
