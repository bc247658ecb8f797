//! The estimate against fifty measured configurations.

use crate::cases::{COUNT, case, is_outside};
use crate::common;
use tallow::memory::{Workload, estimate, measure};
use tallow::model::TransformerConfig;
use tallow::report::{Column, Fields, Report, format_mib};
use tallow::{Error, Result};

/// Runs every case, a row each, and says whether none is outside.
pub fn verify(report: &mut Report, threads: usize) -> Result<bool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| Error::Config {
        config: common::PROGRAM,
        field: "--threads",
        expected: "as many as the system grants".into(),
        got: threads.to_string(),
        hint: error.to_string(),
    })?;
    report.columns = columns();
    report.rows = pool.install(|| (0..COUNT).map(row).collect::<Result<_>>())?;
    let outside = count(report, "outside", &true.into());
    report.notes.extend(notes(report, outside));
    report.analysis.insert("outside", outside);
    Ok(outside == 0)
}

fn row(i: usize) -> Result<Fields> {
    let (config, workload) = case(i);
    common::progress(format_args!("case {i} of {COUNT}"));
    let predicted = estimate(&config, &workload)?;
    let measured = measure(&config, &workload)?;
    let difference = predicted.peak_bytes as f64 - measured.peak_bytes as f64;
    let mut row = labels(i, &config, &workload);
    row.insert("predicted_bytes", predicted.peak_bytes);
    row.insert("measured_bytes", measured.peak_bytes);
    row.insert("difference_bytes", difference);
    let percent = 100.0 * difference / measured.peak_bytes as f64;
    row.insert("difference_percent", percent);
    let pair = [predicted.after_forward_bytes, measured.after_forward_bytes];
    row.insert("predicted_after_forward_bytes", pair[0]);
    row.insert("measured_after_forward_bytes", pair[1]);
    let outside = is_outside(predicted.peak_bytes, measured.peak_bytes);
    row.insert("outside", outside);
    Ok(row)
}

fn labels(i: usize, config: &TransformerConfig, workload: &Workload) -> Fields {
    let mut row = Fields::new();
    row.insert("case", i);
    row.insert("d_model", config.d_model);
    row.insert("d_ff", config.d_ff);
    row.insert("num_heads", config.num_heads);
    row.insert("num_layers", config.num_layers);
    row.insert("vocab_size", config.vocab_size);
    row.insert("batch_size", workload.batch_size);
    row.insert("context_length", workload.sequence_length);
    row.insert("mode", workload.mode.name());
    row.insert("attention", workload.attention.name());
    row.insert("precision", workload.precision.name());
    row.insert("checkpointing", workload.checkpointing.to_string());
    row
}

fn columns() -> Vec<Column> {
    vec![
        Column::text("case", "Case"),
        Column::text("d_model", "D").minor(1),
        Column::text("d_ff", "F").minor(1),
        Column::text("num_heads", "H").minor(1),
        Column::text("num_layers", "L").minor(1),
        Column::text("vocab_size", "V").minor(1),
        Column::text("batch_size", "B").minor(1),
        Column::text("context_length", "T").minor(1),
        Column::text("mode", "Mode"),
        Column::text("attention", "Attention"),
        Column::text("precision", "Precision"),
        Column::text("checkpointing", "Checkpointing").minor(1),
        Column::mib("predicted_bytes", "Predicted"),
        Column::mib("measured_bytes", "Measured"),
        Column::number("difference_bytes", "Difference", "MiB", 2)
            .scaled(1048576.0)
            .minor(2),
        Column::number("difference_percent", "Difference", "%", 2),
        Column::text("outside", "Outside"),
    ]
}

fn count(report: &Report, key: &str, value: &serde_json::Value) -> usize {
    let rows = report.rows.iter();
    rows.filter(|row| row.get(key) == Some(value)).count()
}

fn notes(report: &Report, outside: usize) -> Vec<String> {
    let number = |row: &Fields, key: &str| row.get(key).and_then(|value| value.as_f64());
    let by = |row: &&Fields| number(row, "difference_percent").unwrap_or(f64::NAN);
    let under = report.rows.iter().min_by(|a, b| by(a).total_cmp(&by(b)));
    let over = report.rows.iter().max_by(|a, b| {
        let [a, b] = [a, b].map(|row| number(row, "difference_bytes").unwrap_or(f64::NAN));
        a.total_cmp(&b)
    });
    let describe = |what: &str, row: &Fields| {
        let mib = |key| format_mib(number(row, key).unwrap_or_default() as u64);
        format!(
            "{what}: case {}, predicted {}, measured {} ({:+.2}%).",
            row.get("case").cloned().unwrap_or_default(),
            mib("predicted_bytes"),
            mib("measured_bytes"),
            by(&row)
        )
    };
    let mut notes = vec![format!(
        "{outside} of {} are outside: further off than 2% or 1 MiB, whichever is more, or more than 2% too low.",
        report.rows.len()
    )];
    notes.extend(under.map(|row| describe("The furthest below, in percent", row)));
    notes.extend(over.map(|row| describe("The furthest above, in bytes", row)));
    notes.push(
        "The breakdown counts blocks of every thread; a thread without work holds none. It leaves out records of \
         tensors \
         and ops, some 16 KiB a layer."
            .into(),
    );
    notes
}
