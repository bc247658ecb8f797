//! From a row a phase to a line a configuration.

use serde_json::Value;

use super::Fields;
use super::column::NOT_AVAILABLE;
use super::words::{decimals_of, fixed, group};

/// Joins the rows that agree in every field of `by` into one line, in the order in which they first come.
///
/// A line has all fields of its rows, the last row's where they differ, and for each row, under the name that stands
/// in its field `across`, what `cell` makes of it.
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

/// A row's `mean_ms` and `std_ms` as one cell, `9.14 ± 0.38`, in three or four digits of the mean;
/// where there is no mean, the row's `status` if that is not `ok`, else null.
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
