//! Letters of the dimensions of traced values (`B`, `T`, `D`), found with a second trace of other sizes.
//!
//! In the second trace each size is multiplied or divided by a prime of its own. The primes by which a dimension grows
//! tell which sizes are its factors. Letters therefore follow from dependencies, never from numbers that happen to be
//! equal.

use super::lifetimes::{Buffer, BufferName, Formula, Lifetimes};
use super::{MemoryBreakdown, MemoryKind, Term};
use crate::graph::{Graph, Source, TraceEvent, ValueId};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write;

pub(super) struct Letter {
    pub name: &'static str,
    pub size: usize,
    /// The factors of the size in the other trace: primes and their powers.
    pub by: Vec<(usize, i32)>,
}

/// Returns another head width and its factor: half, as kernels limit the width, unless RoPE could not pair the
/// dimensions.
pub(super) fn other_head_dim(head_dim: usize) -> (usize, (usize, i32)) {
    match head_dim.is_multiple_of(4) {
        true => (head_dim / 2, (2, -1)),
        false => (head_dim.saturating_mul(2), (2, 1)),
    }
}

impl Letter {
    pub fn new(name: &'static str, size: usize, by: &[(usize, i32)]) -> Self {
        Self {
            name,
            size,
            by: by.to_vec(),
        }
    }
}

#[derive(Default)]
pub(super) struct Letters {
    /// Letters that are products of others come first: D before H and Dh.
    letters: Vec<Letter>,
    other: Option<Graph>,
}

impl Letters {
    /// Creates the letters of `graph`. Without another trace, or if it has other ops (head widths without a kernel),
    /// formulas are plain numbers.
    pub fn new(graph: &Graph, mut letters: Vec<Letter>, other: Option<Graph>) -> Self {
        letters.sort_by_key(|letter| Reverse(letter.by.len()));
        let ops = |graph: &Graph| graph.nodes().map(|node| node.op).collect::<Vec<_>>();
        let is_same =
            |other: &Graph| other.values.len() == graph.values.len() && ops(other) == ops(graph);
        Self {
            letters,
            other: other.filter(is_same),
        }
    }

    /// Returns the number of elements of a value of `graph` as a formula: `BHT^2`, or `4 x 256` without letters.
    pub fn formula(&self, graph: &Graph, id: ValueId) -> String {
        let shape = &graph.value(id).shape;
        if self.letters.is_empty() && !shape.is_empty() {
            let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
            return dims.join(" x ");
        }
        let other = self.other.as_ref().map(|other| &other.value(id).shape);
        let mut number = 1.0;
        let mut found: Vec<(&str, i32)> = Vec::new();
        for (place, dim) in shape.iter().enumerate() {
            number *= *dim as f64;
            let Some(mut other) = other.and_then(|other| other.get(place)).copied() else {
                continue;
            };
            let mut dim = *dim;
            for letter in &self.letters {
                while let Some(rest) = divided_by(letter, dim, other) {
                    (dim, other) = rest;
                    number /= letter.size as f64;
                    match found.iter_mut().find(|(name, _)| *name == letter.name) {
                        Some((_, power)) => *power += 1,
                        None => found.push((letter.name, 1)),
                    }
                }
            }
        }
        let mut text = String::new();
        for (name, power) in found {
            let _ = match power {
                1 => write!(text, "{name}"),
                _ => write!(text, "{name}^{power}"),
            }; // writing to a string cannot fail
        }
        match number == 1.0 && !text.is_empty() {
            true => text,
            false => format!("{number}{text}"),
        }
    }
}

/// Divides a dimension, here and in the other trace, by a letter; `None` if the letter is not a factor of it.
fn divided_by(letter: &Letter, dim: usize, other: usize) -> Option<(usize, usize)> {
    let mut grown = other;
    let mut here = dim;
    for (prime, power) in &letter.by {
        let power_of = |mut size: usize| {
            let mut power = 0;
            while size > 0 && size.is_multiple_of(*prime) {
                (size, power) = (size / prime, power + 1);
            }
            power
        };
        let growth = power_of(grown) - power_of(here);
        if growth * power.signum() < power.abs() {
            return None;
        }
        match *power > 0 {
            true => grown /= prime.pow(power.unsigned_abs()),
            false => here /= prime.pow(power.unsigned_abs()),
        }
    }
    Some((here, grown))
}

type TermKey = (MemoryKind, Cow<'static, str>, Cow<'static, str>, usize, u64);

impl Letters {
    /// Returns the peak of a pass as terms: equal buffers are one term.
    pub fn breakdown(
        &self,
        graph: &Graph,
        sizes: String,
        lifetimes: &Lifetimes,
    ) -> MemoryBreakdown {
        let after_forward_bytes: f64 = lifetimes.after_forward.iter().map(Buffer::bytes).sum();
        let mut places: HashMap<TermKey, usize> = HashMap::new();
        let mut terms: Vec<(Term, f64)> = Vec::new();
        for buffer in &lifetimes.at_peak {
            let what = named(graph, buffer);
            let formula: Cow<'static, str> = match buffer.formula {
                Formula::Letters(letters) => letters.into(),
                Formula::Of(id) => self.formula(graph, id).into(),
            };
            let (kind, elements, width) = (buffer.kind, buffer.elements, buffer.width);
            let term = (
                kind,
                what.clone(),
                formula.clone(),
                width,
                elements.to_bits(),
            );
            let place = *places.entry(term).or_insert(terms.len());
            match terms.get_mut(place) {
                Some((term, _)) => term.count += 1,
                None => terms.push((
                    Term::new(kind, what, formula, elements, width),
                    buffer.bytes(),
                )),
            }
        }
        terms.sort_by_key(|(term, _)| term.kind); // stable: within a kind, in order of allocation
        let parts = terms.into_iter().map(|(term, bytes)| Term {
            bytes: (term.count as f64 * bytes) as u64, // saturates
            ..term
        });
        MemoryBreakdown {
            before_backward_bytes: after_forward_bytes as u64, // saturates
            ..MemoryBreakdown::new(sizes, parts.collect())
        }
    }
}

fn named(graph: &Graph, buffer: &Buffer) -> Cow<'static, str> {
    match buffer.name {
        BufferName::Named(name) => name.into(),
        BufferName::Weight(id) => {
            let name = match &graph.value(id).source {
                Source::Weight(name) if !name.is_empty() => without_numbers(name),
                _ => "a weight".into(),
            };
            match buffer.kind {
                MemoryKind::Gradients => format!("gradient of {name}").into(),
                _ => name.into(),
            }
        }
        BufferName::Output(event) => match graph.events.get(event) {
            Some(TraceEvent::Node(node)) if node.path.contains('/') => {
                let parts = node.path.split('/').map(without_numbers);
                let parts: Vec<String> = parts.collect();
                parts.join("/").into()
            }
            Some(TraceEvent::Node(node)) => match graph.outputs.first() {
                Some(output) if output.value == node.output => "output".into(),
                _ => format!("output of {}", node.op).into(),
            },
            _ => "a value".into(),
        },
    }
}

/// Removes numbers: `layers.3` becomes `layers`, so that equal buffers of all layers have one name.
fn without_numbers(name: &str) -> String {
    let parts = name.split('.');
    let named = parts.filter(|part| part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()));
    named.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Target, input, trace};
    use crate::ops;
    use candle_core::DType;

    /// B and H have the same size, and D is H Dh.
    #[test]
    fn sizes_that_are_equal_have_names_of_their_own() {
        let traced = |b: usize, t: usize, h: usize, dh: usize| {
            trace(Target::Cpu, || {
                let x = input("x", (b, t, h * dh), DType::F32)?;
                let heads = ops::split_heads(&x, h)?; // (B, H, T, Dh)
                let scores = ops::matmul_transposed(&heads, &heads)?; // (B, H, T, T)
                ops::concat(&[&scores, &scores], 3)
            })
        };
        let graph = traced(4, 6, 4, 4).unwrap();
        let (other_dim, by) = other_head_dim(4);
        let others = traced(4 * 3, 6 * 5, 4 * 13, other_dim).ok();
        let letters = vec![
            Letter::new("B", 4, &[(3, 1)]),
            Letter::new("H", 4, &[(13, 1)]),
            Letter::new("T", 6, &[(5, 1)]),
            Letter::new("D", 16, &[(13, 1), by]),
            Letter::new("Dh", 4, &[by]),
        ];
        let letters = Letters::new(&graph, letters, others);
        let formulas = (0..graph.values.len()).map(|i| letters.formula(&graph, ValueId(i)));
        let formulas: Vec<String> = formulas.collect();
        assert_eq!(formulas, ["BTD", "BHTDh", "BHT^2", "2BHT^2"]);
        let numbers = Letters::default();
        assert_eq!(numbers.formula(&graph, ValueId(0)), "4 x 6 x 16");
    }

    #[test]
    fn what_is_alike_has_one_name() {
        assert_eq!(
            without_numbers("layers.12.attn.weight"),
            "layers.attn.weight"
        );
        assert_eq!(without_numbers("w1, w3"), "w1, w3");
    }
}
