//! Writing reports, in each of the formats.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::{Report, data, markup, text};
use crate::{Error, Result, files};

/// The output formats of a [`Report`](super::Report).
///
/// ```
/// use tallow::report::Format;
///
/// let format: Format = "markdown".parse()?;
/// assert_eq!(format, Format::Markdown);
/// assert!("word".parse::<Format>().is_err());
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Format {
    /// An aligned table for a terminal, between configuration and environment ([`Report::to_text`]).
    #[default]
    Text,
    /// A pipe table (GitHub's dialect), below the environment and the configuration.
    Markdown,
    /// The rows alone, as one table: every field under its key, unrounded. Missing values are empty cells.
    Csv,
    /// One document with everything, unrounded. Missing values are `null`.
    Json,
    /// Tables with booktabs rules and at most 8 columns each: a table with more is divided as in
    /// [`Report::to_text`]. The caption is the title, the values that are equal in all rows, and the machine (field
    /// `hardware` of the environment). Answers and notes follow as text; environment and configuration are comments.
    Latex,
}

impl Format {
    /// Every format, in the order of the help texts.
    pub const ALL: [Format; 5] = [
        Format::Text,
        Format::Markdown,
        Format::Csv,
        Format::Json,
        Format::Latex,
    ];

    /// Returns the name that [`FromStr`] parses.
    pub fn name(self) -> &'static str {
        match self {
            Format::Text => "text",
            Format::Markdown => "markdown",
            Format::Csv => "csv",
            Format::Json => "json",
            Format::Latex => "latex",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let mut all = Format::ALL.into_iter();
        let known = all.find(|format| format.name().eq_ignore_ascii_case(name));
        known.ok_or_else(|| {
            let names = Format::ALL.map(Format::name).join(", ");
            Error::config("format", "name", format!("{name:?}"))
                .must_be(format!("one of {names}"), "choose one of these names")
        })
    }
}

impl Report {
    /// Writes the whole document, ending in a newline, and flushes.
    ///
    /// # Errors
    /// [`Error::Io`] if writing to `out` fails. Its path is `output`, because the writer's path is unknown.
    pub fn write_to(&self, format: Format, out: &mut dyn Write) -> Result<()> {
        let written = match format {
            Format::Text => out.write_all(self.to_text(None).as_bytes()),
            Format::Markdown => markup::write_markdown(self, out),
            Format::Csv => data::write_csv(self, out),
            Format::Json => data::write_json(self, out),
            Format::Latex => markup::write_latex(self, out),
        };
        let written = written.and_then(|()| out.flush());
        written.map_err(|e| Error::io("write", "output", e))
    }

    /// Returns the document as text with lines of at most `width` characters. [`write_to`](Self::write_to) sets no limit.
    ///
    /// A column of names whose cells are all equal moves into the header. A wider table is wrapped: blocks of columns
    /// below each other, each of which begins with the columns that tell rows apart. Names that take more than three
    /// fifths of the width are cut where another column then fits beside them.
    ///
    /// ```
    /// use tallow::report::{Column, Fields, Report};
    ///
    /// let row = |length: u64, mean_ms: f64| {
    ///     let mut row = Fields::from_iter([("precision", "f32")]);
    ///     row.insert("context_length", length).insert("mean_ms", mean_ms).insert("cv_percent", 1.5);
    ///     row
    /// };
    /// let report = Report {
    ///     columns: vec![
    ///         Column::text("precision", "Precision"),
    ///         Column::text("context_length", "T"),
    ///         Column::number("mean_ms", "Mean", "ms", 1),
    ///         Column::number("cv_percent", "CV", "%", 1),
    ///     ],
    ///     rows: vec![row(256, 12.3), row(1024, 98.7)],
    ///     ..Default::default()
    /// };
    /// let expected = "\
    /// Configuration:
    ///   precision f32
    ///
    ///    T  Mean (ms)
    /// ────  ─────────
    ///  256       12.3
    /// 1024       98.7
    ///
    ///    T  CV (%)
    /// ────  ──────
    ///  256     1.5
    /// 1024     1.5
    /// ";
    /// assert_eq!(report.to_text(Some(20)), expected);
    /// ```
    pub fn to_text(&self, width: Option<usize>) -> String {
        text::text(self, width)
    }

    /// Writes the document to a file atomically: an existing file is replaced only once the new content is safely on
    /// disk. With CSV, each detail gets a file in the same folder, such as `rows-largest-allocations.csv` for
    /// `rows.csv`; a report that has only details writes only these files. Returns the files that were written.
    ///
    /// # Errors
    /// [`Error::Io`] with the path if it cannot be written.
    pub fn save(&self, format: Format, path: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
        let path = path.as_ref();
        let mut content = Vec::new();
        self.write_to(format, &mut content)?;
        let mut written = Vec::new();
        let is_all_details = self.keys().is_empty() && !self.details.is_empty();
        if format != Format::Csv || !is_all_details {
            files::write_bytes(path, &content)?;
            written.push(path.to_path_buf());
        }
        let has_file = |detail: &&Report| format == Format::Csv && !detail.rows.is_empty();
        for detail in self.details.iter().filter(has_file) {
            written.extend(detail.save(format, beside(path, &detail.title))?);
        }
        Ok(written)
    }
}

/// Returns `rows-largest-allocations.csv` for `rows.csv` and `Largest allocations`.
fn beside(path: &Path, title: &str) -> PathBuf {
    let title = title.to_lowercase();
    let words = title.split(|c: char| !c.is_alphanumeric() && c != '.');
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    let mut name = path.file_stem().unwrap_or_default().to_os_string();
    name.push(format!("-{}", words.join("-")));
    path.with_file_name(name)
        .with_added_extension(path.extension().unwrap_or_default())
}
