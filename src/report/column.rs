//! A column of a table: which field it shows, and how.

use serde_json::Value;

use super::words::{decimals_of, fixed, group};

/// What stands where a value could not be measured.
pub(super) const NOT_AVAILABLE: &str = "n/a";

/// One column: the field it shows, its heading, and one unit and precision from top to bottom.
///
/// The formats for people (text, Markdown, LaTeX) divide, round and group as the column says; CSV and JSON
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
#[derive(Debug, Clone, Default, PartialEq)]
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
    /// Whether large numbers have fewer decimals, so that all have three or four digits.
    pub rounded: bool,
    /// Whether thousands are separated by commas.
    pub grouped: bool,
    /// The heading over it and those of its neighbours that have the same; empty if there is none.
    pub under: String,
    /// Where text has no room for all columns, those with the most are left out first, of equals the last; 0 for what a
    /// reader cannot do without.
    pub minor: u8,
}

impl Column {
    /// A column of words, or of numbers that are names (a context length): shown as they are.
    pub fn text(key: impl Into<String>, title: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            title: title.into(),
            divisor: 1.0,
            ..Self::default()
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

    /// A column of times in ms, in three or four digits: `0.074`, `12.35`, `1,345`.
    pub fn ms(key: impl Into<String>, title: impl Into<String>) -> Self {
        Self {
            rounded: true,
            ..Self::number(key, title, "ms", 3).grouped()
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
    pub fn grouped(mut self) -> Self {
        self.grouped = true;
        self
    }

    /// Puts it under a heading that its neighbours may share: `Forward` over `eager` and `planned`.
    pub fn under(mut self, heading: impl Into<String>) -> Self {
        self.under = heading.into();
        self
    }

    /// Says how minor it is: the more, the earlier it is left out where text has no room.
    pub fn minor(self, minor: u8) -> Self {
        Self { minor, ..self }
    }

    /// The title with what it is under, and its unit: `Mean (ms)`, `Forward eager (ms)`.
    pub fn heading(&self) -> String {
        match self.under.is_empty() {
            true => self.own_heading(),
            false => format!("{} {}", self.under, self.own_heading()),
        }
    }

    pub(super) fn own_heading(&self) -> String {
        match self.unit.is_empty() {
            true => self.title.clone(),
            false => format!("{} ({})", self.title, self.unit),
        }
    }

    /// Whether a reader means it by `name`: its key, its title, its heading, or the heading over it, with or without the
    /// unit.
    pub(super) fn is_called(&self, name: &str) -> bool {
        let over = format!("{} ({})", self.under, self.unit);
        let names = [&self.key, &self.title, &self.heading(), &self.under, &over];
        names.iter().any(|own| own.eq_ignore_ascii_case(name))
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
    pub(super) fn aligns_right<'a>(&self, values: impl Iterator<Item = &'a Value>) -> bool {
        if self.decimals.is_some() {
            return true;
        }
        let mut values = values.filter(|value| !value.is_null()).peekable();
        values.peek().is_some() && values.all(Value::is_number)
    }

    /// `None` unless this is a number that the column rounds or scales.
    fn number_text(&self, value: &Value) -> Option<String> {
        let decimals = self.decimals?;
        // Whole numbers past 2^53 would change on their way through f64.
        if decimals == 0 && self.divisor == 1.0 && (value.is_u64() || value.is_i64()) {
            return Some(value.to_string());
        }
        let value = value.as_f64()? / self.divisor;
        let decimals = match self.rounded {
            true => decimals.min(decimals_of(value)),
            false => decimals,
        };
        Some(fixed(value, decimals))
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
