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
    let fields = [
        ("environment", to_string(&report.environment)?),
        ("configuration", to_string(&report.configuration)?),
        ("answers", to_string(&report.answers)?),
        ("notes", to_string(&report.notes)?),
        ("rows", rows(report, "    ")?),
    ];
    let details = report
        .details
        .iter()
        .filter(|detail| !detail.rows.is_empty() || !detail.answers.is_empty());
    let details = details.map(|detail| {
        let (title, answers) = (to_string(&detail.title)?, to_string(&detail.answers)?);
        let (notes, rows) = (to_string(&detail.notes)?, rows(detail, "      ")?);
        Ok(format!(
            "\n    {{\"title\": {title}, \"answers\": {answers}, \"notes\": {notes}, \"rows\": {rows}}}"
        ))
    });
    let details = details.collect::<io::Result<Vec<_>>>()?.join(",");
    let details = (!details.is_empty()).then(|| ("details", format!("[{details}\n  ]")));
    let fields = fields.into_iter().chain(details);
    let lines: Vec<String> = fields
        .map(|(key, value)| format!("  \"{key}\": {value}"))
        .collect();
    writeln!(out, "{{\n{}\n}}", lines.join(",\n"))
}

fn rows(report: &Report, indent: &str) -> serde_json::Result<String> {
    let keys = report.keys();
    let rows = report.rows.iter().map(|row| {
        let complete = keys
            .iter()
            .map(|key| (*key, row.get(key).cloned().unwrap_or_default()));
        Ok(format!(
            "\n{indent}{}",
            to_string(&complete.collect::<Fields>())?
        ))
    });
    let rows: Vec<String> = rows.collect::<serde_json::Result<_>>()?;
    Ok(match rows.is_empty() {
        true => "[]".into(),
        false => format!("[{}\n{}]", rows.join(","), &indent[2..]),
    })
}
