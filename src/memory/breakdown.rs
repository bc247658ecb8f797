//! A sum of bytes with its terms.

use crate::report::{Column, Report, format_mib};
use serde::Serialize;
use serde_json::json;
use std::borrow::Cow;
use std::fmt;

/// What a term of an [`MemoryBreakdown`] is there for, in the order in which they come to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MemoryKind {
    /// The parameters.
    Weights,
    /// What the optimizer keeps from step to step.
    Optimizer,
    /// What comes from outside: inputs, token ids, tables of positions.
    Inputs,
    /// What forward computes; with a graph, what it keeps for backward (residuals).
    Activations,
    /// Weights in half precision beside those in f32, in an autocast region.
    WeightCasts,
    /// The logits, and what the loss keeps.
    Logits,
    /// The weights' gradients.
    Gradients,
    /// What one op takes for itself, and gradients on their way.
    Scratch,
    /// What belongs to no kind, where memory is measured: taken outside of a step, or too small to be recorded.
    Other,
}

impl MemoryKind {
    /// All of them, in order.
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

    /// As tables name it.
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

/// What is alive at the worst moment of a forward and backward, term by term: the breakdown that is written beside a
/// row that ran out of memory.
///
/// ```
/// use tallow::memory::{AttentionWorkload, Kernels, attention_breakdown};
///
/// let workload = AttentionWorkload { sequence_length: 16_384, ..Default::default() };
/// let breakdown = attention_breakdown(&workload, Kernels::Cpu)?;
/// assert!(breakdown.to_string().contains("probabilities BHT^2 8,192.0 MiB"));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryBreakdown {
    /// The sizes that the terms' letters stand for.
    pub sizes: String,
    /// The terms; their sum is the peak.
    pub parts: Vec<Part>,
    /// The bytes alive when backward begins: inputs and weights, and what forward leaves behind. Some of them are freed
    /// before the worst moment.
    pub before_backward_bytes: u64,
}

/// One term: `count` buffers of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// What it is there for.
    pub kind: MemoryKind,
    /// What it is.
    pub what: Cow<'static, str>,
    /// How many elements one has, in letters.
    pub formula: Cow<'static, str>,
    /// How many there are: one a layer, say.
    pub count: u64,
    /// The size of an element.
    pub element_bytes: usize,
    /// How many bytes all of them have.
    pub bytes: u64,
}

impl MemoryBreakdown {
    /// The sum of `parts`. What is there for forward is taken as alive when backward begins.
    pub(super) fn new(sizes: String, parts: Vec<Part>) -> Self {
        let of_forward = parts
            .iter()
            .filter(|part| part.kind < MemoryKind::Gradients);
        Self {
            sizes,
            before_backward_bytes: sum_bytes(of_forward),
            parts,
        }
    }

    /// The bytes of all terms that are there for this.
    pub fn bytes_of(&self, kind: MemoryKind) -> u64 {
        sum_bytes(self.parts.iter().filter(|part| part.kind == kind))
    }

    /// The most bytes alive at once.
    pub fn peak_bytes(&self) -> u64 {
        sum_bytes(&self.parts)
    }

    /// The terms as a table, the formula beside each line, their sum at the end.
    pub fn report(&self) -> Report {
        let parts = self.parts.iter().map(|part| {
            let (kind, what, formula) = (part.kind.name(), &part.what, &part.formula);
            json!([
                kind,
                what,
                part.count,
                formula,
                part.element_bytes,
                part.bytes
            ])
        });
        let sum = json!(["sum", "", "", "", "", self.peak_bytes()]);
        let columns = vec![
            Column::text("holds", "Holds"),
            Column::text("what", "What"),
            Column::count("count", "Count").minor(2),
            Column::text("formula", "Elements of each").minor(1),
            Column::number("element_bytes", "Bytes an element", "", 0).minor(3),
            Column::mib("bytes", "All"),
        ];
        Report {
            notes: vec![format!("{}.", self.sizes)],
            ..Report::table(columns, parts.chain([sum]))
        }
    }
}

fn sum_bytes<'a>(parts: impl IntoIterator<Item = &'a Part>) -> u64 {
    let bytes = parts.into_iter().map(|part| part.bytes);
    bytes.fold(0, u64::saturating_add)
}

impl Part {
    /// One buffer. Elements are counted in f64: exact to 2^53, and no overflow beyond.
    pub(super) fn new(
        kind: MemoryKind,
        what: impl Into<Cow<'static, str>>,
        formula: impl Into<Cow<'static, str>>,
        elements: f64,
        element_bytes: usize,
    ) -> Self {
        Self {
            kind,
            what: what.into(),
            formula: formula.into(),
            count: 1,
            element_bytes,
            bytes: (elements * element_bytes as f64) as u64, // saturates
        }
    }
}

/// `B 8, T 256: x BTD 0.5 MiB + ... = 12.0 MiB`.
impl fmt::Display for MemoryBreakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.sizes)?;
        for (i, part) in self.parts.iter().enumerate() {
            let plus = if i == 0 { "" } else { " + " };
            let mib = format_mib(part.bytes);
            write!(f, "{plus}{} {} {mib}", part.what, part.formula)?;
        }
        write!(f, " = {}", format_mib(self.peak_bytes()))
    }
}

/// The smallest power of two whose breakdown wants more than `available_bytes`, with the breakdown: the first
/// configuration that does not fit. `None` if one before it has no breakdown.
pub fn smallest_beyond(
    available_bytes: u64,
    breakdown: impl Fn(usize) -> Option<MemoryBreakdown>,
) -> Option<(usize, MemoryBreakdown)> {
    (0..usize::BITS)
        .map(|power| 1 << power)
        .map_while(|size| Some((size, breakdown(size)?)))
        .find(|(_, breakdown)| breakdown.peak_bytes() > available_bytes)
}
