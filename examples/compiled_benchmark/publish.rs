//! Several reports as one document.

use crate::common::{Output, stdout};
use std::path::Path;
use tallow::report::{Fields, Format, Report, save_document};
use tallow::{Error, Result};

/// Refuses, before the work, two tables in one CSV.
pub fn check(output: &Output, is_both: bool) -> Result<()> {
    if !is_both || output.format != Format::Csv || output.output.is_some() {
        return Ok(());
    }
    Err(Error::Config {
        config: crate::common::PROGRAM,
        field: "--part",
        expected: "attention or model, for one CSV is one table".into(),
        got: "both".into(),
        hint: "name the part, or with --output FILE.csv get a file for each".into(),
    })
}

/// Writes the parts where the flags say: one after the other, or as JSON in one object.
pub fn publish(output: &Output, environment: &Fields, mut parts: Vec<Report>) -> Result<()> {
    if let [report] = &mut parts[..] {
        report.environment = environment.clone();
        return output.publish(report);
    }
    if output.format == Format::Json {
        let document = json(environment, &parts)?;
        return match &output.output {
            Some(path) => save_document(&document, path).inspect_err(|_| {
                let _ = stdout::write(&document); // what was measured is not lost
            }),
            None => stdout::write(&document),
        };
    }
    output.publish(&Report {
        environment: environment.clone(),
        details: parts,
        ..Default::default()
    })
}

/// The parts by name, in one object.
pub fn save_json(path: &Path, environment: &Fields, parts: &[Report]) -> Result<()> {
    save_document(&json(environment, parts)?, path)
}

fn json(environment: &Fields, parts: &[Report]) -> Result<Vec<u8>> {
    let mut document = b"{\n".to_vec();
    for (i, report) in parts.iter().enumerate() {
        if i > 0 {
            document.extend(b",\n");
        }
        document.extend(format!("\"{}\": ", report.title.to_lowercase()).bytes());
        let report = Report {
            environment: environment.clone(),
            ..report.clone()
        };
        report.write_to(Format::Json, &mut document)?;
    }
    document.extend(b"}\n");
    Ok(document)
}
