//! Text output for a terminal: the columns that fit a given width, and their text.

use super::column::{NOT_AVAILABLE, plain};
use super::words::{list_in_note, one_line, wrap};
use super::{Answer, Column, Fields, Report};
use std::iter::once;

/// The layout of a [`Report`](super::Report) as text.
///
/// A column of names whose cells are all equal moves into the header, and a column of quantities without any value is
/// left out. If the table is still wider than `width`, columns are left out, the highest drop rank first, and a note
/// lists them. Text in a cell is never wrapped.
///
/// [`Report::to_text`] has an example.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// The maximum line length in characters; `None` for no limit.
    pub width: Option<usize>,
    /// Shows every column in the table, whatever the width: none moves into the header, and none is left out.
    pub every_column: bool,
    /// How to see the columns that were left out; the end of the note that lists them.
    pub hint: String,
}

pub(super) fn text(report: &Report, layout: &Layout) -> String {
    let title = (!report.title.is_empty()).then(|| wrap(&report.title, layout.width, 2).join("\n"));
    let mut blocks: Vec<String> = title.into_iter().collect();
    blocks.extend(self::blocks(report, "Configuration", layout));
    for detail in &report.details {
        add_detail(&mut blocks, detail, layout);
    }
    blocks.extend(header("Environment", &report.environment, layout));
    match blocks.is_empty() {
        true => String::new(),
        false => blocks.join("\n\n") + "\n",
    }
}

fn add_detail(all: &mut Vec<String>, report: &Report, layout: &Layout) {
    let title = wrap(&report.title, layout.width, 2).join("\n");
    let name = match report.configuration.is_empty() {
        true => "In every row",
        false => "Configuration",
    };
    let own = blocks(report, name, layout).join("\n\n");
    all.push(format!("{title}\n{own}"));
    for detail in &report.details {
        add_detail(all, detail, layout);
    }
}

fn blocks(report: &Report, name: &str, layout: &Layout) -> Vec<String> {
    let given = &report.configuration;
    let (lines, same, note) = arrange(report, layout);
    let mut known = given.clone();
    for (title, value) in same.iter() {
        let said = [title.to_string(), format!("{title} {}", plain(value))];
        let says = |(key, _): (&str, _)| said.iter().any(|s| s.eq_ignore_ascii_case(key));
        if !given.iter().any(says) {
            known.insert(in_a_sentence(title), value.clone());
        }
    }
    let mut blocks: Vec<String> = header(name, &known, layout).into_iter().collect();
    if !lines.is_empty() {
        blocks.push(lines.join("\n"));
    }
    blocks.extend(answers(report, layout));
    let notes: Vec<&String> = report.notes.iter().chain(&note).collect();
    let numbered = notes.iter().enumerate().flat_map(|(i, note)| {
        let text = format!("{}. {note}", i + 1);
        let indent = (i + 1).to_string().len() + 2;
        wrap(&text, layout.width, indent)
    });
    if !notes.is_empty() {
        blocks.push(numbered.collect::<Vec<_>>().join("\n"));
    }
    blocks
}

/// Returns the answers under their heading, each indented below its question.
fn answers(report: &Report, layout: &Layout) -> Option<String> {
    let lines = report
        .answers
        .iter()
        .flat_map(|Answer { question, answer }| {
            let answer = wrap(&format!("  {}", one_line(answer)), layout.width, 2);
            wrap(question, layout.width, 0).into_iter().chain(answer)
        });
    let lines: Vec<String> = once("Answers".to_string()).chain(lines).collect();
    (!report.answers.is_empty()).then(|| lines.join("\n"))
}

/// Returns `Configuration: precision f32; data: 12,345 tokens`, without fields that are null.
fn header(name: &str, fields: &Fields, layout: &Layout) -> Option<String> {
    let parts = fields.iter().filter(|(_, value)| !value.is_null());
    let parts: Vec<String> = parts
        .map(|(key, value)| {
            let value = plain(value);
            let colon = if key.contains(' ') || value.contains(char::is_whitespace) {
                ":"
            } else {
                ""
            };
            format!("{key}{colon} {value}")
        })
        .collect();
    let text = format!("{name}: {}", parts.join("; "));
    (!parts.is_empty()).then(|| wrap(&text, layout.width, 2).join("\n"))
}

/// Returns a title for use within a sentence: `Precision` becomes `precision`; `T` and `FLOPs` stay.
fn in_a_sentence(title: &str) -> String {
    let is_word = title.len() > 1 && !title.chars().skip(1).any(char::is_uppercase);
    match is_word {
        true => title.to_lowercase(),
        false => title.into(),
    }
}

/// Returns the lines of the table, the columns that moved into the header, and a note on those that were left out.
fn arrange(report: &Report, layout: &Layout) -> (Vec<String>, Fields, Option<String>) {
    let mut strips = report.column_texts();
    let cells = strips.iter_mut().flat_map(|strip| &mut strip.cells);
    cells.for_each(|cell| *cell = one_line(cell));
    let mut same = Fields::new();
    let mut left_out = Vec::new();
    if !layout.every_column {
        move_constant_columns(&mut strips, &mut same);
        if let Some(width) = layout.width {
            left_out = fit(&mut strips, width);
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
    (lines, same, note)
}

/// Moves columns of equal names into `same`, and drops empty columns. The first one stays if none tells the rows apart.
fn move_constant_columns(strips: &mut Vec<ColumnText<'_>>, same: &mut Fields) {
    if strips.first().is_none_or(|first| first.cells.is_empty()) {
        return;
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
            same.insert(strip.column.heading(), strip.cells[0].as_str());
        }
        !strip.is_of_names() && !strip.is_empty()
    });
}

fn draw(strips: &[ColumnText<'_>]) -> Vec<String> {
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
    if strips.iter().any(|strip| !strip.column.group.is_empty()) {
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

/// Returns a heading followed by a rule, as wide as the columns below it.
fn fill(over: String, width: usize) -> String {
    let rest = width - over.chars().count();
    match rest {
        0 | 1 => over + &" ".repeat(rest),
        _ => format!("{over} {}", "─".repeat(rest - 1)),
    }
}

const LEAST_WORDS: usize = 20;

/// Leaves out columns until the others fit `width`, and returns their headings. The column of the highest drop rank
/// goes first, and the last one among equals. If all remaining columns are needed, long words are cut before a column
/// is left out.
fn fit(strips: &mut Vec<ColumnText<'_>>, width: usize) -> Vec<String> {
    let mut left_out = Vec::new();
    while total(&widths(strips)) > width {
        let is_needed = strips
            .iter()
            .skip(1)
            .all(|strip| strip.column.drop_rank == 0);
        if is_needed && cut_words(strips, width) {
            continue;
        }
        let headings = leave_out(strips);
        if headings.is_empty() {
            break;
        }
        left_out.splice(0..0, headings);
    }
    left_out
}

/// Leaves out the column of the highest drop rank, or the last one among equals. Columns with the same rank and the
/// same shared heading are left out too, because half of a comparison is useless. Returns their headings, or the shared
/// one if all columns under it are left out; returns none if only the first column remains.
pub(super) fn leave_out(strips: &mut Vec<ColumnText<'_>>) -> Vec<String> {
    let Some(most) = (1..strips.len()).max_by_key(|i| (strips[*i].column.drop_rank, *i)) else {
        return Vec::new();
    };
    let span = spans(strips).into_iter().find(|(_, end)| *end > most);
    let (first, end) = span.unwrap_or((most, most + 1));
    let rank = strips[most].column.drop_rank;
    let goes = |i: usize, strip: &ColumnText<'_>| {
        (first.max(1)..end).contains(&i) && strip.column.drop_rank == rank
    };
    let all = std::mem::take(strips).into_iter().enumerate();
    let (gone, kept): (Vec<_>, Vec<_>) = all.partition(|(i, strip)| goes(*i, strip));
    *strips = kept.into_iter().map(|(_, strip)| strip).collect();
    let gone: Vec<ColumnText<'_>> = gone.into_iter().map(|(_, strip)| strip).collect();
    match gone.len() > 1 && gone.len() == end - first {
        true => vec![over(&gone)],
        false => gone.iter().map(|strip| strip.column.heading()).collect(),
    }
}

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
pub(super) struct ColumnText<'a> {
    pub column: &'a Column,
    pub cells: Vec<String>,
    /// Whether the cells are right-aligned.
    pub right: bool,
}

impl ColumnText<'_> {
    /// Returns whether the column holds names, as opposed to quantities.
    fn is_of_names(&self) -> bool {
        self.column.decimals.is_none()
    }

    fn agrees(&self) -> bool {
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
