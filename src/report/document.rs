//! The document that every benchmark prints: environment, configuration and results.

use indexmap::IndexSet;
use serde::Serialize;
use serde_json::Value;

use super::text::ColumnText;
use super::{Column, Fields};

/// A benchmark's results, which can be written in five formats.
///
/// Columns show some of the fields of the rows. CSV and JSON have every field of every row, unrounded: first the fields
/// of the columns, then the others (such as `samples_ms`). All rows of a table have the same keys. A missing value is
/// `null` in JSON, an empty cell in CSV, and `n/a` in the other formats, which leave out columns without any value.
///
/// The JSON document is `{"title": "..", "environment": {..}, "configuration": {..}, "answers": [..], "notes": [..],
/// "rows": [{..}, ..], "details": [..]}`, and each of the details is such a document.
///
/// ```
/// use tallow::report::{Column, Fields, Format, Report, Statistics};
///
/// let mut forward = Fields::from_iter([("phase", "forward"), ("status", "ok")]);
/// forward.merge(Statistics::new(&[116.7, 117.4, 118.6])?.fields());
/// let backward = Fields::from_iter([("phase", "backward"), ("status", "OOM")]);
/// let report = Report {
///     columns: vec![Column::text("phase", "Phase"), Column::number("mean_ms", "Mean", "ms", 2)],
///     rows: vec![forward, backward],
///     ..Default::default()
/// };
/// let mut out = Vec::new();
/// report.write_to(Format::Markdown, &mut out)?;
/// assert!(out.starts_with(b"| Phase    | Mean (ms) |"));
/// let mut out = Vec::new();
/// report.write_to(Format::Json, &mut out)?;
/// let json: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
/// assert_eq!(json["rows"][0]["n"], 3);
/// assert!(json["rows"][1]["mean_ms"].is_null());
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// The environment: device, versions, features, threads, allocator, seed.
    pub environment: Fields,
    /// The requested configuration.
    pub configuration: Fields,
    /// The columns of the table, from left to right.
    pub columns: Vec<Column>,
    /// The results, one row for each measurement.
    pub rows: Vec<Fields>,
    /// Rows that the tables show instead of `rows`, for example one for several rows; empty if they show
    /// `rows`. CSV and JSON always have `rows`.
    pub shown_rows: Vec<Fields>,
    /// Answers to the questions that the report was made for.
    pub answers: Vec<Answer>,
    /// Notes that help to judge the numbers, such as formulas and warnings. Text, Markdown and LaTeX number them.
    pub notes: Vec<String>,
    /// The line above the table; the caption in LaTeX.
    pub title: String,
    /// Detail tables, each with its title, which share this report's environment. A CSV file holds one table, so
    /// [`save`](Self::save) writes each detail to its own file. CSV leaves out details that have `shown_rows` but no
    /// `rows`: these show this report's rows in another arrangement.
    pub details: Vec<Report>,
}

/// A question and its answer, in one short paragraph.
///
/// ```
/// use tallow::report::{Answer, Report};
///
/// let report = Report {
///     answers: vec![Answer::new("Which part takes longest?", "Backward: 8.1 of 12.3 ms (66%).")],
///     ..Default::default()
/// };
/// assert_eq!(
///     report.to_text(None),
///     "Answers\nWhich part takes longest?\n  Backward: 8.1 of 12.3 ms (66%).\n"
/// );
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// The question, worded as in its exercise.
    pub question: String,
    /// The answer, with its figures and the formula behind them.
    pub answer: String,
}

impl Answer {
    /// Creates a question with its answer.
    pub fn new(question: impl Into<String>, answer: impl Into<String>) -> Self {
        Self {
            question: question.into(),
            answer: answer.into(),
        }
    }
}

impl Report {
    /// Creates a table of `columns`. Each row is an array with one value for each column.
    pub(crate) fn table(columns: Vec<Column>, rows: impl IntoIterator<Item = Value>) -> Self {
        let fields = |row: Value| {
            let values = row.as_array().cloned().unwrap_or_default();
            let keys = columns.iter().map(|column| column.key.clone());
            keys.zip(values).collect()
        };
        Self {
            rows: rows.into_iter().map(fields).collect(),
            columns,
            ..Default::default()
        }
    }

    /// Returns the columns with their formatted cells, unescaped; without columns that have a value in no row.
    pub(super) fn column_texts(&self) -> Vec<ColumnText<'_>> {
        let rows = self.shown();
        let is_value = |value: &Value| !value.is_null();
        let has_value = |key: &str| rows.iter().any(|row| row.get(key).is_some_and(is_value));
        let columns = self.columns.iter();
        let columns = columns.filter(|column| rows.is_empty() || has_value(&column.key));
        let texts = columns.map(|column| {
            let values = || rows.iter().map(|row| row.get(&column.key));
            ColumnText {
                column,
                cells: values().map(|value| column.cell(value)).collect(),
                right: column.aligns_right(values().flatten()),
            }
        });
        texts.collect()
    }

    /// Returns each key of the rows once: those of the columns first, then the others in order of appearance. Without
    /// any row, these are the keys of the columns.
    pub(super) fn keys(&self) -> Vec<&str> {
        let of_rows = |key: &&str| {
            self.shown().is_empty() || self.rows.iter().any(|row| row.get(key).is_some())
        };
        let shown = self.columns.iter().map(|column| column.key.as_str());
        let rows = self.rows.iter();
        let held = rows.flat_map(|row| row.iter().map(|(key, _)| key));
        let keys: IndexSet<&str> = shown.filter(of_rows).chain(held).collect();
        keys.into_iter().collect()
    }

    /// Returns title and content of the two headers, without fields that are null.
    pub(super) fn headers(&self) -> [(&'static str, Vec<(&str, &Value)>); 2] {
        let both = [
            ("Environment", &self.environment),
            ("Configuration", &self.configuration),
        ];
        both.map(|(title, fields)| {
            let known = fields.iter().filter(|(_, value)| !value.is_null());
            (title, known.collect())
        })
    }

    pub(super) fn shown(&self) -> &[Fields] {
        match self.shown_rows.is_empty() {
            true => &self.rows,
            false => &self.shown_rows,
        }
    }
}
