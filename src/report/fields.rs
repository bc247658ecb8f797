//! Fields in insertion order.

use crate::Error;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use serde_json::Value;

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
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fields(IndexMap<String, Value>);

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
    /// #[derive(serde::Serialize)]
    /// struct Row {
    ///     phase: String,
    ///     mean_ms: Option<f64>,
    /// }
    ///
    /// let fields = Fields::of(&Row { phase: "forward".into(), mean_ms: Some(117.46) })?;
    /// assert_eq!(fields.get("mean_ms"), Some(&117.46.into()));
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

    /// Sets the value of `key`. An existing key keeps its position; a new one is appended.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        self.0.insert(key.into(), value.into());
        self
    }

    /// [Inserts](Self::insert) all fields of `other`.
    pub fn merge(&mut self, other: Fields) -> &mut Self {
        self.0.extend(other.0);
        self
    }

    /// Returns the value of `key`, which may be null; `None` if there is no such key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Iterates over keys and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns whether there are no fields.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<K: Into<String>, V: Into<Value>> FromIterator<(K, V)> for Fields {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        let pairs = pairs.into_iter();
        let pairs = pairs.map(|(key, value)| (key.into(), value.into()));
        Self(pairs.collect())
    }
}
