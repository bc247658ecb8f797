//! Table columns: the field that each shows, and its format.

use serde_json::Value;

use super::words::{MIB, decimals_of, fixed, group};

/// The text of a cell without a value.
pub(super) const NOT_AVAILABLE: &str = "n/a";

/// A table column: its field, heading, unit and number format.
///
/// Text, Markdown and LaTeX divide, round and group values as the column specifies; CSV and JSON do not.
///
/// ```
/// use tallow::report::Column;
///
/// let peak = Column::mib("peak_bytes", "Peak");
/// assert_eq!(peak.heading(), "Peak (MiB)");
/// assert_eq!(peak.cell(Some(&1_610_612_736u64.into())), "1,536.0");
/// assert_eq!(peak.cell(None), "n/a");
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Column {
    /// The field's key in each row, and the column's name in CSV.
    pub key: String,
    /// The heading, without the unit.
    pub title: String,
    /// The unit, for example `ms`; empty if there is none.
    pub unit: String,
    /// The divisor that converts a value to `unit`: 1, or 2^20 for bytes shown as MiB.
    pub divisor: f64,
    /// The number of decimals, at most 1,074 (an f64 has no more); `None` shows the value unchanged.
    pub decimals: Option<usize>,
    /// Whether large numbers get fewer decimals, so that all have three or four digits.
    pub rounded: bool,
    /// Whether thousands are separated by commas.
    pub grouped: bool,
    /// The heading above `title`, shared by neighbouring columns that have the same one; empty if there is none.
    pub group: String,
}

impl Column {
    /// Creates a column of words, or of numbers that are labels (a context length). Values are shown unchanged.
    pub fn text(key: impl Into<String>, title: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            title: title.into(),
            divisor: 1.0,
            ..Self::default()
        }
    }

    /// Creates a column of quantities in `unit` (which may be empty), with a fixed number of decimals.
    pub fn number(
        key: impl Into<String>,
        title: impl Into<String>,
        unit: impl Into<String>,
        decimals: usize,
    ) -> Self {
        Self {
            unit: unit.into(),
            decimals: Some(decimals),
            ..Self::text(key, title)
        }
    }

    /// Creates a column of times in ms with three or four digits: `0.074`, `12.35`, `1,345`.
    pub fn ms(key: impl Into<String>, title: impl Into<String>) -> Self {
        Self {
            rounded: true,
            ..Self::number(key, title, "ms", 3).grouped()
        }
    }

    /// Creates a column of large integers without a unit: `128,625,408`.
    pub fn count(key: impl Into<String>, title: impl Into<String>) -> Self {
        Self::number(key, title, "", 0).grouped()
    }

    /// Creates a column of bytes, shown in MiB (2^20 bytes) with one decimal.
    pub fn mib(key: impl Into<String>, title: impl Into<String>) -> Self {
        let column = Self::number(key, title, "MiB", 1);
        column.scaled(MIB).grouped()
    }

    /// Sets the divisor: `1e9` shows FLOP in GFLOP.
    pub fn scaled(self, divisor: f64) -> Self {
        Self { divisor, ..self }
    }

    /// Separates thousands by commas.
    pub fn grouped(mut self) -> Self {
        self.grouped = true;
        self
    }

    /// Sets the heading above the title, which neighbours may share: `Forward` above `eager` and `planned`.
    pub fn group(mut self, heading: impl Into<String>) -> Self {
        self.group = heading.into();
        self
    }

    /// Returns the full heading: the shared heading, the title and the unit, as in `Mean (ms)` or `Forward eager (ms)`.
    pub fn heading(&self) -> String {
        match self.group.is_empty() {
            true => self.own_heading(),
            false => format!("{} {}", self.group, self.own_heading()),
        }
    }

    pub(super) fn own_heading(&self) -> String {
        match self.unit.is_empty() {
            true => self.title.clone(),
            false => format!("{} ({})", self.title, self.unit),
        }
    }

    /// Returns the formatted value; `n/a` if it is missing or null.
    pub fn cell(&self, value: Option<&Value>) -> String {
        let value = value.unwrap_or(&Value::Null);
        match self.number_text(value) {
            Some(text) if self.grouped => group(&text),
            Some(text) => text,
            None => plain(value),
        }
    }

    /// Returns whether cells are right-aligned: the column has decimals, or all of its values are numbers.
    pub(super) fn aligns_right<'a>(&self, values: impl Iterator<Item = &'a Value>) -> bool {
        let mut values = values.filter(|value| !value.is_null()).peekable();
        let are_numbers = values.peek().is_some() && values.all(Value::is_number);
        self.decimals.is_some() || are_numbers
    }

    /// Returns the text of a number that the column rounds or scales, else `None`.
    fn number_text(&self, value: &Value) -> Option<String> {
        let decimals = self.decimals?;
        // Integers above 2^53 would not survive the conversion to f64.
        if decimals == 0 && self.divisor == 1.0 && (value.is_u64() || value.is_i64()) {
            return Some(value.to_string());
        }
        let value = value.as_f64()? / self.divisor;
        let most = if self.rounded {
            decimals_of(value)
        } else {
            decimals
        };
        Some(fixed(value, decimals.min(most)))
    }
}

/// Returns a value without JSON's quotes; a list of scalars becomes `a, b, c`.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => NOT_AVAILABLE.to_string(),
        Value::String(text) => text.clone(),
        Value::Array(items) if !items.iter().any(|x| x.is_array() || x.is_object()) => {
            items.iter().map(plain).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}
