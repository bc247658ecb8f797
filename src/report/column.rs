//! A column of a table: which field it shows, and how.

use serde_json::Value;

use super::number::{fixed, group};

/// What stands where a value could not be measured.
pub(super) const NOT_AVAILABLE: &str = "n/a";

/// One column: the field it shows, its heading, and one unit and precision from top to bottom.
///
/// The formats for people (text, Markdown, LaTeX, Typst) divide, round and group as the column says; CSV and JSON
/// carry the field as it is.
///
/// ```
/// use tallow::report::Column;
///
/// let peak = Column::mib("peak_bytes", "Peak");
/// assert_eq!(peak.heading(), "Peak (MiB)");
/// assert_eq!(peak.cell(Some(&1_610_612_736u64.into())), "1,536.0");
/// assert_eq!(peak.cell(None), "n/a");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// The field's key in each row, and the column's name in CSV.
    pub key: String,
    /// The heading, without the unit.
    pub title: String,
    /// The unit, for example `ms`; empty if there is none.
    pub unit: String,
    /// What a value is divided by to be in `unit`: 1, or 2^20 for bytes shown as MiB.
    pub divisor: f64,
    /// Decimals of a number, of which 1,074 are shown at most (an f64 has no more); `None` shows it as it is.
    pub decimals: Option<usize>,
    /// Whether thousands are separated by commas.
    pub grouped: bool,
}

impl Column {
    /// A column of words, or of numbers that are names (a context length): shown as they are.
    pub fn text(key: impl Into<String>, title: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            title: title.into(),
            unit: String::new(),
            divisor: 1.0,
            decimals: None,
            grouped: false,
        }
    }

    /// A column of quantities in `unit` (which may be empty), with a fixed number of decimals.
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

    /// A column of large whole numbers without a unit: `128,625,408`.
    pub fn count(key: impl Into<String>, title: impl Into<String>) -> Self {
        Self::number(key, title, "", 0).grouped()
    }

    /// A column whose field is in bytes, shown in MiB (2^20 bytes) with one decimal.
    pub fn mib(key: impl Into<String>, title: impl Into<String>) -> Self {
        Self::number(key, title, "MiB", 1)
            .scaled(super::bytes_to_mib(1).recip())
            .grouped()
    }

    /// Divides by `divisor` before showing: `1e9` for FLOP shown in GFLOP.
    pub fn scaled(self, divisor: f64) -> Self {
        Self { divisor, ..self }
    }

    /// Separates thousands by commas.
    pub fn grouped(self) -> Self {
        Self {
            grouped: true,
            ..self
        }
    }

    /// The title with its unit: `Mean (ms)`.
    pub fn heading(&self) -> String {
        if self.unit.is_empty() {
            self.title.clone()
        } else {
            format!("{} ({})", self.title, self.unit)
        }
    }

    /// The value as a reader sees it; `n/a` where it is missing or null.
    pub fn cell(&self, value: Option<&Value>) -> String {
        let Some(value) = value.filter(|value| !value.is_null()) else {
            return NOT_AVAILABLE.to_string();
        };
        let text = match self.number_text(value) {
            Some(text) => text,
            None => return plain(value),
        };
        if self.grouped { group(&text) } else { text }
    }

    /// Whether cells stand at the right: a column of quantities, or one whose every value is a number.
    pub(super) fn aligns_right<'a>(&self, mut values: impl Iterator<Item = &'a Value>) -> bool {
        if self.decimals.is_some() {
            return true;
        }
        let mut any = false;
        let all = values
            .by_ref()
            .filter(|value| !value.is_null())
            .all(|value| {
                any = true;
                value.is_number()
            });
        any && all
    }

    /// `None` unless this is a number that the column rounds or scales.
    fn number_text(&self, value: &Value) -> Option<String> {
        let decimals = self.decimals?;
        // Whole numbers past 2^53 would change on their way through f64.
        if decimals == 0 && self.divisor == 1.0 && (value.is_u64() || value.is_i64()) {
            return Some(value.to_string());
        }
        Some(fixed(value.as_f64()? / self.divisor, decimals))
    }
}

/// A value without JSON's quotes; a list of plain values as `a, b, c`.
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
