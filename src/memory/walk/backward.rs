//! Backward, as candle runs it.
//!
//! The graph stays whole until the end, but for segments with one of their own. Ops are taken in the reverse order of forward; each has its output's gradient,
//! makes its inputs' gradients, and these are added, one after another, to what is there already: to zeros at first.

use super::ledger::Key;
use super::{Backward, Entry, Node, Value, Walk};
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
        match entry.backward {
            Backward::HandsOn => {
                for input in &entry.inputs {
                    self.add_to(input, gradients);
                }
            }
            Backward::Together => {
                let made = self.with_scratch(entry.scratch, |walk| walk.made(entry));
                if let Some(key) = entry.lets_go {
                    self.ledger.give_back(key);
                }
                for (input, key) in entry.inputs.iter().zip(made) {
                    self.add_to(input, gradients);
                    self.ledger.give_back(key);
                }
            }
        }
        if let Some(key) = incoming {
            self.ledger.give_back(key);
        }
    }

    /// The gradients of all inputs, which an op makes before any is added.
    fn made(&mut self, entry: &Entry) -> Vec<Key> {
        let packing = entry.packing.iter().copied().chain(repeat(None));
        let gradients = entry.inputs.iter().zip(packing).map(|(input, packing)| {
            let what = "gradients as an op makes them";
            let key = self.take(Holds::Scratch, what, input.size, input.width);
            self.with_scratch(packing, |_| ());
            key
        });
        gradients.collect()
    }

    /// The sum of a new gradient and what was there takes the place of that.
    pub(super) fn add_to(&mut self, input: &Value, gradients: &mut Gradients) {
        let before = gradients.remove(&input.id);
        let what = "zeros that a gradient is added to";
        let (size, width) = (input.size, input.width);
        let before = before.unwrap_or_else(|| self.take(Holds::Scratch, what, size, width));
        let sum = self.sum_of(input);
        self.ledger.give_back(before);
        gradients.insert(input.id, sum);
    }

    /// Room for a sum of gradients; a weight's stays.
    fn sum_of(&mut self, input: &Value) -> Key {
        let (size, width) = (input.size, input.width);
        match input.is_weight {
            true => self.take_counted(true, Holds::Gradients, input.what, size, width),
            false => self.take(Holds::Scratch, "gradients between ops", size, width),
        }
    }
}
