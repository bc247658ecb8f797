//! A table laid out for a reader: which columns are shown in a given width, and their text.

use super::fit::{cut, fit};
use super::notes::list_in_note;
use super::strip::{GAP, Strip, headings, over, spans, total, widths};
use super::{Column, Fields};

/// How a [`Report`](super::Report) is laid out as text.
///
/// A column of names whose cells all agree moves into the header, and one of quantities without any value is left out.
/// Where the table is still wider than `width`, columns are left out, the most minor first, and a note names them.
/// Text in a cell is never wrapped.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// The most characters of a line; `None` for as many as it takes.
    pub width: Option<usize>,
    /// Shows every column as it is, whatever the width: none moves, none is left out.
    pub every_column: bool,
    /// How a reader gets at the columns that were left out: the end of the note that names them.
    pub hint: String,
}

/// A table in a layout.
pub(super) struct Arranged {
    /// Titles and values of the columns whose cells all agree.
    pub same: Fields,
    /// The lines of the table.
    pub lines: Vec<String>,
    /// The note on what was left out.
    pub note: Option<String>,
}

/// Lays out `columns` of `rows`.
pub(super) fn arrange(columns: &[Column], rows: &[Fields], layout: &Layout) -> Arranged {
    let mut strips: Vec<Strip<'_>> = columns.iter().map(|c| Strip::new(c, rows)).collect();
    let mut same = Fields::new();
    let mut left_out = Vec::new();
    if !layout.every_column {
        move_what_agrees(&mut strips, &mut same);
        if let Some(width) = layout.width {
            fit(&mut strips, width, &mut left_out);
        }
    }
    let note = (!left_out.is_empty()).then(|| {
        let start = format!("Left out for the width{}", layout.hint);
        list_in_note(&start, &left_out)
    });
    let mut lines = draw(&strips);
    if let Some(width) = layout.width.filter(|_| !layout.every_column) {
        lines.iter_mut().for_each(|line| cut(line, width)); // one column may be too wide
    }
    Arranged { same, lines, note }
}

/// Moves names that agree, and drops what has no value; what is left tells the rows apart, or is the first column.
fn move_what_agrees(strips: &mut Vec<Strip<'_>>, same: &mut Fields) {
    if strips.first().is_none_or(|first| first.cells.is_empty()) {
        return;
    }
    let tells_apart = |strip: &Strip<'_>| strip.is_of_names() && !strip.agrees();
    let is_any_telling = strips.iter().any(tells_apart);
    let mut index = 0;
    strips.retain(|strip| {
        let is_kept_first = index == 0 && !is_any_telling;
        index += 1;
        if is_kept_first || tells_apart(strip) {
            return true;
        }
        if strip.is_of_names() && !strip.is_empty() {
            same.insert(strip.column.heading(), strip.cells[0].as_str());
        }
        !strip.is_of_names() && !strip.is_empty()
    });
}

fn draw(strips: &[Strip<'_>]) -> Vec<String> {
    if strips.is_empty() {
        return Vec::new();
    }
    let widths = widths(strips);
    let gap = " ".repeat(GAP);
    let line = |cells: &[&str]| {
        let padded = cells.iter().zip(strips).zip(&widths);
        let padded: Vec<String> = padded
            .map(|((cell, strip), &width)| match strip.right {
                true => format!("{cell:>width$}"),
                false => format!("{cell:width$}"),
            })
            .collect();
        padded.join(&gap).trim_end().to_string()
    };
    let mut lines = Vec::new();
    if strips.iter().any(|strip| !strip.column.under.is_empty()) {
        let spans = spans(strips).into_iter().map(|(first, end)| {
            let (width, over) = (total(&widths[first..end]), over(&strips[first..end]));
            match over.is_empty() {
                true => " ".repeat(width),
                false => fill(over, width),
            }
        });
        lines.push(spans.collect::<Vec<_>>().join(&gap).trim_end().to_string());
    }
    let headings = headings(strips);
    lines.push(line(
        &headings.iter().map(String::as_str).collect::<Vec<_>>(),
    ));
    let rule: Vec<String> = widths.iter().map(|&width| "─".repeat(width)).collect();
    lines.push(rule.join(&gap));
    let rows = strips[0].cells.len();
    lines.extend((0..rows).map(|row| {
        let cells: Vec<&str> = strips
            .iter()
            .map(|strip| strip.cells[row].as_str())
            .collect();
        line(&cells)
    }));
    lines
}

/// A heading with a rule after it, as wide as the columns below it.
fn fill(over: String, width: usize) -> String {
    let rest = width - over.chars().count();
    match rest {
        0 | 1 => over + &" ".repeat(rest),
        _ => format!("{over} {}", "─".repeat(rest - 1)),
    }
}
