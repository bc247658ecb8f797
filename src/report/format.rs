//! The six output formats, by name.

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// How a [`Report`](super::Report) is written.
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
    /// An aligned table for a terminal, between the configuration and the environment ([`Layout`](super::Layout)).
    #[default]
    Text,
    /// A pipe table (GitHub's dialect), under the environment and the configuration.
    Markdown,
    /// The rows alone, one table: every field under its key, unrounded; what is missing is an empty cell.
    Csv,
    /// One document with everything, unrounded; what is missing is `null`.
    Json,
    /// A `tabular` with booktabs rules; environment and configuration as comments.
    Latex,
    /// A `#table`; environment and configuration as comments.
    Typst,
}

impl Format {
    /// Every format, in the order in which help texts list them.
    pub const ALL: [Format; 6] = [
        Format::Text,
        Format::Markdown,
        Format::Csv,
        Format::Json,
        Format::Latex,
        Format::Typst,
    ];

    /// The name that [`FromStr`] takes.
    pub fn name(self) -> &'static str {
        match self {
            Format::Text => "text",
            Format::Markdown => "markdown",
            Format::Csv => "csv",
            Format::Json => "json",
            Format::Latex => "latex",
            Format::Typst => "typst",
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
        Format::ALL
            .into_iter()
            .find(|format| format.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| {
                let names: Vec<_> = Format::ALL.iter().map(|format| format.name()).collect();
                Error::Config {
                    config: "format",
                    field: "name",
                    expected: format!("one of {}", names.join(", ")),
                    got: format!("{name:?}"),
                    hint: "choose one of these names".into(),
                }
            })
    }
}
