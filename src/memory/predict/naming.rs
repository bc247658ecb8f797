//! Buffers as the terms of a breakdown: what each is, and how many elements it has, in words and letters.

use super::letters::Letters;
use super::lifetimes::{Buffer, Formula, Lifetimes, What};
use super::{MemoryBreakdown, MemoryKind};
use crate::graph::{Graph, Source, TraceEvent};
use std::borrow::Cow;
use std::collections::HashMap;

/// What the names are taken from.
pub(super) struct Naming<'a> {
    pub graph: &'a Graph,
    pub letters: &'a Letters,
}

/// What makes two buffers one term.
type Term = (MemoryKind, Cow<'static, str>, Cow<'static, str>, usize, u64);

impl Naming<'_> {
    /// The peak of a pass as terms: buffers that are alike as one.
    pub fn breakdown(&self, sizes: String, lifetimes: &Lifetimes) -> MemoryBreakdown {
        let after_forward_bytes: f64 = lifetimes.after_forward.iter().map(Buffer::bytes).sum();
        MemoryBreakdown {
            before_backward_bytes: after_forward_bytes as u64, // saturates
            ..self.of(sizes, &lifetimes.at_peak)
        }
    }

    /// As [`breakdown`](Self::breakdown), of what is alive at one moment.
    pub fn of(&self, sizes: String, buffers: &[Buffer]) -> MemoryBreakdown {
        let mut places: HashMap<Term, usize> = HashMap::new();
        let mut terms: Vec<(Term, f64, f64)> = Vec::new();
        for buffer in buffers {
            let (what, formula) = (self.what(buffer.what), self.formula(buffer.formula));
            let elements = buffer.elements;
            let term = (buffer.kind, what, formula, buffer.width, elements.to_bits());
            let place = *places.entry(term.clone()).or_insert(terms.len());
            match terms.get_mut(place) {
                Some((_, _, count)) => *count += 1.0,
                None => terms.push((term, elements, 1.0)),
            }
        }
        terms.sort_by_key(|((kind, ..), ..)| *kind); // stable: within each, as they came to be
        let terms = terms.into_iter();
        terms.fold(
            MemoryBreakdown::new(sizes),
            |breakdown, (term, elements, count)| {
                let (kind, what, formula, width, _) = term;
                breakdown.with_many(count, kind, what, formula, elements, width)
            },
        )
    }

    fn what(&self, what: What) -> Cow<'static, str> {
        match what {
            What::Named(name) => name.into(),
            What::Weight(id) => match &self.graph.value(id).source {
                Source::Weight(name) if !name.is_empty() => without_numbers(name).into(),
                _ => "a weight".into(),
            },
            What::Output(event) => match self.graph.events.get(event) {
                Some(TraceEvent::Node(node)) => {
                    let parts = node.path.split('/').map(without_numbers);
                    let parts: Vec<String> = parts.collect();
                    parts.join("/").into()
                }
                _ => "a value".into(),
            },
        }
    }

    fn formula(&self, formula: Formula) -> Cow<'static, str> {
        match formula {
            Formula::Letters(letters) => letters.into(),
            Formula::Of(id) => self.letters.formula(self.graph, id).into(),
        }
    }
}

/// `layers` of `layers.3`: what is alike has one name.
fn without_numbers(name: &str) -> String {
    let parts = name.split('.');
    let named = parts.filter(|part| part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()));
    named.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_alike_has_one_name() {
        assert_eq!(
            without_numbers("layers.12.attn.weight"),
            "layers.attn.weight"
        );
        assert_eq!(without_numbers("w1, w3"), "w1, w3");
    }
}
