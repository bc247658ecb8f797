//! Lines of a profile's ops and kernels.

use tallow::profile::ProfileReport;
use tallow::report::{Fields, list_in_note};

/// Returns the rows of a summary under their short names, and a note on other ops whose work is inside theirs.
pub fn lines(summary: &ProfileReport) -> (Vec<Fields>, Option<String>) {
    let mut lines = summary.fields();
    let mut inside: Vec<String> = Vec::new();
    for (line, row) in lines.iter_mut().zip(&summary.rows) {
        let name = row.short_name();
        line.insert("name", name.split_once(" (").map_or(name, |(name, _)| name));
        let parts = row.inside.map(|parts| {
            let op = row.name.trim_end_matches(" backward");
            format!("{op} has {parts}")
        });
        inside.extend(parts.filter(|parts| !inside.contains(parts)));
    }
    let note = (!inside.is_empty()).then(|| list_in_note("Inside ops", &inside));
    (lines, note)
}
