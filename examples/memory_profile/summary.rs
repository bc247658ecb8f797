//! What is said of a run: its row, and for a reader of text its phases and allocations.

use super::common::stdout;
use super::{Run, labels};
use candle_core::Device;
use tallow::Result;
use tallow::bench::MemoryProfile;
use tallow::memory::Estimate;
use tallow::report::{Column, Fields, Format, Report, format_mib};

/// One run: prediction beside measurement, `OOM` where it was not run.
pub fn row(
    run: &Run,
    estimate: &Estimate,
    measured: Option<(&MemoryProfile, usize)>,
    available_bytes: Option<u64>,
) -> Fields {
    let mut row = labels(run);
    row.insert("status", if measured.is_some() { "ok" } else { "OOM" });
    row.insert("estimate_bytes", estimate.peak_bytes);
    row.insert("available_bytes", available_bytes);
    row.insert(
        "account",
        serde_json::to_value(&estimate.breakdown).unwrap_or_default(),
    );
    let Some((profile, count)) = measured else {
        return row;
    };
    row.insert("peak_bytes", profile.peak_bytes);
    row.insert("reserved_peak_bytes", profile.reserved_peak_bytes);
    let error = estimate.peak_bytes as f64 / profile.peak_bytes as f64 - 1.0;
    row.insert("estimate_error_percent", 100.0 * error);
    for phase in &profile.recording.phases {
        let key = format!("{}_peak_bytes", phase.name);
        row.insert(key, profile.recording.peak_bytes_in(phase));
    }
    if let Some(saved) = &profile.saved {
        row.insert("saved_for_backward_bytes", saved.residual_bytes());
        row.insert("saved_tensors", saved.residuals().count());
    }
    row.insert("allocations", profile.allocations);
    row.insert("lost_events", profile.recording.lost_events);
    row.insert("at_peak", objects(&profile.comparison()));
    row.insert(
        "largest",
        objects(&profile.recording.largest_report(count).rows),
    );
    row
}

/// The table of peaks; a GPU's pool has two.
pub fn table(device: &Device) -> Vec<Column> {
    let mut columns = vec![
        Column::text("size", "Size"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("checkpointing", "Checkpointing"),
        Column::text("precision", "Precision"),
        Column::text("execution", "Execution"),
        Column::text("mode", "Mode"),
        Column::text("status", "Status"),
        Column::mib("estimate_bytes", "Estimate"),
        Column::text("peak", "Peak (MiB)"),
        Column::number("estimate_error_percent", "Error", "%", 1),
    ];
    if !device.is_cpu() {
        columns.push(Column::mib("reserved_peak_bytes", "Reserved"));
    }
    for phase in ["forward", "backward", "optimizer"] {
        let title = format!("In {phase}");
        columns.push(Column::mib(format!("{phase}_peak_bytes"), title));
    }
    columns.push(Column::mib("saved_for_backward_bytes", "Saved"));
    columns.push(Column::count("allocations", "Allocations"));
    columns
}

/// The rows as people read them: a peak that could not be measured is OOM.
pub fn in_one_table(rows: &[Fields]) -> Vec<Fields> {
    let line = |row: &Fields| {
        let mut line = row.clone();
        let bytes = row.get("peak_bytes").and_then(|bytes| bytes.as_u64());
        let peak = match bytes {
            Some(_) => Column::mib("peak_bytes", "").cell(row.get("peak_bytes")),
            None => "OOM".into(),
        };
        line.insert("peak", peak);
        line
    };
    rows.iter().map(line).collect()
}

/// The worst moment, and the largest allocation with where it came from.
pub fn comparison_note(title: &str, profile: &MemoryProfile) -> String {
    let recording = &profile.recording;
    let held: Vec<String> = recording
        .holdings_at(recording.peak_at())
        .iter()
        .map(|(holds, bytes)| format!("{holds} {}", format_mib(bytes)))
        .collect();
    let phase = recording.phases.iter().find(|phase| {
        let peak = recording.peak_at();
        (phase.begins_at..=phase.ends_at).contains(&peak)
    });
    let within = phase.map_or("outside of every phase".into(), |p| {
        format!("in {}", p.name)
    });
    let largest = recording.largest(1).first().map_or(String::new(), |block| {
        let (size, phase) = (format_mib(block.bytes), block.phase);
        format!(
            "; the largest allocation is {size}, by {} in {phase}",
            block.origin()
        )
    });
    format!(
        "{title}: the peak is {within}: {}{largest}",
        held.join(", ")
    )
}

/// Phases, prediction beside measurement, allocations and residuals, as text on stdout.
pub fn print_details(title: &str, profile: &MemoryProfile, largest: usize) -> Result<()> {
    let mut out = Vec::new();
    let comparison = Report {
        columns: vec![
            Column::text("holds", "At the peak"),
            Column::mib("estimate_bytes", "Estimate"),
            Column::mib("measured_bytes", "Measured"),
            Column::mib("difference_bytes", "Difference"),
        ],
        rows: profile.comparison(),
        ..Default::default()
    };
    let reports = [
        Some(profile.recording.phase_report()),
        Some(comparison),
        Some(profile.recording.largest_report(largest)),
        profile.saved.as_ref().map(|saved| saved.report()),
    ];
    for (index, report) in reports.into_iter().flatten().enumerate() {
        let heading = match index {
            0 => format!("== {title}\n"),
            _ => String::new(),
        };
        out.extend(heading.bytes());
        report.write_to(Format::Text, &mut out)?;
        out.push(b'\n');
    }
    stdout::write(&out)
}

fn objects(rows: &[Fields]) -> serde_json::Value {
    serde_json::to_value(rows).unwrap_or_default()
}
