//! Backward, as candle runs it.
//!
//! The graph stays whole until the end, but for segments with one of their own. Ops are taken in the reverse order of forward; each has its output's gradient,
//! makes its inputs' gradients, and these are added, one after another, to what is there already: to zeros at first.

use super::ledger::Key;
use super::{Entry, Node, Value, Walk};
use crate::memory::Holds;
use std::collections::HashMap;
use std::iter::repeat;

/// Gradients that are there, by their tensor.
pub(super) type Gradients = HashMap<usize, Key>;

impl Walk {
    pub(super) fn backward(&mut self) {
        let tape = std::mem::take(&mut self.tape);
        self.backward_through(tape, &mut Gradients::new());
    }

    pub(super) fn backward_through(&mut self, tape: Vec<Node>, gradients: &mut Gradients) {
        for node in tape.into_iter().rev() {
            match node {
                Node::Op(entry) => self.backward_of(&entry, gradients),
                Node::Segment(segment) => self.backward_of_segment(*segment, gradients),
            }
        }
    }

    fn backward_of(&mut self, entry: &Entry, gradients: &mut Gradients) {
        self.count = entry.count;
        let incoming = gradients.remove(&entry.output); // none at the loss: a scalar
        let made = match entry.is_sum {
            true => entry.inputs.iter().map(|_| None).collect(),
            false => self.with_scratch(entry.scratch, |walk| walk.made(entry)),
        };
        for (input, made) in entry.inputs.iter().zip(made) {
            self.add_to(input, gradients);
            if let Some(key) = made {
                self.ledger.give_back(key);
            }
        }
        if let Some(key) = incoming {
            self.ledger.give_back(key);
        }
    }

    /// The gradients of all inputs, which an op makes before any is added.
    fn made(&mut self, entry: &Entry) -> Vec<Option<Key>> {
        let packing = entry.packing.iter().copied().chain(repeat(None));
        let gradients = entry.inputs.iter().zip(packing).map(|(input, packing)| {
            let what = "gradients as an op makes them";
            let key = self.take(Holds::Scratch, what, input.size, input.width);
            self.with_scratch(packing, |_| ());
            Some(key)
        });
        gradients.collect()
    }

    /// The sum of a new gradient and what was there takes the place of that.
    pub(super) fn add_to(&mut self, input: &Value, gradients: &mut Gradients) {
        let (size, width) = (input.size, input.width);
        let before = gradients.remove(&input.id).unwrap_or_else(|| {
            let what = "zeros that a gradient is added to";
            self.take(Holds::Scratch, what, size, width)
        });
        let sum = match input.is_weight {
            true => self.take_counted(true, Holds::Gradients, input.what, size, width),
            false => self.take(Holds::Scratch, "gradients between ops", size, width),
        };
        self.ledger.give_back(before);
        gradients.insert(input.id, sum);
    }
}
