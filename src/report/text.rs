//! Text output for a terminal: tables that are wrapped to a given width, and their text.

use super::column::plain;
use super::words::{one_line, wrap};
use super::{Answer, Column, Fields, Report};
use std::collections::HashSet;
use std::iter::once;
use std::mem::replace;

pub(super) fn text(report: &Report, width: Option<usize>) -> String {
    let mut blocks = blocks(report, false, width);
    blocks.extend(header("Environment", &report.environment, width));
    match blocks.is_empty() {
        true => String::new(),
        false => blocks.join("\n\n") + "\n",
    }
}

/// Returns the parts of a report and of its details between which there is an empty line.
fn blocks(report: &Report, is_detail: bool, width: Option<usize>) -> Vec<String> {
    let given = &report.configuration;
    let (table, same) = table(report, width.unwrap_or(usize::MAX));
    let mut known = given.clone();
    for (title, value) in same.iter() {
        let said = [title.to_string(), format!("{title} {}", plain(value))];
        let says = |(key, _): (&str, _)| said.iter().any(|s| s.eq_ignore_ascii_case(key));
        if !given.iter().any(says) {
            known.insert(title, value.clone());
        }
    }
    let name = match is_detail && given.is_empty() {
        true => "In every row",
        false => "Configuration",
    };
    let answers = report
        .answers
        .iter()
        .flat_map(|Answer { question, answer }| {
            let answer = wrap(&format!("  {answer}"), width, 2);
            [wrap(question, width, 0), answer].concat()
        });
    let heading = (!report.answers.is_empty()).then(|| "Answers".to_string());
    let notes = (1..).zip(&report.notes).flat_map(|(number, note)| {
        let number = format!("{number}. ");
        wrap(&format!("{number}{note}"), width, number.len())
    });
    let parts = [
        table,
        heading.into_iter().chain(answers).collect(),
        notes.collect(),
    ];
    let parts = parts.into_iter().filter(|lines| !lines.is_empty());
    let header = header(name, &known, width).into_iter();
    let mut blocks: Vec<String> = header.chain(parts.map(|lines| lines.join("\n"))).collect();

    let title = wrap(&report.title, width, 2).join("\n");
    if is_detail {
        blocks = vec![format!("{title}\n{}", blocks.join("\n\n"))];
    } else if !title.is_empty() {
        blocks.insert(0, title);
    }
    let details = report.details.iter();
    blocks.extend(details.flat_map(|detail| self::blocks(detail, true, width)));
    blocks
}

/// Returns `Configuration: precision f32; data: 12,345 tokens`, without fields that are null.
fn header(name: &str, fields: &Fields, width: Option<usize>) -> Option<String> {
    let fields = self::fields(fields);
    let text = format!("{name}: {fields}");
    (!fields.is_empty()).then(|| wrap(&text, width, 2).join("\n"))
}

/// Returns `precision f32; data: 12,345 tokens`, without fields that are null.
pub(super) fn fields(fields: &Fields) -> String {
    let parts = fields.iter().filter(|(_, value)| !value.is_null());
    let parts = parts.map(|(key, value)| {
        let value = plain(value);
        let has_space = key.contains(' ') || value.contains(char::is_whitespace);
        let colon = if has_space { ":" } else { "" };
        format!("{key}{colon} {value}")
    });
    parts.collect::<Vec<_>>().join("; ")
}

/// Returns a title for use within a sentence: `Precision` becomes `precision`; `T` and `FLOPs` stay.
pub(super) fn in_a_sentence(title: &str) -> String {
    let is_word = title.len() > 1 && !title.chars().skip(1).any(char::is_uppercase);
    match is_word {
        true => title.to_lowercase(),
        false => title.into(),
    }
}

/// Returns the lines of the table, and the columns that moved into the header.
fn table(report: &Report, width: usize) -> (Vec<String>, Fields) {
    let mut columns = report.column_texts();
    let cells = columns.iter_mut().flat_map(|column| &mut column.cells);
    cells.for_each(|cell| *cell = one_line(cell));
    let same = move_constant_columns(&mut columns);
    // A long name is cut rather than repeated for each figure.
    let most = LEAST_WORDS.max(width / 5 * 3);
    let fits = |columns: &[ColumnText<'_>]| {
        let widths = columns.iter().zip(widths(columns));
        let widths = widths.map(|(column, width)| match column.is_of_names() {
            true => width.min(most),
            false => width,
        });
        with_gaps(&widths.collect::<Vec<_>>()) <= width
    };
    let mut lines = Vec::new();
    for mut block in divide(columns, fits) {
        while self::width(&block) > width && cut_words(&mut block, width) {}
        let has_block_above = !lines.is_empty();
        lines.extend(has_block_above.then(String::new));
        lines.extend(draw(&block));
    }
    lines.iter_mut().for_each(|line| cut(line, width)); // one column may be too wide
    (lines, same)
}

/// Divides columns into blocks that fit. Each begins with the first columns of names, as many as tell all rows apart, or
/// with one column if these do not fit. Columns under a shared heading stay together if a block can hold them.
pub(super) fn divide<'r>(
    columns: Vec<ColumnText<'r>>,
    fits: impl Fn(&[ColumnText<'r>]) -> bool,
) -> Vec<Vec<ColumnText<'r>>> {
    let rows = columns.first().map_or(0, |column| column.cells.len());
    let is_enough = |count: &usize| {
        let columns = columns[..*count].iter();
        let name = |row: usize| columns.clone().map(move |column| &column.cells[row]);
        let names: HashSet<Vec<&String>> = (0..rows).map(|row| name(row).collect()).collect();
        names.len() == rows
    };
    let names = columns.iter().take_while(|column| column.is_of_names());
    let names = names.count();
    let names = (1..=names).find(is_enough).unwrap_or(names);
    let names = if fits(&columns[..names]) { names } else { 1 };
    let (names, others) = columns.split_at(names);
    let (mut blocks, mut block) = (Vec::new(), names.to_vec());
    for span in spans(others) {
        let is_one = fits(&[names, span].concat());
        for part in span.chunks(if is_one { span.len() } else { 1 }) {
            let joined = [&block, part].concat();
            match block.len() == names.len() || fits(&joined) {
                true => block = joined,
                false => blocks.push(replace(&mut block, [names, part].concat())),
            }
        }
    }
    blocks.push(block);
    blocks
}

/// Removes columns of equal names and returns their values. The first one stays if none tells the rows apart.
pub(super) fn move_constant_columns(columns: &mut Vec<ColumnText<'_>>) -> Fields {
    let mut same = Fields::new();
    if columns.first().is_none_or(|first| first.cells.is_empty()) {
        return same;
    }
    let tells_apart = |column: &ColumnText<'_>| column.is_of_names() && !column.agrees();
    let kept = usize::from(!columns.iter().any(tells_apart));
    for column in columns.split_off(kept) {
        if column.is_of_names() && column.agrees() {
            let title = in_a_sentence(&column.column.heading());
            same.insert(title, column.cells[0].as_str());
        } else {
            columns.push(column);
        }
    }
    same
}

fn draw(columns: &[ColumnText<'_>]) -> Vec<String> {
    let gap = " ".repeat(GAP);
    let (mut above, mut texts) = (Vec::new(), Vec::new());
    for span in spans(columns) {
        let (shared, headings) = headings(span);
        let (widths, width) = (widths(span), width(span));
        above.push(match shared.is_empty() {
            true => " ".repeat(width),
            false => format!("{:─<width$.width$}", shared + " "),
        });
        let columns = span.iter().zip(headings).zip(widths);
        texts.extend(columns.map(|((column, heading), width)| {
            let heading = [heading, "─".repeat(width)].into_iter();
            let texts = heading.chain(column.cells.iter().cloned());
            texts.map(|text| column.padded(&text, width)).collect()
        }));
    }
    let mut lines = join_columns(&texts, &gap);
    if columns.iter().any(|column| !column.column.group.is_empty()) {
        lines.insert(0, above.join(&gap));
    }
    lines.iter().map(|line| line.trim_end().into()).collect()
}

/// Returns the lines of a table from its columns, which have the same number of cells.
pub(super) fn join_columns(columns: &[Vec<String>], separator: &str) -> Vec<String> {
    let rows = columns.first().map_or(0, Vec::len);
    let line = |row: usize| -> String {
        let cells: Vec<&str> = columns.iter().map(|cells| cells[row].as_str()).collect();
        cells.join(separator)
    };
    (0..rows).map(line).collect()
}

const LEAST_WORDS: usize = 20;

/// Cuts the widest column of words by the excess width, and returns whether there was one to cut.
fn cut_words(columns: &mut [ColumnText<'_>], width: usize) -> bool {
    let (widths, too_much) = (widths(columns), self::width(columns) - width);
    let columns = columns.iter_mut().zip(widths).map(|(column, width)| {
        let heading = column.column.own_heading().chars().count();
        (column, width, heading.max(LEAST_WORDS))
    });
    let long = columns.filter(|(column, width, least)| column.is_of_names() && width > least);
    let Some((column, width, least)) = long.max_by_key(|(_, width, _)| *width) else {
        return false;
    };
    let room = width.saturating_sub(too_much).max(least);
    column.cells.iter_mut().for_each(|cell| cut(cell, room));
    true
}

/// Cuts a text to `room` characters: the beginning of a path, whose end is more informative, or the end of other text.
fn cut(text: &mut String, room: usize) {
    let length = text.chars().count();
    if length <= room {
        return;
    }
    let kept = room.saturating_sub(1);
    *text = match text.contains('/') {
        true => once('…').chain(text.chars().skip(length - kept)).collect(),
        false => text.chars().take(kept).chain(once('…')).collect(),
    };
}

const GAP: usize = 2;

/// A column with its cells.
#[derive(Clone)]
pub(super) struct ColumnText<'a> {
    pub column: &'a Column,
    pub cells: Vec<String>,
    /// Whether the cells are right-aligned.
    pub right: bool,
}

impl ColumnText<'_> {
    /// Returns whether the column holds names, as opposed to quantities.
    pub fn is_of_names(&self) -> bool {
        self.column.decimals.is_none()
    }

    /// Returns the full heading and the cells, escaped.
    pub fn escaped(&self, escape: fn(&str) -> String) -> Vec<String> {
        let cells = self.cells.iter().map(|cell| escape(cell));
        once(escape(&self.column.heading())).chain(cells).collect()
    }

    /// Pads a text with spaces on the side that the column's alignment leaves free.
    pub fn padded(&self, text: &str, width: usize) -> String {
        match self.right {
            true => format!("{text:>width$}"),
            false => format!("{text:width$}"),
        }
    }

    pub fn agrees(&self) -> bool {
        self.cells.windows(2).all(|pair| pair[0] == pair[1])
    }
}

/// Returns the spans of neighbours that share a heading; a column without one is its own span.
fn spans<'s, 'r>(columns: &'s [ColumnText<'r>]) -> impl Iterator<Item = &'s [ColumnText<'r>]> {
    columns.chunk_by(|one, next| {
        let group = &one.column.group;
        !group.is_empty() && *group == next.column.group
    })
}

/// Returns the heading that the columns of a span share, and the heading of each below it. A unit that all columns with
/// a unit have in common is in the shared heading.
fn headings(span: &[ColumnText<'_>]) -> (String, Vec<String>) {
    let group = &span[0].column.group;
    let columns = span.iter().map(|column| column.column);
    let units = columns.clone().map(|column| &column.unit);
    let mut units = units.filter(|unit| !unit.is_empty());
    let unit = units.next();
    let shared = unit.filter(|first| !group.is_empty() && units.all(|unit| unit == *first));
    match shared {
        Some(unit) => (
            format!("{group} ({unit})"),
            columns.map(|column| column.title.clone()).collect(),
        ),
        None => (group.clone(), columns.map(Column::own_heading).collect()),
    }
}

fn widths(columns: &[ColumnText<'_>]) -> Vec<usize> {
    let length = |text: &String| text.chars().count();
    let widths = spans(columns).flat_map(|span| {
        let (shared, headings) = headings(span);
        let own = span.iter().zip(headings).map(|(column, heading)| {
            let cells = column.cells.iter().map(length);
            cells.fold(length(&heading), usize::max)
        });
        let mut own: Vec<usize> = own.collect();
        let missing = length(&shared).saturating_sub(with_gaps(&own));
        if let Some(last) = own.last_mut() {
            *last += missing;
        }
        own
    });
    widths.collect()
}

fn width(columns: &[ColumnText<'_>]) -> usize {
    with_gaps(&widths(columns))
}

fn with_gaps(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}
