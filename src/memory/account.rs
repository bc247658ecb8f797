//! A sum of bytes with its terms.

use crate::report::format_mib;
use serde::Serialize;
use std::fmt;

/// What is alive at the worst moment of a forward and backward, term by term: the account that is written beside a row
/// that ran out of memory.
///
/// ```
/// use tallow::memory::{AttentionWorkload, attention_account};
///
/// let account = attention_account(&AttentionWorkload { sequence_length: 16_384, ..Default::default() });
/// assert!(account.to_string().contains("probabilities BHT^2 8,192.0 MiB"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Account {
    /// The sizes that the terms' letters stand for.
    pub sizes: String,
    /// The terms; their sum is the peak.
    pub parts: Vec<Part>,
}

/// One term.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// What it holds.
    pub what: &'static str,
    /// How many elements, in letters.
    pub formula: &'static str,
    /// How many bytes.
    pub bytes: u64,
    /// Whether it is alive before backward begins already.
    pub before_backward: bool,
}

impl Account {
    pub(super) fn new(sizes: String) -> Self {
        let parts = Vec::new();
        Self { sizes, parts }
    }

    /// Adds a term that forward leaves behind. Elements are counted in f64: exact to 2^53, and no overflow beyond.
    pub(super) fn kept(
        self,
        what: &'static str,
        formula: &'static str,
        elements: f64,
        width: usize,
    ) -> Self {
        self.with(what, formula, elements, width, true)
    }

    /// Adds a term of backward's worst moment.
    pub(super) fn then(
        self,
        what: &'static str,
        formula: &'static str,
        elements: f64,
        width: usize,
    ) -> Self {
        self.with(what, formula, elements, width, false)
    }

    /// Drops the terms of backward.
    pub(super) fn without_backward(mut self) -> Self {
        self.parts.retain(|part| part.before_backward);
        self
    }

    fn with(
        mut self,
        what: &'static str,
        formula: &'static str,
        elements: f64,
        width: usize,
        before_backward: bool,
    ) -> Self {
        self.parts.push(Part {
            what,
            formula,
            bytes: (elements * width as f64) as u64, // saturates
            before_backward,
        });
        self
    }

    /// The bytes alive when backward begins: inputs and weights, and what forward leaves behind.
    pub fn before_backward_bytes(&self) -> u64 {
        let kept = self.parts.iter().filter(|part| part.before_backward);
        kept.fold(0, |sum, part| sum.saturating_add(part.bytes))
    }

    /// The most bytes alive at once.
    pub fn peak_bytes(&self) -> u64 {
        let parts = self.parts.iter();
        parts.fold(0, |sum, part| sum.saturating_add(part.bytes))
    }
}

/// `B 8, T 256: x BTD 0.5 MiB + ... = 12.0 MiB`.
impl fmt::Display for Account {
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

/// The smallest power of two whose account wants more than `available_bytes`, with the account: the first
/// configuration that does not fit.
pub fn smallest_beyond(
    available_bytes: u64,
    account: impl Fn(usize) -> Account,
) -> Option<(usize, Account)> {
    (0..usize::BITS)
        .map(|power| 1 << power)
        .map(|size| (size, account(size)))
        .find(|(_, account)| account.peak_bytes() > available_bytes)
}
