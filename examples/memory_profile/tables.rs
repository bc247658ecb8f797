//! The tables: one row for each run; and over all runs memory by kind, largest allocations and tensors saved for
//! backward.

use crate::common::labels::{Labels, label_columns};
use candle_core::Device;
use serde::Deserialize;
use std::fmt;
use tallow::bench::MemoryProfile;
use tallow::memory::{MemoryBreakdown, MemoryKind};
use tallow::report::{Column, Fields, Report, format_mib};

/// Returns the columns of the table of peaks. On a GPU the reserved peak of its pool is added.
pub fn columns(device: &Device) -> Vec<Column> {
    let mut columns = label_columns();
    columns.extend([
        Column::text("status", "Status"),
        Column::mib("peak", "Peak"),
        Column::text("than_f32", "Than f32"),
    ]);
    if !device.is_cpu() {
        columns.push(Column::mib("reserved_peak_bytes", "Reserved"));
    }
    columns.push(Column::text("peak_phase", "Highest in"));
    for phase in ["forward", "backward", "optimizer"] {
        let key = format!("{phase}_peak_bytes");
        columns.push(Column::mib(key, phase).group("Peak in"));
    }
    columns.extend([
        Column::mib("estimate_bytes", "Predicted"),
        Column::number("estimate_error_percent", "Error", "%", 1),
        Column::mib("saved_for_backward_bytes", "Saved for backward"),
        Column::count("allocations", "Allocations"),
    ]);
    columns
}

/// Returns a row for display: a peak that was not measured is shown as OOM.
pub fn line(row: &Fields) -> Fields {
    let mut line = row.clone();
    let peak = row.get("peak_bytes").filter(|bytes| !bytes.is_null());
    line.insert("peak", peak.cloned().unwrap_or("OOM".into()));
    line
}

/// The fields that count a kind of memory: at the peak of each phase, and at the highest peak, measured and predicted.
const PLACES: [&str; 5] = [
    "forward_bytes",
    "backward_bytes",
    "optimizer_bytes",
    "measured_bytes",
    "estimate_bytes",
];

/// A kind of memory, with its bytes in each of [`PLACES`].
type Kind = (&'static str, [Option<u64>; 5]);

/// Returns the row of a kind of memory.
fn kind_row((holds, bytes): Kind) -> Fields {
    let mut row = Fields::from_iter([("holds", holds)]);
    row.merge(PLACES.into_iter().zip(bytes).collect());
    let difference = bytes[3].zip(bytes[4]);
    let difference = difference.map(|(measured, predicted)| predicted as f64 - measured as f64);
    row.insert("difference_bytes", difference);
    row
}

/// The largest allocation of a run.
#[derive(Deserialize)]
struct Largest {
    bytes: u64,
    blocks: u64,
    holds: String,
    phase: Option<String>,
    origin: String,
}

/// The number of largest allocations that are listed for each run.
const LARGEST: usize = 5;

/// Tables over all runs. Each row begins with its run's name.
#[derive(Default)]
pub struct Details {
    kinds: Vec<Fields>,
    largest: Report,
    saved: Report,
    /// The largest allocation of each run, in words.
    pub largest_words: Vec<String>,
}

/// A run's name among others, and its labels.
pub struct Named<'r>(pub &'r str, pub Labels);

impl Named<'_> {
    /// A row of a table: the run's name first, its labels last.
    fn row(&self, row: Fields) -> Fields {
        let mut named = Fields::from_iter([("run", self.0)]);
        named.merge(row).merge(self.1.fields());
        named
    }

    /// Adds the rows of this run's table to that of all runs.
    fn add_to(&self, all: &mut Report, own: Report) {
        all.columns = own.columns;
        all.rows
            .extend(own.rows.into_iter().map(|row| self.row(row)));
    }
}

impl Details {
    /// Adds the memory of a recorded run.
    pub fn add(&mut self, run: &Named, profile: &MemoryProfile) {
        let (recording, estimate) = (&profile.recording, &profile.estimate);
        let at_peak = recording.bytes_by_kind_at(recording.peak_event());
        let phases = ["forward", "backward", "optimizer"].map(|name| {
            let phase = recording.phases().iter().find(|phase| phase.name == name)?;
            let held = recording.bytes_by_kind_at(recording.peak_event_in(phase));
            Some((recording.peak_bytes_in(phase), held))
        });
        let all = MemoryKind::ALL.map(|own| {
            let [forward, backward, optimizer] =
                [0, 1, 2].map(|i| Some(phases[i].as_ref()?.1.bytes_of(own)));
            let both = [at_peak.bytes_of(own), estimate.breakdown.bytes_of(own)].map(Some);
            (own.name(), [forward, backward, optimizer, both[0], both[1]])
        });
        let is_shown = |(holds, bytes): &Kind| {
            let most = bytes.iter().flatten().max();
            *holds != MemoryKind::Other.name() && most > Some(&(profile.peak_bytes / 100))
        };
        let (shown, small): (Vec<Kind>, Vec<Kind>) = all.into_iter().partition(is_shown);
        let other = small.into_iter().reduce(|(_, a), (name, b)| {
            let both = std::array::from_fn(|i| a[i].zip(b[i]).map(|(a, b)| a + b));
            (name, both)
        });
        let [forward, backward, optimizer] = [0, 1, 2].map(|i| Some(phases[i].as_ref()?.0));
        let both = [profile.peak_bytes, estimate.peak_bytes].map(Some);
        let sum = ("peak", [forward, backward, optimizer, both[0], both[1]]);
        let kinds = shown.into_iter().chain(other).chain([sum]);
        self.kinds.extend(kinds.map(|kind| run.row(kind_row(kind))));
        let largest = recording.largest_report(LARGEST);
        if let Some(largest) = largest.rows.first().and_then(|row| row.read::<Largest>()) {
            self.largest_words.push(format!("{}: {largest}", run.0));
        }
        run.add_to(&mut self.largest, largest);
        if !profile.saved.tensors.is_empty() {
            run.add_to(&mut self.saved, profile.saved.report());
        }
    }

    /// Adds the prediction for a run that does not fit, or is planned.
    pub fn add_predicted(&mut self, run: &Named, breakdown: &MemoryBreakdown) {
        let kinds = MemoryKind::ALL.map(|kind| (kind.name(), breakdown.bytes_of(kind)));
        let kinds = kinds.into_iter().filter(|(_, bytes)| *bytes > 0);
        for (holds, bytes) in kinds.chain([("peak", breakdown.peak_bytes())]) {
            let bytes = [None, None, None, None, Some(bytes)];
            self.kinds.push(run.row(kind_row((holds, bytes))));
        }
    }

    /// The tables that have rows.
    pub fn into_tables(self) -> Vec<Report> {
        let mib = |key: &str, title: &str| Column::mib(key, title);
        let phase = |key: &str, title: &str| mib(key, title).group("At the peak of");
        let columns = vec![
            Column::text("holds", "Holds"),
            phase("forward_bytes", "forward"),
            phase("backward_bytes", "backward"),
            phase("optimizer_bytes", "optimizer"),
            mib("measured_bytes", "measured").group("At the highest peak"),
            mib("estimate_bytes", "predicted").group("At the highest peak"),
            mib("difference_bytes", "Difference"),
        ];
        let kinds = Report {
            columns,
            rows: self.kinds,
            ..Default::default()
        };
        let tables = [
            ("Memory by kind at each peak", kinds),
            ("Largest allocations", self.largest),
            ("Saved for backward", self.saved),
        ];
        let tables = tables.into_iter().map(|(title, own)| Report {
            title: title.into(),
            columns: [vec![Column::text("run", "Run")], own.columns].concat(),
            ..own
        });
        tables.filter(|table| !table.rows.is_empty()).collect()
    }
}

/// Size and number of the largest blocks, what they hold, and where they come from.
impl fmt::Display for Largest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            blocks,
            holds,
            origin,
            ..
        } = self;
        let bytes = format_mib(self.bytes);
        write!(f, "{bytes} ({blocks} of them), {holds} from {origin}")?;
        self.phase
            .iter()
            .try_for_each(|phase| write!(f, " in {phase}"))
    }
}
