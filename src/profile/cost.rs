//! What an op has to do, by its formula.

use super::op_table::TABLE;
use super::recording::{OperandShape, Span};
use crate::probe::Kind;
use std::ops::{Add, AddAssign};

/// FLOPs and bytes of one call of an op, or of several together.
///
/// The model's work, whatever computes it, as [`flops`](crate::model::flops) counts it: a causal mask saves nothing, and
/// what flash attention computes twice counts once. Bytes are the least that must move: every tensor read once and written
/// once, what forward keeps for backward included, caches and second passes not. So a rate over the memory's own says that
/// the tensors were still in cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// 2 for each multiply-add of the matrix products.
    pub product_flops: f64,
    /// Everything else, an exponential, a root and a division counting 1.
    pub other_flops: f64,
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes written.
    pub written_bytes: f64,
}

impl Cost {
    /// All FLOPs.
    pub fn flops(&self) -> f64 {
        self.product_flops + self.other_flops
    }

    /// All bytes.
    pub fn bytes(&self) -> f64 {
        self.read_bytes + self.written_bytes
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            product_flops: self.product_flops + other.product_flops,
            other_flops: self.other_flops + other.other_flops,
            read_bytes: self.read_bytes + other.read_bytes,
            written_bytes: self.written_bytes + other.written_bytes,
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// What an op's operands say of its cost: one entry of [`op_costs`].
#[derive(Clone, Copy, Debug)]
pub struct OpCost {
    /// The op's name.
    pub op: &'static str,
    /// Its FLOPs, in words.
    pub flops: &'static str,
    /// Its bytes, in words.
    pub bytes: &'static str,
    /// What the op holds that others time apart.
    pub inside: Option<&'static str>,
    pub(super) forward: Formula,
    /// `None` where backward is candle's own.
    pub(super) backward: Option<Formula>,
}

pub(super) type Formula = fn(&Operands<'_>) -> Option<Cost>;

/// The operands of one call.
pub(super) struct Operands<'a> {
    pub inputs: &'a [OperandShape],
    pub output: &'a OperandShape,
}

impl Operands<'_> {
    /// Input `i`.
    pub fn input(&self, i: usize) -> Option<&OperandShape> {
        self.inputs.get(i)
    }

    /// Bytes of all inputs.
    pub fn input_bytes(&self) -> f64 {
        self.inputs.iter().map(OperandShape::bytes).sum()
    }
}

/// The formulas of all ops that have one: x, y and the like are the tensors' bytes, N rows, the other letters as in the
/// crate's legend.
///
/// ```
/// for op in tallow::profile::op_costs() {
///     println!("{}: {}; {}", op.op, op.flops, op.bytes);
/// }
/// ```
pub fn op_costs() -> &'static [OpCost] {
    TABLE
}

/// The entry of the op called `name`.
pub(super) fn entry(name: &str) -> Option<&'static OpCost> {
    TABLE.iter().find(|entry| entry.op == name)
}

/// The cost of a span.
pub(super) fn of(span: &Span) -> Option<Cost> {
    let operands = Operands {
        inputs: &span.inputs,
        output: span.output.as_ref()?,
    };
    let entry = entry(&span.name())?;
    match span.kind {
        Kind::Op => (entry.forward)(&operands),
        Kind::OpBackward => entry.backward?(&operands),
        _ => None,
    }
}
