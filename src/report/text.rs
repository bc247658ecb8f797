//! Text output for a terminal: tables that are wrapped to a given width, and their text.

use super::column::{NOT_AVAILABLE, plain};
use super::words::{one_line, wrap};
use super::{Answer, Column, Fields, Report};
use std::collections::HashSet;
use std::iter::once;

pub(super) fn text(report: &Report, width: Option<usize>) -> String {
    let title = (!report.title.is_empty()).then(|| wrap(&report.title, width, 2).join("\n"));
    let mut blocks: Vec<String> = title.into_iter().collect();
    blocks.extend(self::blocks(report, "Configuration", width));
    for detail in &report.details {
        add_detail(&mut blocks, detail, width);
    }
    blocks.extend(header("Environment", &report.environment, width));
    match blocks.is_empty() {
        true => String::new(),
        false => blocks.join("\n\n") + "\n",
    }
}

fn add_detail(all: &mut Vec<String>, report: &Report, width: Option<usize>) {
    let title = wrap(&report.title, width, 2).join("\n");
    let name = match report.configuration.is_empty() {
        true => "In every row",
        false => "Configuration",
    };
    let own = blocks(report, name, width).join("\n\n");
    all.push(format!("{title}\n{own}"));
    for detail in &report.details {
        add_detail(all, detail, width);
    }
}

fn blocks(report: &Report, name: &str, width: Option<usize>) -> Vec<String> {
    let given = &report.configuration;
    let (lines, same) = table(report, width);
    let mut known = given.clone();
    for (title, value) in same.iter() {
        let said = [title.to_string(), format!("{title} {}", plain(value))];
        let says = |(key, _): (&str, _)| said.iter().any(|s| s.eq_ignore_ascii_case(key));
        if !given.iter().any(says) {
            known.insert(title, value.clone());
        }
    }
    let mut blocks: Vec<String> = header(name, &known, width).into_iter().collect();
    if !lines.is_empty() {
        blocks.push(lines.join("\n"));
    }
    blocks.extend(answers(report, width));
    let numbered = report.notes.iter().enumerate().flat_map(|(i, note)| {
        let text = format!("{}. {note}", i + 1);
        let indent = (i + 1).to_string().len() + 2;
        wrap(&text, width, indent)
    });
    if !report.notes.is_empty() {
        blocks.push(numbered.collect::<Vec<_>>().join("\n"));
    }
    blocks
}

/// Returns the answers under their heading, each indented below its question.
fn answers(report: &Report, width: Option<usize>) -> Option<String> {
    let lines = report
        .answers
        .iter()
        .flat_map(|Answer { question, answer }| {
            let answer = wrap(&format!("  {}", one_line(answer)), width, 2);
            wrap(question, width, 0).into_iter().chain(answer)
        });
    let lines: Vec<String> = once("Answers".to_string()).chain(lines).collect();
    (!report.answers.is_empty()).then(|| lines.join("\n"))
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
        let colon = if key.contains(' ') || value.contains(char::is_whitespace) {
            ":"
        } else {
            ""
        };
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
fn table(report: &Report, width: Option<usize>) -> (Vec<String>, Fields) {
    let mut columns = report.column_texts();
    let cells = columns.iter_mut().flat_map(|column| &mut column.cells);
    cells.for_each(|cell| *cell = one_line(cell));
    let same = move_constant_columns(&mut columns);
    let Some(width) = width else {
        return (draw(&columns), same);
    };
    let blocks = divide(columns, |columns| total(&widths(columns)) <= width);
    let mut lines = Vec::new();
    for mut block in blocks {
        while total(&widths(&block)) > width && cut_words(&mut block, width) {}
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
    let rows = columns.first().map_or(0, |own| own.cells.len());
    let name_of = |row: usize, count: usize| -> Vec<&str> {
        let columns = columns[..count].iter();
        columns.map(|own| own.cells[row].as_str()).collect()
    };
    let is_enough = |count: &usize| {
        let names: HashSet<Vec<&str>> = (0..rows).map(|row| name_of(row, *count)).collect();
        names.len() == rows
    };
    let names = columns.iter().take_while(|own| own.is_of_names()).count();
    let names = (1..=names).find(is_enough).unwrap_or(names);
    let names = if fits(&columns[..names]) { names } else { 1 };
    let (names, others) = columns.split_at(names);
    let mut blocks = vec![names.to_vec()];
    for (first, end) in spans(others) {
        let span = &others[first..end];
        let is_one = fits(&[names, span].concat());
        for part in span.chunks(if is_one { span.len() } else { 1 }) {
            let block = blocks.last().map_or(names, Vec::as_slice);
            let joined = [block, part].concat();
            if block.len() > names.len() && !fits(&joined) {
                blocks.push([names, part].concat());
            } else if let Some(block) = blocks.last_mut() {
                *block = joined;
            }
        }
    }
    blocks
}

/// Removes columns of equal names and returns their values, and drops empty columns. The first one stays if none tells
/// the rows apart.
pub(super) fn move_constant_columns(strips: &mut Vec<ColumnText<'_>>) -> Fields {
    let mut same = Fields::new();
    if strips.first().is_none_or(|first| first.cells.is_empty()) {
        return same;
    }
    let tells_apart = |strip: &ColumnText<'_>| strip.is_of_names() && !strip.agrees();
    let is_any_telling = strips.iter().any(tells_apart);
    let mut index = 0;
    strips.retain(|strip| {
        let is_kept_first = index == 0 && !is_any_telling;
        index += 1;
        if is_kept_first || tells_apart(strip) {
            return true;
        }
        if strip.is_of_names() && !strip.is_empty() {
            let title = in_a_sentence(&strip.column.heading());
            same.insert(title, strip.cells[0].as_str());
        }
        !strip.is_of_names() && !strip.is_empty()
    });
    same
}

fn draw(strips: &[ColumnText<'_>]) -> Vec<String> {
    if strips.is_empty() {
        return Vec::new();
    }
    let widths = widths(strips);
    let gap = " ".repeat(GAP);
    let mut lines = Vec::new();
    if strips.iter().any(|strip| !strip.column.group.is_empty()) {
        let spans = spans(strips).into_iter().map(|(first, end)| {
            let (width, over) = (total(&widths[first..end]), over(&strips[first..end]));
            match over.is_empty() {
                true => " ".repeat(width),
                false => fill(over, width),
            }
        });
        lines.push(spans.collect::<Vec<_>>().join(&gap));
    }
    let columns = strips.iter().zip(headings(strips)).zip(&widths);
    let columns = columns.map(|((strip, heading), &width)| {
        let above = [heading, "─".repeat(width)].into_iter();
        let texts = above.chain(strip.cells.iter().cloned());
        texts.map(|text| strip.padded(&text, width)).collect()
    });
    lines.extend(join_columns(&columns.collect::<Vec<_>>(), &gap));
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

/// Returns a heading followed by a rule, as wide as the columns below it.
fn fill(over: String, width: usize) -> String {
    let rest = width - over.chars().count();
    match rest {
        0 | 1 => over + &" ".repeat(rest),
        _ => format!("{over} {}", "─".repeat(rest - 1)),
    }
}

const LEAST_WORDS: usize = 20;

/// Cuts the widest column of words by the excess width, and returns whether there was one to cut.
fn cut_words(strips: &mut [ColumnText<'_>], width: usize) -> bool {
    let widths = widths(strips);
    let too_much = total(&widths) - width;
    let least = |i: usize| {
        strips[i]
            .column
            .own_heading()
            .chars()
            .count()
            .max(LEAST_WORDS)
    };
    let is_long = |i: &usize| strips[*i].is_of_names() && widths[*i] > least(*i);
    let Some(widest) = (0..strips.len()).filter(is_long).max_by_key(|i| widths[*i]) else {
        return false;
    };
    let room = widths[widest].saturating_sub(too_much).max(least(widest));
    strips[widest]
        .cells
        .iter_mut()
        .for_each(|cell| cut(cell, room));
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
        true => "…"
            .chars()
            .chain(text.chars().skip(length - kept))
            .collect(),
        false => text.chars().take(kept).chain("…".chars()).collect(),
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

    fn is_empty(&self) -> bool {
        self.cells.iter().all(|cell| cell == NOT_AVAILABLE)
    }
}

fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

/// Returns the ranges (first, end) of neighbours that share a heading; a column without one is its own range.
fn spans(strips: &[ColumnText<'_>]) -> Vec<(usize, usize)> {
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for (i, strip) in strips.iter().enumerate() {
        let under = &strip.column.group;
        match spans.last_mut() {
            Some((first, end)) if !under.is_empty() && strips[*first].column.group == *under => {
                *end = i + 1;
            }
            _ => spans.push((i, i + 1)),
        }
    }
    spans
}

/// Returns the heading above a span, with the unit if its columns have only one.
fn over(strips: &[ColumnText<'_>]) -> String {
    let under = &strips[0].column.group;
    match shared_unit(strips) {
        Some(unit) => format!("{under} ({unit})"),
        None => under.clone(),
    }
}

/// Returns the unit of the columns under one heading, if all that have a unit agree.
fn shared_unit<'s>(strips: &'s [ColumnText<'_>]) -> Option<&'s str> {
    let mut units = strips.iter().map(|s| s.column.unit.as_str());
    let mut units = units.by_ref().filter(|unit| !unit.is_empty());
    let first = units.next()?;
    let is_shared = !strips[0].column.group.is_empty() && units.all(|unit| unit == first);
    is_shared.then_some(first)
}

/// Returns the heading directly above each column, below the shared headings.
fn headings(strips: &[ColumnText<'_>]) -> Vec<String> {
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

fn widths(strips: &[ColumnText<'_>]) -> Vec<usize> {
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
