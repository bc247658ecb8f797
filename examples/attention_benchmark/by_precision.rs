//! What the rows say together, one precision at a time.

use super::grid::{Arithmetic, Run, limits};
use super::{Flags, columns};
use candle_core::Device;
use tallow::bench::{Analysis, Limit};
use tallow::report::{Fields, Report};

impl Flags {
    /// Adds what the rows of one arithmetic say together: under its name, where there are several.
    pub fn analyse(
        &self,
        arithmetic: Arithmetic,
        runs: &[Run],
        rows: &[Fields],
        several: bool,
        device: &Device,
        report: &mut Report,
    ) {
        let name = arithmetic.name();
        let own = rows.iter();
        let own = own.filter(|row| row.get("precision") == Some(&name.into()));
        let own: Vec<Fields> = own.cloned().collect();
        let analysis = Analysis::of(&own, self.width_key());
        let limits = limits(runs, arithmetic, device);
        report
            .lines
            .extend(columns::lines(&own, &analysis, self.width_key()));
        let words = analysis.notes(self.width_name()).into_iter();
        let words = words.chain(limits.iter().map(Limit::to_string));
        let own = |text: String| match several {
            true => format!("{name}: {text}"),
            false => text,
        };
        report.notes.extend(words.map(own));
        let tables = analysis.tables(self.width_name()).into_iter();
        let tables = tables.chain(limits.iter().map(Limit::table));
        report.details.extend(tables.map(|table| Report {
            title: own(table.title),
            ..table
        }));
        let mut value = serde_json::to_value(&analysis).unwrap_or_default();
        if let serde_json::Value::Object(parts) = &mut value {
            let limits = serde_json::to_value(&limits).unwrap_or_default();
            parts.insert("limits".into(), limits);
        }
        match value {
            serde_json::Value::Object(parts) if !several => {
                report.analysis = parts.into_iter().collect();
            }
            value => {
                report.analysis.insert(name, value);
            }
        }
    }
}

/// The rows as the figure reads them: what they are computed in is part of an implementation's name, where that
/// differs.
pub fn figure_rows(rows: &[Fields], several: bool) -> Vec<Fields> {
    let rename = |row: &Fields| {
        let mut row = row.clone();
        let text = |key: &str| row.get(key).and_then(|v| v.as_str()).map(String::from);
        if let (true, Some(name), Some(precision)) =
            (several, text("implementation"), text("precision"))
        {
            row.insert("implementation", format!("{name} {precision}"));
        }
        row
    };
    rows.iter().map(rename).collect()
}
