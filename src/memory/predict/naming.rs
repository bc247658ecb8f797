//! Buffers as the terms of a breakdown: what each is, and how many elements it has, in words and letters.

use super::replay::{Buffer, Formula, Outcome, What};
use super::{MemoryBreakdown, MemoryKind};
use crate::graph::{Graph, Source, TraceEvent};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;

/// What the names are taken from.
pub(super) struct Naming<'a> {
    pub graph: &'a Graph,
    /// Sizes with a letter, those that are preferred first. Others are written as numbers.
    pub letters: &'a [(&'static str, usize)],
}

/// What makes two buffers one term.
type Term = (MemoryKind, Cow<'static, str>, Cow<'static, str>, usize, u64);

impl Naming<'_> {
    /// What came of a replay as terms: buffers that are alike as one.
    pub fn breakdown(&self, sizes: String, outcome: &Outcome) -> MemoryBreakdown {
        MemoryBreakdown {
            before_backward_bytes: outcome.after_forward_bytes as u64, // saturates
            ..self.of(sizes, &outcome.at_peak)
        }
    }

    /// As [`breakdown`](Self::breakdown), of one moment.
    pub fn of(&self, sizes: String, buffers: &[Buffer]) -> MemoryBreakdown {
        let mut places: HashMap<Term, usize> = HashMap::new();
        let mut terms: Vec<(Term, f64, f64)> = Vec::new();
        for buffer in buffers {
            let (what, formula) = (self.what(buffer.what), self.formula(buffer.formula));
            let elements = buffer.elements;
            let term = (buffer.kind, what, formula, buffer.width, elements.to_bits());
            let place = *places.entry(term.clone()).or_insert(terms.len());
            match terms.get_mut(place) {
                Some((_, _, count)) => *count += buffer.count,
                None => terms.push((term, elements, buffer.count)),
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
                Source::Weight(name) if !name.is_empty() => without_numbers(name, '.').into(),
                _ => "a weight".into(),
            },
            What::Output(event) => match self.graph.events.get(event) {
                Some(TraceEvent::Node(node)) => {
                    let parts = node.path.split('/').map(|part| without_numbers(part, '.'));
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
            Formula::Of(id) => in_letters(&self.graph.value(id).shape, self.letters).into(),
        }
    }
}

/// `layers` of `layers.3`: what is alike has one name.
fn without_numbers(name: &str, separator: char) -> String {
    let parts = name.split(separator);
    let named = parts.filter(|part| part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()));
    named.collect::<Vec<_>>().join(&separator.to_string())
}

/// A shape's elements: `BHT^2` where all dimensions have letters, `4 x 256` where none has. Of sizes that are equal,
/// each letter is taken once before any is taken twice.
fn in_letters(shape: &[usize], letters: &[(&'static str, usize)]) -> String {
    if letters.is_empty() && !shape.is_empty() {
        let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
        return dims.join(" x ");
    }
    let mut number = 1.0;
    let mut found: Vec<(&str, usize)> = Vec::new();
    for dim in shape {
        let mut fitting = letters.iter().filter(|(_, size)| size == dim);
        let is_new = |letter: &&(&'static str, usize)| found.iter().all(|(l, _)| *l != letter.0);
        match fitting.clone().find(is_new).or(fitting.next()) {
            Some((letter, _)) => match found.iter_mut().find(|(l, _)| l == letter) {
                Some((_, power)) => *power += 1,
                None => found.push((letter, 1)),
            },
            None => number *= *dim as f64,
        }
    }
    let mut text = match number == 1.0 && !found.is_empty() {
        true => String::new(),
        false => format!("{number}"),
    };
    for (letter, power) in found {
        let _ = match power {
            1 => write!(text, "{letter}"),
            _ => write!(text, "{letter}^{power}"),
        }; // a string takes all that is written
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_in_letters() {
        let letters = [("BT", 24), ("B", 4), ("T", 6), ("D", 8), ("H", 4)];
        for (shape, wanted) in [
            (&[4, 6, 8][..], "BTD"),
            (&[4, 4, 6, 6], "BHT^2"),
            (&[24, 2], "2BT"),
            (&[2, 4, 4, 6], "2BHT"),
            (&[], "1"),
            (&[3], "3"),
        ] {
            assert_eq!(in_letters(shape, &letters), wanted);
        }
        assert_eq!(in_letters(&[4, 6], &[]), "4 x 6");
        assert_eq!(in_letters(&[], &[]), "1");
    }

    #[test]
    fn what_is_alike_has_one_name() {
        assert_eq!(
            without_numbers("layers.12.attn.weight", '.'),
            "layers.attn.weight"
        );
        assert_eq!(without_numbers("w1, w3", '.'), "w1, w3");
    }
}
