//! Masks and biases that are tensors, read tile by tile.

use crate::kernels::attention::{PerScore, PerScoreOfHead};
use crate::kernels::cpu::{Real, simd};
use std::ops::Range;

/// The terms that a call adds to its scores (B, H, Tq, Tk), and the scores that it hides.
#[derive(Clone, Copy, Debug)]
pub struct Masks<'a, T> {
    /// 0 for a hidden pair.
    pub visible: Option<PerScore<'a, u8>>,
    /// Added to the scaled and capped scores; -inf hides a pair.
    pub bias: Option<PerScore<'a, T>>,
}

/// The masks of one head.
#[derive(Clone, Copy)]
pub(super) struct HeadMasks<'a, T> {
    visible: Option<PerScoreOfHead<'a, u8>>,
    bias: Option<PerScoreOfHead<'a, T>>,
}

/// The result of reading the masks of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MaskedTile {
    /// Nothing is hidden or added.
    Plain,
    /// Terms were written: what is added to each score, -inf for a hidden pair.
    Terms,
    /// All pairs are hidden.
    Hidden,
}

impl<T> Masks<'_, T> {
    /// Masks that hide and add nothing.
    pub const NONE: Self = Self {
        visible: None,
        bias: None,
    };
}

impl<'a, T: Real> Masks<'a, T> {
    /// Returns whether nothing is hidden or added.
    pub fn is_none(&self) -> bool {
        self.visible.is_none() && self.bias.is_none()
    }

    pub(super) fn of(&self, batch: usize, head: usize) -> HeadMasks<'a, T> {
        HeadMasks {
            visible: self.visible.map(|visible| visible.of(batch, head)),
            bias: self.bias.map(|bias| bias.of(batch, head)),
        }
    }
}

impl<T: Real> HeadMasks<'_, T> {
    pub(super) fn is_none(&self) -> bool {
        self.visible.is_none() && self.bias.is_none()
    }

    /// Reads a tile. Writes its terms, with these strides of queries and keys, unless nothing or everything is hidden.
    pub(super) fn read(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        terms: &mut [T],
        [by_query, by_key]: [usize; 2],
    ) -> MaskedTile {
        let (any_hidden, any_visible) = self.visibility(queries, keys);
        match (any_visible, any_hidden, &self.bias) {
            (false, _, _) => return MaskedTile::Hidden,
            (true, false, None) => return MaskedTile::Plain,
            _ => {}
        }
        let mut is_seen = false;
        for (i, query) in queries.clone().enumerate() {
            let terms = terms[i * by_query..].iter_mut().step_by(by_key);
            for (key, term) in keys.clone().zip(terms) {
                let hidden = any_hidden && self.visible.is_some_and(|x| x.at(query, key) == 0);
                *term = match &self.bias {
                    _ if hidden => T::NEG_INFINITY,
                    Some(bias) => bias.at(query, key),
                    None => T::ZERO,
                };
                is_seen |= *term != T::NEG_INFINITY;
            }
        }
        match is_seen {
            true => MaskedTile::Terms,
            false => MaskedTile::Hidden,
        }
    }

    /// Returns whether the boolean mask hides any pair of a tile, and whether it shows any.
    fn visibility(&self, queries: &Range<usize>, keys: &Range<usize>) -> (bool, bool) {
        let Some(visible) = &self.visible else {
            return (false, true);
        };
        let (mut any_hidden, mut any_visible) = (false, false);
        visible.each_row(queries, keys, |row| {
            any_hidden |= row.contains(&0);
            any_visible |= row.iter().any(|x| *x != 0);
            !(any_hidden && any_visible)
        });
        (any_hidden, any_visible)
    }
}

/// Adds the terms of a tile to its scores. A hidden score becomes -inf, even if it is NaN.
pub(super) fn add_terms<T: Real>(scores: &mut [T], terms: &[T]) {
    simd::vectorized(
        #[inline(always)]
        || {
            for (score, term) in scores.iter_mut().zip(terms) {
                *score = match *term == T::NEG_INFINITY {
                    true => T::NEG_INFINITY,
                    false => *score + *term,
                };
            }
        },
    );
}

/// Returns the smallest range of `keys` that contains those whose terms are not -inf.
pub(super) fn visible_hull<T: Real>(terms: &[T], mut keys: Range<usize>) -> Range<usize> {
    let is_hidden = |key: usize| terms[key] == T::NEG_INFINITY;
    while !keys.is_empty() && is_hidden(keys.start) {
        keys.start += 1;
    }
    while !keys.is_empty() && is_hidden(keys.end - 1) {
        keys.end -= 1;
    }
    keys
}

/// Returns the ranges of `keys` whose terms are not -inf, in order.
pub(super) fn visible_runs<T: Real>(terms: &[T], keys: Range<usize>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for key in keys.filter(|key| terms[*key] != T::NEG_INFINITY) {
        match runs.last_mut() {
            Some(run) if run.end == key => run.end += 1,
            _ => runs.push(key..key + 1),
        }
    }
    runs
}
