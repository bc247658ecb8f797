//! The costs of all ops, and those of spans.

use super::recording::{OperandShape, Span};
use crate::op_table;
use crate::ops::cost::{Cost, OpCost};
use crate::probe::{Kind, Operand, Operands, Parts};
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
        LazyLock::new(|| op_table::all().filter_map(|info| info.cost).collect());
    &COSTS
}

pub(super) fn entry(name: &str) -> Option<&'static OpCost> {
    op_costs().iter().find(|entry| entry.op == name)
}

/// The part that an op is as a whole, which took `ns` and whose kernels have told of none: a product and nothing else,
/// a softmax. Of a composite op nothing is known then.
pub(super) fn whole_part(span: &Span, ns: u64, holds_ops: bool) -> Parts {
    let mut parts = Parts::default();
    let has_inside = entry(&span.name()).is_some_and(|entry| entry.inside.is_some());
    let is_composite = holds_ops || has_inside;
    if span.name() == "softmax" {
        parts.softmax_ns = ns;
    } else if !is_composite && span.cost().is_some_and(|cost| cost.product_flops > 0.0) {
        parts.products_ns = ns;
    }
    parts
}

impl Span {
    /// Its FLOPs and bytes, as it has told them or by the op's formula; `None` for what is no op, or has no formula.
    pub fn cost(&self) -> Option<Cost> {
        self.cost.or_else(|| by_formula(self))
    }
}

fn by_formula(span: &Span) -> Option<Cost> {
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
