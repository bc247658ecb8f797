//! The estimate against fifty measured configurations.

use crate::cases::{COUNT, case, is_outside};
use crate::common::{self, Sweep};
use serde::Serialize;
use tallow::memory::{estimate, measure};
use tallow::report::{Answer, Column, Fields, Report, format_mib};
use tallow::{Error, Result};

/// A case: predicted and measured peak.
#[derive(Clone, Debug, Serialize)]
struct Row {
    case: usize,
    d_model: usize,
    d_ff: usize,
    num_heads: usize,
    num_layers: usize,
    vocab_size: usize,
    batch_size: usize,
    context_length: usize,
    mode: &'static str,
    attention: &'static str,
    precision: &'static str,
    checkpointing: String,
    predicted_bytes: u64,
    measured_bytes: u64,
    difference_bytes: f64,
    difference_percent: f64,
    predicted_after_forward_bytes: u64,
    measured_after_forward_bytes: u64,
    outside: bool,
}

/// Runs every case, a row each, and returns whether none is outside.
pub fn verify(report: &mut Report, threads: usize) -> Result<bool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| Error::Config {
        config: common::PROGRAM,
        field: "--threads",
        expected: "as many as the system grants".into(),
        got: threads.to_string(),
        hint: error.to_string(),
    })?;
    let mut sweep = Sweep::new(COUNT)?;
    let rows = pool.install(|| {
        let cases = (0..COUNT).take_while(|i| sweep.begins(format_args!("case {i}")));
        cases.map(row).collect::<Result<Vec<Row>>>()
    })?;
    report.columns = columns();
    report.rows = rows.iter().map(Fields::of).collect::<Result<_>>()?;
    let outside = rows.iter().filter(|row| row.outside).count();
    report.answers.extend(answer(&rows, outside));
    report.notes.push(
        "Scratch is predicted for every thread; a thread without work holds none. Records of tensors and ops, about 16 \
         KiB a layer, are not predicted."
            .into(),
    );
    report.notes.extend(sweep.note());
    Ok(outside == 0)
}

fn row(i: usize) -> Result<Row> {
    let (config, workload) = case(i);
    let predicted = estimate(&config, &workload)?;
    let measured = measure(&config, &workload)?;
    let difference = predicted.peak_bytes as f64 - measured.peak_bytes as f64;
    Ok(Row {
        case: i,
        d_model: config.d_model,
        d_ff: config.d_ff,
        num_heads: config.num_heads,
        num_layers: config.num_layers,
        vocab_size: config.vocab_size,
        batch_size: workload.batch_size,
        context_length: workload.sequence_length,
        mode: workload.mode.name(),
        attention: workload.attention.name(),
        precision: workload.precision.name(),
        checkpointing: workload.checkpointing.to_string(),
        predicted_bytes: predicted.peak_bytes,
        measured_bytes: measured.peak_bytes,
        difference_bytes: difference,
        difference_percent: 100.0 * difference / measured.peak_bytes as f64,
        predicted_after_forward_bytes: predicted.after_forward_bytes,
        measured_after_forward_bytes: measured.after_forward_bytes,
        outside: is_outside(predicted.peak_bytes, measured.peak_bytes),
    })
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

/// How near the predictions are; `None` without cases.
fn answer(rows: &[Row], outside: usize) -> Option<Answer> {
    let by_percent = |a: &&Row, b: &&Row| a.difference_percent.total_cmp(&b.difference_percent);
    let by_bytes = |a: &&Row, b: &&Row| a.difference_bytes.total_cmp(&b.difference_bytes);
    let words = |row: &Row| {
        format!(
            "case {}, predicted {}, measured {} ({:+.2}%)",
            row.case,
            format_mib(row.predicted_bytes),
            format_mib(row.measured_bytes),
            row.difference_percent
        )
    };
    let text = format!(
        "{outside} of {} are outside the bounds: at most 2% or 1 MiB too high, whichever is more, and at most 2% too low. \
         Lowest in percent: {}. Highest in bytes: {}.",
        rows.len(),
        words(rows.iter().min_by(by_percent)?),
        words(rows.iter().max_by(by_bytes)?),
    );
    Some(Answer::new("How near are the predictions?", text))
}
