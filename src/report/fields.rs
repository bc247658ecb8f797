//! Fields in insertion order, and pivoting rows of fields.

use super::Speedup;
use super::column::NOT_AVAILABLE;
use super::words::{decimals_of, fixed, group};
use crate::Error;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::Value;
use std::fmt;

/// Keys and JSON values in insertion order: the environment, the configuration or a row of a [`Report`](super::Report).
///
/// A missing value is [`Value::Null`]. `None`, NaN and infinity become null, because JSON cannot represent them.
///
/// ```
/// use tallow::report::Fields;
///
/// let mut row = Fields::new();
/// row.insert("phase", "forward");
/// row.insert("mean_ms", 117.46);
/// row.insert("mfu", None::<f64>);
/// row.insert("phase", "backward"); // replaces, in place
/// assert_eq!(
///     serde_json::to_string(&row)?,
///     r#"{"phase":"backward","mean_ms":117.46,"mfu":null}"#
/// );
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fields(Vec<(String, Value)>);

impl Fields {
    /// Creates an empty list of fields.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the fields of a struct, in their order. `None`, NaN and infinity become null.
    ///
    /// ```
    /// use tallow::report::Fields;
    ///
    /// #[derive(serde::Serialize, serde::Deserialize, PartialEq, Debug)]
    /// struct Row {
    ///     phase: String,
    ///     mean_ms: Option<f64>,
    /// }
    ///
    /// let row = Row { phase: "forward".into(), mean_ms: Some(117.46) };
    /// let fields = Fields::of(&row)?;
    /// assert_eq!(fields.get("mean_ms"), Some(&117.46.into()));
    /// assert_eq!(fields.read::<Row>(), Some(row));
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Data`] if the value does not serialize to a JSON object: for example a number, or a map whose keys are
    /// not strings.
    pub fn of(row: &impl Serialize) -> crate::Result<Self> {
        let json = serde_json::to_string(row);
        let fields = json.and_then(|json| serde_json::from_str(&json));
        fields.map_err(|error| {
            Error::data("fields of a row", error.to_string())
                .must_be("a struct of named fields", "derive Serialize for a struct")
        })
    }

    /// Deserializes a struct that names some of the fields; `None` if one is missing or of another type.
    pub fn read<T: DeserializeOwned>(&self) -> Option<T> {
        let entries = self
            .iter()
            .map(|(key, value)| (key.to_string(), value.clone()));
        serde_json::from_value(Value::Object(entries.collect())).ok()
    }

    /// Sets the value of `key`. An existing key keeps its position; a new one is appended.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        let (key, value) = (key.into(), value.into());
        match self.0.iter_mut().find(|(existing, _)| *existing == key) {
            Some((_, old)) => *old = value,
            None => self.0.push((key, value)),
        }
        self
    }

    /// [Inserts](Self::insert) all fields of `other`.
    pub fn merge(&mut self, other: Fields) -> &mut Self {
        for (key, value) in other.0 {
            self.insert(key, value);
        }
        self
    }

    /// Returns the value of `key`, which may be null; `None` if there is no such key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.iter()
            .find(|(existing, _)| *existing == key)
            .map(|(_, value)| value)
    }

    /// Iterates over keys and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns the number of fields.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no fields.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Fields::new();
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    fields.insert(key, value);
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

impl<K: Into<String>, V: Into<Value>> FromIterator<(K, V)> for Fields {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        let mut fields = Fields::new();
        for (key, value) in pairs {
            fields.insert(key, value);
        }
        fields
    }
}

/// Joins rows that agree in all fields of `by` into one line, in the order of first appearance.
///
/// A line has all fields of its rows; where rows differ, the last one wins. It also has one field for each row: its
/// name is the row's value of `across`, and its value is the result of `cell`.
///
/// ```
/// use tallow::report::{Fields, mean_and_std, pivot};
///
/// let row = |phase: &str, mean_ms: f64| {
///     let mut row = Fields::from_iter([("phase", phase)]);
///     row.insert("context_length", 256).insert("mean_ms", mean_ms).insert("std_ms", 0.06);
///     row
/// };
/// let rows = [row("forward", 0.282), row("backward", 0.661)];
/// let lines = pivot(&rows, &["context_length"], "phase", mean_and_std);
/// assert_eq!(lines.len(), 1);
/// assert_eq!(lines[0].get("forward"), Some(&"0.282 ± 0.060".into()));
/// assert_eq!(lines[0].get("backward"), Some(&"0.661 ± 0.060".into()));
/// ```
pub fn pivot(
    rows: &[Fields],
    by: &[&str],
    across: &str,
    cell: impl Fn(&Fields) -> Value,
) -> Vec<Fields> {
    let mut lines: Vec<Fields> = Vec::new();
    for row in rows {
        let same = |line: &Fields| by.iter().all(|key| line.get(key) == row.get(key));
        let place = lines.iter().position(same).unwrap_or_else(|| {
            lines.push(Fields::new());
            lines.len() - 1
        });
        let line = &mut lines[place];
        line.merge(row.clone());
        if let Some(Value::String(name)) = row.get(across) {
            line.insert(name, cell(row));
        }
    }
    lines
}

/// Formats `mean_ms` and `std_ms` of a row as one cell, `9.14 ± 0.38`, with three or four digits of the mean. Without a
/// mean, it returns the row's `status` if that is not `ok`, else null.
///
/// ```
/// use tallow::report::{Fields, mean_and_std};
///
/// let measured = Fields::from_iter([("mean_ms", 9.138), ("std_ms", 0.381)]);
/// assert_eq!(mean_and_std(&measured), "9.14 ± 0.38");
/// let failed = Fields::from_iter([("status", "OOM")]);
/// assert_eq!(mean_and_std(&failed), "OOM");
/// ```
pub fn mean_and_std(row: &Fields) -> Value {
    let number = |key: &str| row.get(key)?.as_f64();
    let Some(mean) = number("mean_ms") else {
        let status = row.get("status").filter(|status| **status != "ok");
        return status.cloned().unwrap_or_default();
    };
    let text = |value| group(&fixed(value, decimals_of(mean)));
    let std = number("std_ms").map_or(NOT_AVAILABLE.into(), text);
    format!("{} ± {std}", text(mean)).into()
}

/// Returns the speedup of `row` over `before`, from `mean_ms`, `std_ms` and `n`; `None` if one of them is missing.
///
/// ```
/// use tallow::report::{Statistics, speedup};
///
/// let eager = Statistics::new(&[10.0, 10.1, 9.9, 10.0])?.fields();
/// let planned = Statistics::new(&[5.0, 5.1, 4.9, 5.0])?.fields();
/// assert_eq!(speedup(&eager, &planned).unwrap().ratio, 2.0);
/// assert!(speedup(&eager, &Default::default()).is_none());
/// # Ok::<(), tallow::Error>(())
/// ```
pub fn speedup(before: &Fields, row: &Fields) -> Option<Speedup> {
    let part = |row: &Fields| {
        let number = |key: &str| row.get(key)?.as_f64();
        Some((number("mean_ms")?, number("std_ms")?, number("n")? as usize))
    };
    Speedup::of_means(part(before)?, part(row)?)
}
