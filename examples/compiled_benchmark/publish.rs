//! Several reports as one document.

use crate::common::{Output, stdout};
use std::path::Path;
use tallow::Result;
use tallow::report::{Format, Report, save_document};

type Parts<'a> = [(&'a str, Report)];

/// Writes the parts where the flags say: one after the other, or as JSON in one object.
pub fn publish(output: &Output, parts: &Parts<'_>) -> Result<()> {
    if let [(_, report)] = parts {
        return output.publish(report);
    }
    let document = match output.format {
        Format::Json => json(parts)?,
        format => one_after_another(parts, format)?,
    };
    match &output.output {
        Some(path) => save_document(&document, path).inspect_err(|_| {
            let _ = stdout::write(&document); // what was measured is not lost
        }),
        None => stdout::write(&document),
    }
}

/// The parts by name, in one object.
pub fn save_json(path: &Path, parts: &Parts<'_>) -> Result<()> {
    save_document(&json(parts)?, path)
}

fn json(parts: &Parts<'_>) -> Result<Vec<u8>> {
    let mut document = b"{\n".to_vec();
    for (i, (name, report)) in parts.iter().enumerate() {
        if i > 0 {
            document.extend(b",\n");
        }
        document.extend(format!("\"{name}\": ").bytes());
        report.write_to(Format::Json, &mut document)?;
    }
    document.extend(b"}\n");
    Ok(document)
}

fn one_after_another(parts: &Parts<'_>, format: Format) -> Result<Vec<u8>> {
    let mut document = Vec::new();
    for (i, (_, report)) in parts.iter().enumerate() {
        if i > 0 {
            document.extend(b"\n\n");
        }
        report.write_to(format, &mut document)?;
    }
    Ok(document)
}
