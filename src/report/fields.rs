//! Named values in the order in which they were put in.

use serde::ser::{Serialize, Serializer};
use serde_json::Value;

/// Keys and JSON values in a fixed order: the environment, the configuration or a row of a
/// [`Report`](super::Report).
///
/// A missing value is [`Value::Null`]: `None` becomes one, and so do NaN and infinity, which JSON does not have.
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
    /// No fields.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `value` under `key`: at the end, or in the place of the value that stood there.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> &mut Self {
        let (key, value) = (key.into(), value.into());
        match self.0.iter_mut().find(|(existing, _)| *existing == key) {
            Some((_, old)) => *old = value,
            None => self.0.push((key, value)),
        }
        self
    }

    /// [`insert`](Self::insert)s everything in `other`.
    pub fn merge(&mut self, other: Fields) -> &mut Self {
        for (key, value) in other.0 {
            self.insert(key, value);
        }
        self
    }

    /// The value under `key`, if there is one; it may be null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.iter()
            .find(|(existing, _)| *existing == key)
            .map(|(_, value)| value)
    }

    /// Keys and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
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
