//! A breakdown of memory into terms, whose sum is the peak.

use crate::report::{Column, Report, format_mib};
use serde::Serialize;
use serde_json::json;
use std::borrow::Cow;
use std::fmt;

/// The use of a term of a [`MemoryBreakdown`], in the order in which the memory is allocated in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MemoryKind {
    /// Parameters.
    Weights,
    /// Optimizer state, which is kept from step to step.
    Optimizer,
    /// Data that a step reads and does not train: inputs, token ids, constants, tables of rotary embeddings and, in a
    /// plan, frozen weights.
    Inputs,
    /// Outputs of forward's ops. If a backward follows, those that it needs.
    Activations,
    /// Half-precision copies of f32 weights in an autocast region.
    WeightCasts,
    /// Logits, and what the loss saves.
    Logits,
    /// Gradients of the weights.
    Gradients,
    /// Scratch memory of a single op, and gradients between ops.
    Scratch,
    /// Memory of no known use where memory is measured: allocated outside of the phases `forward`, `backward` and
    /// `optimizer`, or too small to be recorded.
    Other,
}

impl MemoryKind {
    /// All kinds, in order.
    pub const ALL: [Self; 9] = [
        Self::Weights,
        Self::Optimizer,
        Self::Inputs,
        Self::Activations,
        Self::WeightCasts,
        Self::Logits,
        Self::Gradients,
        Self::Scratch,
        Self::Other,
    ];

    /// Returns the name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Optimizer => "optimizer",
            Self::Inputs => "inputs",
            Self::Activations => "activations",
            Self::WeightCasts => "weight casts",
            Self::Logits => "logits",
            Self::Gradients => "gradients",
            Self::Scratch => "scratch",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The memory alive at the peak of a step, term by term. What the step includes depends on the function that predicts
/// it: attention's breakdowns have forward and backward, [`estimate`](crate::memory::estimate()) what the workload's
/// [`Mode`](super::Mode) says, and [`planned_breakdown`](super::planned_breakdown) the whole plan, with the update if
/// it has one. A table of attention benchmarks prints this breakdown in place of times for a size that does not fit in
/// memory.
///
/// ```
/// use tallow::memory::{AttentionWorkload, Target, attention_breakdown};
///
/// let workload = AttentionWorkload { sequence_length: 16_384, ..Default::default() };
/// let breakdown = attention_breakdown(&workload, Target::Cpu)?;
/// assert!(breakdown.to_string().contains("probabilities BHT^2 8,192.0 MiB"));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryBreakdown {
    /// The sizes that the letters in formulas stand for.
    pub sizes: String,
    /// The terms; their sum is the peak.
    #[serde(rename = "parts")]
    pub terms: Vec<Term>,
    /// Bytes alive when backward begins: inputs, weights, and what forward saves. Some of it is freed before the peak.
    pub before_backward_bytes: u64,
}

/// A term: `count` buffers of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Term {
    /// The use of the buffers.
    pub kind: MemoryKind,
    /// The name of the buffers.
    #[serde(rename = "what")]
    pub name: Cow<'static, str>,
    /// Number of elements of one buffer, as a formula.
    pub formula: Cow<'static, str>,
    /// Number of buffers: one a layer, for example.
    pub count: u64,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Bytes of all `count` buffers.
    pub bytes: u64,
}

impl MemoryBreakdown {
    /// Creates a breakdown. Terms of kinds that forward allocates count as alive when backward begins.
    pub(super) fn new(sizes: String, terms: Vec<Term>) -> Self {
        let of_forward = terms
            .iter()
            .filter(|term| term.kind < MemoryKind::Gradients);
        Self {
            sizes,
            before_backward_bytes: sum_bytes(of_forward),
            terms,
        }
    }

    /// Returns the bytes of all terms of this kind.
    pub fn bytes_of(&self, kind: MemoryKind) -> u64 {
        sum_bytes(self.terms.iter().filter(|term| term.kind == kind))
    }

    /// Returns the peak, in bytes: the sum of all terms.
    pub fn peak_bytes(&self) -> u64 {
        sum_bytes(&self.terms)
    }

    /// Returns the columns of [`report`](Self::report).
    pub fn columns() -> Vec<Column> {
        vec![
            Column::text("holds", "Holds"),
            Column::text("what", "What"),
            Column::count("count", "Count"),
            Column::text("formula", "Elements of each"),
            Column::number("element_bytes", "Bytes an element", "", 0),
            Column::mib("bytes", "Memory"),
        ]
    }

    /// Returns the terms as a table with their formulas, the sum in the last row.
    pub fn report(&self) -> Report {
        let terms = self.terms.iter().map(|term| {
            let (kind, what, formula) = (term.kind.name(), &term.name, &term.formula);
            json!([
                kind,
                what,
                term.count,
                formula,
                term.element_bytes,
                term.bytes
            ])
        });
        let sum = json!(["sum", "", "", "", "", self.peak_bytes()]);
        Report {
            notes: vec![format!("{}.", self.sizes)],
            ..Report::table(Self::columns(), terms.chain([sum]))
        }
    }
}

fn sum_bytes<'a>(terms: impl IntoIterator<Item = &'a Term>) -> u64 {
    let bytes = terms.into_iter().map(|term| term.bytes);
    bytes.fold(0, u64::saturating_add)
}

impl Term {
    /// Creates a term of one buffer. Elements are counted in f64: exact to 2^53, without overflow beyond.
    pub(super) fn new(
        kind: MemoryKind,
        name: impl Into<Cow<'static, str>>,
        formula: impl Into<Cow<'static, str>>,
        elements: f64,
        element_bytes: usize,
    ) -> Self {
        Self {
            kind,
            name: name.into(),
            formula: formula.into(),
            count: 1,
            element_bytes,
            bytes: (elements * element_bytes as f64) as u64, // saturates
        }
    }
}

/// Writes one line: `B 8, T 256: x BTD 0.5 MiB + ... = 12.0 MiB`. A formula that is written in words is printed only in
/// the table.
impl fmt::Display for MemoryBreakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.sizes)?;
        for (i, term) in self.terms.iter().enumerate() {
            let plus = if i == 0 { "" } else { " + " };
            let mib = format_mib(term.bytes);
            match term.formula.is_empty() || term.formula.contains(' ') {
                true => write!(f, "{plus}{} {mib}", term.name)?,
                false => write!(f, "{plus}{} {} {mib}", term.name, term.formula)?,
            }
        }
        write!(f, " = {}", format_mib(self.peak_bytes()))
    }
}
