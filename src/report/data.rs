//! CSV and JSON output: every field, unrounded.

use std::io::{self, Write};

use serde_json::{Value, to_string};

use super::{Fields, Report};

pub(super) fn write_csv(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let keys = report.keys();
    if keys.is_empty() {
        return Ok(());
    }
    let mut csv = csv::Writer::from_writer(out);
    csv.write_record(&keys)?;
    for row in &report.rows {
        csv.write_record(keys.iter().map(|key| csv_cell(row.get(key))))?;
    }
    csv.flush()
}

/// Returns a CSV cell: strings unquoted, lists joined by `;`, empty if the value is missing.
fn csv_cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(values)) => {
            let cells: Vec<String> = values.iter().map(|value| csv_cell(Some(value))).collect();
            cells.join(";")
        }
        Some(other) => other.to_string(),
    }
}

/// Writes one JSON document with one line for each row, so that long lists of samples do not spread over many lines.
pub(super) fn write_json(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", document(report)?)
}

fn document(report: &Report) -> serde_json::Result<String> {
    let keys = report.keys();
    let rows = report.rows.iter().map(|row| {
        let complete = keys
            .iter()
            .map(|key| (*key, row.get(key).cloned().unwrap_or_default()));
        to_string(&complete.collect::<Fields>())
    });
    let details = report.details.iter();
    let details = details.filter(|detail| !detail.rows.is_empty() || !detail.answers.is_empty());
    let fields = [
        ("title", to_string(&report.title)?),
        ("environment", to_string(&report.environment)?),
        ("configuration", to_string(&report.configuration)?),
        ("answers", to_string(&report.answers)?),
        ("notes", to_string(&report.notes)?),
        ("rows", lines(rows)?),
        ("details", lines(details.map(document))?),
    ];
    let fields = fields.map(|(key, value)| format!("\"{key}\": {value}"));
    Ok(format!("{{\n{}\n}}", fields.join(",\n")))
}

/// Returns a list with each item on its own line.
fn lines(items: impl Iterator<Item = serde_json::Result<String>>) -> serde_json::Result<String> {
    let items = items.map(|item| Ok(format!("\n{}", item?)));
    let items: Vec<String> = items.collect::<serde_json::Result<_>>()?;
    Ok(format!("[{}]", items.join(",")))
}
