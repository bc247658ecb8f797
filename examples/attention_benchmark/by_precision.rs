//! What the rows say together, one precision and number of heads at a time.

use super::grid::{Group, Run, limits};
use super::{Flags, columns};
use crate::analysis::Analysis;
use candle_core::Device;
use tallow::bench::Limit;
use tallow::report::{Fields, Report};

impl Flags {
    /// Adds what the rows of one group of runs say together: under its `name`, where there are several.
    pub fn analyse(
        &self,
        (group, name): (Group, &str),
        runs: &[Run],
        rows: &[Vec<Fields>],
        device: &Device,
        report: &mut Report,
    ) {
        let several = !name.is_empty();
        let own = runs.iter().zip(rows).filter(|(run, _)| run.group == group);
        let own: Vec<Fields> = own.flat_map(|(_, rows)| rows.clone()).collect();
        let analysis = Analysis::of(&own, self.width_key());
        let limits = limits(runs, group, device);
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

/// The rows of a run as the figure reads them: its group is part of an implementation's name, where there are several.
pub fn figure_rows(rows: &[Fields], group: &str) -> Vec<Fields> {
    let rename = |row: &Fields| {
        let mut row = row.clone();
        let name = row.get("implementation").and_then(|v| v.as_str());
        let name = name.map(|name| format!("{name} {group}").trim().to_string());
        row.insert("implementation", name);
        row
    };
    rows.iter().map(rename).collect()
}
