//! The formats for programs: nothing rounded, nothing left out.

use std::io::{self, Write};

use serde_json::Value;

use super::{Fields, Report};

/// A header of keys, then a record for each row.
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

/// Strings as they are, everything else as JSON; nothing for what is missing, which is how readers of CSV know it.
fn csv_cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// One document, one line for each row, so that long lists of samples stay out of the way.
pub(super) fn write_json(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "{{\n  \"environment\": ")?;
    serde_json::to_writer(&mut *out, &report.environment)?;
    write!(out, ",\n  \"configuration\": ")?;
    serde_json::to_writer(&mut *out, &report.configuration)?;
    write!(out, ",\n  \"notes\": ")?;
    serde_json::to_writer(&mut *out, &report.notes)?;
    write!(out, ",\n  \"analysis\": ")?;
    serde_json::to_writer(&mut *out, &report.analysis)?;
    write!(out, ",\n  \"rows\": [")?;
    write_rows(report, "    ", out)?;
    write!(out, "]")?;
    let details = report
        .details
        .iter()
        .filter(|detail| !detail.rows.is_empty());
    let mut details = details.enumerate().peekable();
    if details.peek().is_some() {
        write!(out, ",\n  \"details\": [")?;
        for (index, detail) in details {
            let comma = if index == 0 { "" } else { "," };
            write!(out, "{comma}\n    {{\"title\": ")?;
            serde_json::to_writer(&mut *out, &detail.title)?;
            write!(out, ", \"notes\": ")?;
            serde_json::to_writer(&mut *out, &detail.notes)?;
            write!(out, ", \"rows\": [")?;
            write_rows(detail, "      ", out)?;
            write!(out, "]}}")?;
        }
        write!(out, "\n  ]")?;
    }
    writeln!(out, "\n}}")
}

/// The rows, a line each, all with the same keys.
fn write_rows(report: &Report, indent: &str, out: &mut dyn Write) -> io::Result<()> {
    let keys = report.keys();
    for (index, row) in report.rows.iter().enumerate() {
        let complete: Fields = keys
            .iter()
            .map(|key| (*key, row.get(key).cloned().unwrap_or(Value::Null)))
            .collect();
        write!(out, "{}\n{indent}", if index == 0 { "" } else { "," })?;
        serde_json::to_writer(&mut *out, &complete)?;
    }
    match report.rows.is_empty() {
        true => Ok(()),
        false => write!(out, "\n{}", &indent[2..]),
    }
}
