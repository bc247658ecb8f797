//! The tables: one row for each run; and over all runs memory by kind, largest allocations and tensors saved for
//! backward.

use crate::common::runs::append;
use crate::common::words::label_columns;
use tallow::bench::{EndToEnd, MemoryProfile};
use tallow::memory::{MemoryBreakdown, MemoryKind};
use tallow::report::{Column, Fields, Report, format_mib};

/// Returns the columns of the table of peaks.
pub fn columns() -> Vec<Column> {
    let peak = |phase: &str| Column::mib(format!("{phase}_peak_bytes"), phase).group("Peak in");
    let mut columns = label_columns();
    columns.extend([
        Column::text("status", "Status"),
        Column::mib("peak_bytes", "Peak"),
        Column::mib("reserved_peak_bytes", "Reserved"),
        Column::text("peak_phase", "Highest in"),
        peak("forward"),
        peak("backward"),
        peak("optimizer"),
        Column::mib("estimate_bytes", "Predicted"),
        Column::number("estimate_error_percent", "Error", "%", 1),
        Column::mib("saved_for_backward_bytes", "Saved for backward"),
        Column::count("allocations", "Allocations"),
    ]);
    columns
}

/// A kind of memory, with its bytes at the peaks of forward, backward and optimizer, and at the highest peak, measured
/// and predicted.
type Kind = (&'static str, [Option<u64>; 5]);

/// Returns a table with a row for each kind of memory of a run.
fn kind_table(kinds: impl Iterator<Item = Kind>) -> Report {
    let phase = |name: &str| Column::mib(format!("{name}_bytes"), name).group("At the peak of");
    let highest = |key: &str, title: &str| Column::mib(key, title).group("At the highest peak");
    let columns = vec![
        Column::text("holds", "Holds"),
        phase("forward"),
        phase("backward"),
        phase("optimizer"),
        highest("measured_bytes", "measured"),
        highest("estimate_bytes", "predicted"),
    ];
    let rows = kinds.map(|(holds, bytes)| {
        let mut row = Fields::from_iter([("holds", holds)]);
        for (column, bytes) in columns[1..].iter().zip(bytes) {
            row.insert(&column.key, bytes);
        }
        row
    });
    Report {
        rows: rows.collect(),
        columns,
        ..Default::default()
    }
}

/// The number of largest allocations that are listed for each run.
const LARGEST: usize = 5;

/// Tables over all runs. Each row begins with its run's name.
#[derive(Default)]
pub struct Details {
    kinds: Report,
    largest: Report,
    saved: Report,
    /// The largest allocation of each run, in words.
    pub largest_words: Vec<String>,
}

impl Details {
    /// Adds the memory of a recorded run with this peak.
    pub fn add(&mut self, name: &str, run: &EndToEnd, profile: &MemoryProfile, peak_bytes: u64) {
        let (recording, estimate) = (&profile.recording, &profile.estimate);
        let at_peak = recording.bytes_by_kind_at(recording.peak_event());
        let phases = ["forward", "backward", "optimizer"].map(|name| {
            let phase = recording.phases().iter().find(|phase| phase.name == name)?;
            Some(recording.bytes_by_kind_at(recording.peak_event_in(phase)))
        });
        let all = MemoryKind::ALL.map(|own| {
            let [forward, backward, optimizer] = phases.map(|held| Some(held?.bytes_of(own)));
            let both = [at_peak.bytes_of(own), estimate.breakdown.bytes_of(own)].map(Some);
            (own.name(), [forward, backward, optimizer, both[0], both[1]])
        });
        let is_shown = |(holds, bytes): &Kind| {
            let most = bytes.iter().flatten().max();
            *holds != MemoryKind::Other.name() && most > Some(&(peak_bytes / 100))
        };
        let (shown, small): (Vec<Kind>, Vec<Kind>) = all.into_iter().partition(is_shown);
        let other = small.into_iter().reduce(|(_, a), (name, b)| {
            let both = std::array::from_fn(|i| a[i].zip(b[i]).map(|(a, b)| a + b));
            (name, both)
        });
        let [forward, backward, optimizer] = phases.map(|held| Some(held?.total_bytes()));
        let both = [peak_bytes, estimate.peak_bytes].map(Some);
        let peak = ("peak", [forward, backward, optimizer, both[0], both[1]]);
        let kinds = shown.into_iter().chain(other).chain([peak]);
        append(&mut self.kinds, name, run, kind_table(kinds));
        for block in recording.largest(1) {
            let (bytes, holds) = (format_mib(block.bytes), block.kind.name());
            let (origin, phase) = (block.origin(), block.phase);
            self.largest_words
                .push(format!("{name}: {bytes}, {holds} from {origin} in {phase}"));
        }
        let largest = recording.largest_report(LARGEST);
        append(&mut self.largest, name, run, largest);
        if !profile.saved.tensors.is_empty() {
            append(&mut self.saved, name, run, profile.saved.report());
        }
    }

    /// Adds the prediction for a run that does not fit, or is planned.
    pub fn add_predicted(&mut self, name: &str, run: &EndToEnd, breakdown: &MemoryBreakdown) {
        let kinds = MemoryKind::ALL.map(|kind| (kind.name(), breakdown.bytes_of(kind)));
        let kinds = kinds.into_iter().filter(|(_, bytes)| *bytes > 0);
        let kinds = kinds.chain([("peak", breakdown.peak_bytes())]);
        let kinds = kinds.map(|(holds, bytes)| (holds, [None, None, None, None, Some(bytes)]));
        append(&mut self.kinds, name, run, kind_table(kinds));
    }

    /// The tables that have rows.
    pub fn into_tables(self) -> Vec<Report> {
        let tables = [
            ("Memory by kind at each peak", self.kinds),
            ("Largest allocations", self.largest),
            ("Saved for backward", self.saved),
        ];
        let tables = tables.into_iter().map(|(title, own)| Report {
            title: title.into(),
            notes: Vec::new(), // the report has them, each with its run
            ..own
        });
        tables.filter(|table| !table.rows.is_empty()).collect()
    }
}
