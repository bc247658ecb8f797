//! Gradients that are there, as [`backward`](crate::backward()) has them: the first as it is made, later ones added.

use super::Replay;
use super::ledger::Key;
use crate::graph::{ValueId, ValueRef, View};
use crate::memory::MemoryKind;
use crate::ops::strided::put_back;
use std::collections::BTreeMap;

/// By their values.
#[derive(Default)]
pub(super) struct Gradients(BTreeMap<ValueId, Gradient>);

/// One value's.
#[derive(Clone, Copy)]
pub(super) struct Gradient {
    pub key: Key,
    /// Whether it alone has its buffer, and can be added to.
    pub is_own: bool,
}

impl Gradients {
    pub fn take(&mut self, value: ValueId) -> Option<Gradient> {
        self.0.remove(&value)
    }

    pub fn insert(&mut self, value: ValueId, gradient: Gradient) {
        self.0.insert(value, gradient);
    }

    pub fn has(&self, value: ValueId) -> bool {
        self.0.contains_key(&value)
    }

    pub fn into_values(self) -> impl Iterator<Item = (ValueId, Gradient)> {
        self.0.into_iter()
    }
}

impl Replay<'_> {
    /// One more tensor on the buffer of `key`.
    pub(super) fn share(&mut self, key: Key) -> Gradient {
        *self.sharing.entry(key).or_insert(0) += 1;
        Gradient { key, is_own: false }
    }

    /// One tensor less.
    pub(super) fn release(&mut self, key: Key) {
        match self.sharing.get_mut(&key).filter(|others| **others > 0) {
            Some(others) => *others -= 1,
            None => self.ledger.give_back(key),
        }
    }

    /// Adds `gradient` to that of the value that `input` shows.
    pub(super) fn add_to(
        &mut self,
        event: usize,
        input: &ValueRef,
        gradient: Gradient,
        gradients: &mut Gradients,
    ) {
        let new = match &input.view {
            None => gradient,
            Some(view) => self.of_whole(input, view, gradient),
        };
        let sum = match gradients.take(input.value) {
            None => new,
            Some(before) => match (before.is_own, new.is_own) {
                (true, _) => {
                    self.release(new.key);
                    before
                }
                (false, true) => {
                    self.release(before.key);
                    new
                }
                (false, false) => {
                    let sum = self.take(MemoryKind::Scratch, BETWEEN, &whole(input), 1.0);
                    self.release(before.key);
                    self.release(new.key);
                    Gradient {
                        key: sum,
                        is_own: true,
                    }
                }
            },
        };
        if self.is_weight(input.value) {
            let buffer = self.weight_gradient(event, input.value);
            self.ledger.rename(sum.key, buffer);
        }
        gradients.insert(input.value, sum);
    }

    /// The gradient of a value from that of a view of it: as it is, in another order, or among zeros.
    fn of_whole(&mut self, input: &ValueRef, view: &View, gradient: Gradient) -> Gradient {
        let value = self.graph.value(input.value);
        let order = put_back(view, &value.shape);
        if order
            .as_ref()
            .is_some_and(|order| is_as_it_lies(view, order))
        {
            return gradient;
        }
        // Among zeros, half precision is summed in f32 and then rounded.
        let is_summed_wide = order.is_none() && value.dtype.size_in_bytes() < 4;
        let sums = is_summed_wide.then(|| self.take_wide(&whole(input)));
        let key = self.take(MemoryKind::Scratch, BETWEEN, &whole(input), 1.0);
        if let Some(sums) = sums {
            self.ledger.give_back(sums);
        }
        self.release(gradient.key);
        Gradient { key, is_own: true }
    }
}

/// What a gradient is called on its way.
pub(super) const BETWEEN: &str = "gradients between ops";

fn whole(operand: &ValueRef) -> ValueRef {
    ValueRef {
        view: None,
        ..*operand
    }
}

/// Whether an order of a view's dimensions is theirs; one of 1 has no place.
fn is_as_it_lies(view: &View, order: &[usize]) -> bool {
    order
        .iter()
        .filter(|dim| view.shape[**dim] != 1)
        .is_sorted()
}
