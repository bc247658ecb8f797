//! A column of a table with its cells, and how wide columns are side by side.

use super::column::NOT_AVAILABLE;
use super::wrap::one_line;
use super::{Column, Fields};

/// Spaces between columns.
pub(super) const GAP: usize = 2;

/// A column with its cells.
pub(super) struct Strip<'a> {
    pub column: &'a Column,
    pub cells: Vec<String>,
    pub right: bool,
}

impl<'a> Strip<'a> {
    pub fn new(column: &'a Column, rows: &[Fields]) -> Self {
        let values = || rows.iter().map(|row| row.get(&column.key));
        Self {
            column,
            cells: values()
                .map(|value| one_line(&column.cell(value)))
                .collect(),
            right: column.aligns_right(values().flatten()),
        }
    }

    /// Whether it holds names and not quantities.
    pub fn is_of_names(&self) -> bool {
        self.column.decimals.is_none()
    }

    pub fn agrees(&self) -> bool {
        self.cells.windows(2).all(|pair| pair[0] == pair[1])
    }

    pub fn is_empty(&self) -> bool {
        self.cells.iter().all(|cell| cell == NOT_AVAILABLE)
    }
}

pub(super) fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

/// Neighbours under one heading, by their first and the one after their last; a column under none is alone.
pub(super) fn spans(strips: &[Strip<'_>]) -> Vec<(usize, usize)> {
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for (i, strip) in strips.iter().enumerate() {
        let under = &strip.column.under;
        match spans.last_mut() {
            Some((first, end)) if !under.is_empty() && strips[*first].column.under == *under => {
                *end = i + 1;
            }
            _ => spans.push((i, i + 1)),
        }
    }
    spans
}

/// The heading over a span, with the unit if its columns have only one.
pub(super) fn over(strips: &[Strip<'_>]) -> String {
    let under = &strips[0].column.under;
    match shared_unit(strips) {
        Some(unit) => format!("{under} ({unit})"),
        None => under.clone(),
    }
}

/// The unit of every column under one heading that has a unit.
fn shared_unit<'s>(strips: &'s [Strip<'_>]) -> Option<&'s str> {
    let mut units = strips.iter().map(|s| s.column.unit.as_str());
    let mut units = units.by_ref().filter(|unit| !unit.is_empty());
    let first = units.next()?;
    let is_shared = !strips[0].column.under.is_empty() && units.all(|unit| unit == first);
    is_shared.then_some(first)
}

/// What stands over each column, below the headings of groups.
pub(super) fn headings(strips: &[Strip<'_>]) -> Vec<String> {
    let spans = spans(strips).into_iter();
    let headings = spans.flat_map(|(first, end)| {
        let span = &strips[first..end];
        let has_unit_over = shared_unit(span).is_some();
        span.iter().map(move |strip| match has_unit_over {
            true => strip.column.title.clone(),
            false => strip.column.own_heading(),
        })
    });
    headings.collect()
}

pub(super) fn widths(strips: &[Strip<'_>]) -> Vec<usize> {
    let mut widths: Vec<usize> = strips
        .iter()
        .zip(headings(strips))
        .map(|(strip, heading)| {
            let texts = strip.cells.iter().chain([&heading]);
            texts.map(|text| text.chars().count()).max().unwrap_or(0)
        })
        .collect();
    for (first, end) in spans(strips) {
        let wanted = over(&strips[first..end]).chars().count();
        let there = total(&widths[first..end]);
        widths[end - 1] += wanted.saturating_sub(there);
    }
    widths
}
