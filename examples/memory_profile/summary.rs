//! What is said of the runs: a row each, and for all of them their phases, prediction beside measurement, largest
//! allocations and what is saved for backward.

use super::{Run, labels};
use candle_core::Device;
use tallow::bench::MemoryProfile;
use tallow::memory::{Estimate, MemoryKind};
use tallow::report::{Column, Fields, Report};

/// One run: prediction beside measurement, `OOM` where it was not run.
pub fn row(
    run: &Run,
    estimate: &Estimate,
    measured: Option<&MemoryProfile>,
    available_bytes: Option<u64>,
) -> Fields {
    let mut row = labels(run);
    row.insert("status", if measured.is_some() { "ok" } else { "OOM" });
    row.insert("estimate_bytes", estimate.peak_bytes);
    row.insert("available_bytes", available_bytes);
    let Some(profile) = measured else {
        return row;
    };
    row.insert("peak_bytes", profile.peak_bytes);
    row.insert("reserved_peak_bytes", profile.reserved_peak_bytes);
    let error = estimate.peak_bytes as f64 / profile.peak_bytes as f64 - 1.0;
    row.insert("estimate_error_percent", 100.0 * error);
    let recording = &profile.recording;
    for phase in recording.phases() {
        let key = format!("{}_peak_bytes", phase.name);
        row.insert(key, recording.peak_bytes_in(phase));
    }
    let peak_at = recording.peak_at();
    let mut phases = recording.phases().iter();
    let of_peak = phases.find(|phase| (phase.begins_at..=phase.ends_at).contains(&peak_at));
    row.insert("peak_phase", of_peak.map(|phase| phase.name));
    let saved = &profile.saved;
    if !saved.tensors.is_empty() {
        row.insert("saved_for_backward_bytes", saved.residual_bytes());
        row.insert("saved_tensors", saved.residuals().count());
    }
    row.insert("allocations", profile.allocations);
    row.insert("lost_events", recording.lost_events);
    row
}

/// What tells runs apart.
fn label_columns() -> Vec<Column> {
    vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("checkpointing", "Checkpointing"),
        Column::text("precision", "Precision"),
        Column::text("execution", "Execution"),
        Column::text("mode", "Mode"),
    ]
}

/// The table of peaks; a GPU's pool has two.
pub fn columns(device: &Device) -> Vec<Column> {
    let mut columns = label_columns();
    columns.extend([
        Column::text("status", "Status").minor(2),
        Column::mib("peak", "Peak"),
        Column::mib("estimate_bytes", "Predicted"),
        Column::number("estimate_error_percent", "Error", "%", 1).minor(1),
        Column::number("saved_percent", "Less than f32", "%", 1),
    ]);
    if !device.is_cpu() {
        columns.push(Column::mib("reserved_peak_bytes", "Reserved"));
    }
    for phase in ["forward", "backward", "optimizer"] {
        let key = format!("{phase}_peak_bytes");
        columns.push(Column::mib(key, phase).under("Peak in").minor(3));
    }
    columns.push(Column::text("peak_phase", "Highest in").minor(3));
    columns.push(Column::mib("saved_for_backward_bytes", "Saved for backward").minor(4));
    columns.push(Column::count("allocations", "Allocations").minor(5));
    columns
}

/// The rows as people read them: a peak that could not be measured is OOM, and one that f32 has beside it says how much
/// less it is.
pub fn lines(rows: &[Fields]) -> Vec<Fields> {
    let in_f32 = |row: &Fields| {
        let is_same = |other: &&Fields| {
            let keys = label_columns().into_iter().map(|column| column.key);
            let mut others = keys.filter(|key| key != "precision");
            others.all(|key| row.get(&key) == other.get(&key))
        };
        let f32_rows = rows
            .iter()
            .filter(|row| row.get("precision") == Some(&"f32".into()));
        f32_rows
            .filter(is_same)
            .find_map(|row| row.get("peak_bytes")?.as_f64())
    };
    let line = |row: &Fields| {
        let mut line = row.clone();
        let bytes = row.get("peak_bytes").and_then(|bytes| bytes.as_f64());
        let is_half = row.get("precision") != Some(&"f32".into());
        let saved = in_f32(row).zip(bytes).filter(|_| is_half);
        line.insert(
            "saved_percent",
            saved.map(|(f32, own)| 100.0 * (1.0 - own / f32)),
        );
        line.insert("peak", bytes.map_or("OOM".into(), serde_json::Value::from));
        line
    };
    rows.iter().map(line).collect()
}

/// Tables over all runs, each row with its run.
#[derive(Default)]
pub struct Details {
    phases: Report,
    comparison: Report,
    largest: Report,
    saved: Report,
    refused: Report,
}

impl Details {
    /// Adds what a run has shown, with so many of its largest allocations.
    pub fn add(&mut self, run: &Run, profile: &MemoryProfile, largest: usize) {
        add(&mut self.phases, run, profile.recording.phase_report());
        let compared = profile.comparison();
        let mut differences = Fields::new();
        for row in &compared {
            let holds = row.get("holds").and_then(|holds| holds.as_str());
            let difference = row.get("difference_bytes").cloned();
            differences.insert(holds.unwrap_or_default(), difference);
        }
        let columns = differences.iter().zip(0..).map(|((holds, _), minor)| {
            let column = Column::mib(holds, holds).under("Difference");
            column.minor(if holds == "peak" { 0 } else { minor + 1 })
        });
        let comparison = Report {
            columns: columns.collect(),
            rows: compared,
            lines: vec![differences],
            ..Default::default()
        };
        add(&mut self.comparison, run, comparison);
        add(
            &mut self.largest,
            run,
            profile.recording.largest_report(largest),
        );
        if !profile.saved.tensors.is_empty() {
            add(&mut self.saved, run, profile.saved.report());
        }
    }

    /// Adds the prediction of a run that does not fit.
    pub fn add_refused(&mut self, run: &Run, estimate: &Estimate) {
        let held = MemoryKind::ALL.map(|kind| (kind, estimate.breakdown.bytes_of(kind)));
        let held = || held.iter().filter(|(_, bytes)| *bytes > 0);
        let key = |kind: &MemoryKind| format!("{}_bytes", kind.name().replace(' ', "_"));
        let prediction = Report {
            columns: held()
                .map(|(kind, _)| Column::mib(key(kind), kind.name()).under("Of which"))
                .collect(),
            rows: vec![held().map(|(kind, bytes)| (key(kind), *bytes)).collect()],
            ..Default::default()
        };
        add(&mut self.refused, run, prediction);
    }

    /// Those that have rows, under their titles.
    pub fn into_tables(mut self) -> Vec<Report> {
        // What is not there at one phase's peak is there at another's.
        for table in [&mut self.phases, &mut self.refused] {
            for key in table.columns.iter().map(|column| &column.key) {
                for row in table.rows.iter_mut().filter(|row| row.get(key).is_none()) {
                    row.insert(key, 0);
                }
            }
        }
        let tables = [
            ("What was alive at each phase's peak", self.phases),
            ("At the peak: predicted less measured", self.comparison),
            ("Largest allocations", self.largest),
            ("Saved for backward", self.saved),
            ("What does not fit: its predicted peak", self.refused),
        ];
        let tables = tables
            .into_iter()
            .filter(|(_, table)| !table.rows.is_empty());
        let titled = tables.map(|(title, table)| Report {
            title: title.into(),
            ..table
        });
        titled.collect()
    }
}

/// Adds a run's rows to a table of all runs.
fn add(table: &mut Report, run: &Run, own: Report) {
    for column in label_columns().into_iter().chain(own.columns) {
        if !table.columns.iter().any(|known| known.key == column.key) {
            table.columns.push(column);
        }
    }
    let labelled = |row: Fields| {
        let mut labelled = labels(run);
        labelled.merge(row);
        labelled
    };
    table.rows.extend(own.rows.into_iter().map(labelled));
    table.lines.extend(own.lines.into_iter().map(labelled));
}
