//! The document that every benchmark prints: where it ran, what was asked for, what came out.

use serde::Serialize;
use serde_json::Value;

use super::text::Strip;
use super::{Column, Fields};
use crate::{Error, Result};

/// One content, five formats.
///
/// Columns show some of the fields of the rows. Markdown shows all columns; text and LaTeX leave out the minor ones
/// that a [`Layout`](super::Layout) or [`LATEX_COLUMNS`](super::LATEX_COLUMNS) has no place for. CSV and JSON carry
/// every field of every row, unrounded, those that no column shows (`samples_ms`, say) after those that one does.
///
/// The JSON document is
/// `{"environment": {..}, "configuration": {..}, "answers": [..], "notes": [..], "rows": [{..}, ..]}`, and with detail
/// tables `"details": [{"title": "..", "answers": [..], "notes": [..], "rows": [..]}, ..]` after the rows. All rows of
/// a table have the same keys: what a row lacks is `null` there, an empty cell in CSV, and `n/a` in the other formats.
///
/// ```
/// use tallow::report::{Column, Fields, Format, Report};
///
/// let report = Report {
///     environment: Fields::from_iter([("device", "cpu")]),
///     columns: vec![Column::text("phase", "Phase"), Column::number("mean_ms", "Mean", "ms", 1)],
///     rows: vec![Fields::from_iter([("phase", "forward"), ("status", "OOM")])],
///     ..Default::default()
/// };
/// let mut out = Vec::new();
/// report.write_to(Format::Json, &mut out)?;
/// let json: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
/// assert_eq!(json["environment"]["device"], "cpu");
/// assert_eq!(json["rows"][0]["status"], "OOM");
/// assert!(json["rows"][0]["mean_ms"].is_null());
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Where it ran: device, versions, features, threads, allocator, seed.
    pub environment: Fields,
    /// What was asked for.
    pub configuration: Fields,
    /// What the tables show, from left to right.
    pub columns: Vec<Column>,
    /// What came out, one row a measurement.
    pub rows: Vec<Fields>,
    /// What the tables show in place of the rows, where people read better in another cut ([`pivot`](super::pivot()));
    /// empty if they show the rows themselves. CSV and JSON keep to the rows.
    pub lines: Vec<Fields>,
    /// What the figures say about the questions that the report was made for.
    pub answers: Vec<Answer>,
    /// Sentences that a reader needs to judge the numbers: formulas, warnings. The formats for people number them.
    pub notes: Vec<String>,
    /// The line over the table, and its caption in LaTeX.
    pub title: String,
    /// Tables that go into detail, each with its title; their environment is this one's. CSV has one table:
    /// [`save`](Self::save) puts each of these into a file of its own. One that has lines and no rows shows people
    /// this report's own rows in another cut: CSV leaves it out.
    pub details: Vec<Report>,
}

/// A question and what the figures of a [`Report`] say about it, in one short paragraph.
///
/// ```
/// use tallow::report::{Answer, Format, Report};
///
/// let report = Report {
///     answers: vec![Answer::new("Which part takes longest?", "Backward: 8.1 of 12.3 ms (66%).")],
///     ..Default::default()
/// };
/// assert_eq!(
///     report.to_text(&Default::default()),
///     "Answers\nWhich part takes longest?\n  Backward: 8.1 of 12.3 ms (66%).\n"
/// );
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// The question, as its exercise asks it.
    pub question: String,
    /// The answer, with the figures and the formula it follows from.
    pub answer: String,
}

impl Answer {
    /// A question with its answer.
    pub fn new(question: impl Into<String>, answer: impl Into<String>) -> Self {
        Self {
            question: question.into(),
            answer: answer.into(),
        }
    }
}

impl Report {
    /// A table of `columns`, each row an array with a value for each of them.
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

    /// Keeps the columns of these names, in this order: keys, titles, or headings over several columns, in any case. It
    /// is the table's own columns if it has all of them, else those of each detail that does. CSV and JSON keep every
    /// field.
    ///
    /// # Errors
    /// [`Error::Config`] for names that no table has together, with those there are.
    pub fn select(&mut self, names: &[String]) -> Result<()> {
        if self.keep(names) {
            return Ok(());
        }
        let kept: Vec<bool> = self
            .details
            .iter_mut()
            .map(|detail| detail.keep(names))
            .collect();
        if kept.contains(&true) {
            return Ok(());
        }
        let tables = [&*self].into_iter().chain(&self.details);
        let mut titles: Vec<String> = Vec::new();
        for heading in tables.flat_map(Report::headings) {
            if !titles.contains(&heading) {
                titles.push(heading);
            }
        }
        Err(
            Error::config("select columns", "names", names.join(", ")).must_be(
                format!("among {}", titles.join(", ")),
                "name columns of one table by their headings, or by their fields in CSV and JSON",
            ),
        )
    }

    fn keep(&mut self, names: &[String]) -> bool {
        let called = |name: &String| -> Vec<Column> {
            let all = self.columns.iter();
            all.filter(|column| column.is_called(name))
                .cloned()
                .collect()
        };
        let called: Vec<Vec<Column>> = names.iter().map(called).collect();
        let has_all = called.iter().all(|columns| !columns.is_empty());
        if has_all {
            self.columns = called.concat();
        }
        has_all
    }

    pub(super) fn headings(&self) -> Vec<String> {
        self.columns.iter().map(Column::heading).collect()
    }

    /// The columns with their cells as people read them, unescaped.
    pub(super) fn strips(&self) -> Vec<Strip<'_>> {
        let strips = self.columns.iter().map(|column| {
            let values = || self.shown().iter().map(|row| row.get(&column.key));
            Strip {
                column,
                cells: values().map(|value| column.cell(value)).collect(),
                right: column.aligns_right(values().flatten()),
            }
        });
        strips.collect()
    }

    /// Every key of the rows: the columns' first, then the others as they come. None twice. Where the tables show
    /// lines, a column may be of those alone, and no key of the rows.
    pub(super) fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = Vec::new();
        let of_rows = |key: &&str| {
            self.lines.is_empty() || self.rows.iter().any(|row| row.get(key).is_some())
        };
        let shown = self.columns.iter().map(|column| column.key.as_str());
        let held = self
            .rows
            .iter()
            .flat_map(|row| row.iter().map(|(key, _)| key));
        for key in shown.filter(of_rows).chain(held) {
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        keys
    }

    /// Title and content of the two headers, leaving out one without content.
    pub(super) fn headers(&self) -> impl Iterator<Item = (&'static str, &Fields)> {
        [
            ("Environment", &self.environment),
            ("Configuration", &self.configuration),
        ]
        .into_iter()
        .filter(|(_, fields)| !fields.is_empty())
    }

    pub(super) fn shown(&self) -> &[Fields] {
        match self.lines.is_empty() {
            true => &self.rows,
            false => &self.lines,
        }
    }
}
