//! The tables: a row a run, and for all runs their memory by kind, largest allocations and what is saved for backward.

use crate::answers::Row;
use crate::common::runs::label_columns;
use candle_core::Device;
use serde::{Deserialize, Serialize};
use tallow::Result;
use tallow::bench::MemoryProfile;
use tallow::memory::{MemoryBreakdown, MemoryKind};
use tallow::report::{Answer, Column, Fields, Report, format_mib};

/// The table of peaks; a GPU's pool has two.
pub fn columns(device: &Device) -> Vec<Column> {
    let mut columns = label_columns();
    columns.extend([
        Column::text("status", "Status").minor(5),
        Column::mib("peak", "Peak"),
        Column::text("than_f32", "Than f32"),
    ]);
    if !device.is_cpu() {
        columns.push(Column::mib("reserved_peak_bytes", "Reserved"));
    }
    columns.push(Column::text("peak_phase", "Highest in").minor(1));
    for phase in ["forward", "backward", "optimizer"] {
        let key = format!("{phase}_peak_bytes");
        columns.push(Column::mib(key, phase).under("Peak in").minor(2));
    }
    columns.extend([
        Column::mib("estimate_bytes", "Predicted").minor(3),
        Column::number("estimate_error_percent", "Error", "%", 1).minor(3),
        Column::mib("saved_for_backward_bytes", "Saved for backward").minor(4),
        Column::count("allocations", "Allocations").minor(5),
    ]);
    columns
}

/// A row as people read it: a peak that was not measured is OOM.
pub fn line(row: &Fields) -> Fields {
    let mut line = row.clone();
    let peak = row.get("peak_bytes").filter(|bytes| !bytes.is_null());
    line.insert("peak", peak.cloned().unwrap_or("OOM".into()));
    line
}

/// A kind of memory at the peak of each phase, predicted and measured: what the peaks are made of.
#[derive(Clone, Debug, Default, Serialize)]
struct Kind {
    holds: &'static str,
    forward_bytes: Option<u64>,
    backward_bytes: Option<u64>,
    optimizer_bytes: Option<u64>,
    measured_bytes: Option<u64>,
    estimate_bytes: Option<u64>,
    difference_bytes: Option<f64>,
}

impl Kind {
    /// The most of it at any of the peaks.
    fn most(&self) -> u64 {
        let bytes = [
            self.forward_bytes,
            self.backward_bytes,
            self.optimizer_bytes,
            self.measured_bytes,
            self.estimate_bytes,
        ];
        bytes.into_iter().flatten().max().unwrap_or(0)
    }

    /// Both together, under the name of `other`.
    fn plus(self, other: Self) -> Self {
        let sum = |a: Option<u64>, b: Option<u64>| a.zip(b).map(|(a, b)| a + b);
        Self {
            holds: other.holds,
            forward_bytes: sum(self.forward_bytes, other.forward_bytes),
            backward_bytes: sum(self.backward_bytes, other.backward_bytes),
            optimizer_bytes: sum(self.optimizer_bytes, other.optimizer_bytes),
            measured_bytes: sum(self.measured_bytes, other.measured_bytes),
            estimate_bytes: sum(self.estimate_bytes, other.estimate_bytes),
            difference_bytes: self
                .difference_bytes
                .zip(other.difference_bytes)
                .map(|(a, b)| a + b),
        }
    }
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

/// The largest allocations that are listed for each run.
const LARGEST: usize = 5;

/// Tables over all runs. Each row begins with the number of its run, whose name [`into_tables`](Self::into_tables)
/// puts there.
#[derive(Default)]
pub struct Details {
    kinds: Vec<(usize, Fields)>,
    largest: Vec<(usize, Fields)>,
    saved: Vec<(usize, Fields)>,
    saved_columns: Vec<Column>,
}

impl Details {
    /// Adds what a run has shown.
    pub fn add(&mut self, run: usize, profile: &MemoryProfile) -> Result<()> {
        let recording = &profile.recording;
        let at_peak = recording.holdings_at(recording.peak_at());
        let phases = recording.phase_report().rows;
        let phase = |name: &str, kind: &str| {
            let mut phases = phases.iter();
            let row = phases.find(|row| row.get("phase") == Some(&name.into()))?;
            let bytes = row.get(&format!("{}_bytes", kind.replace(' ', "_")));
            Some(bytes.and_then(|bytes| bytes.as_u64()).unwrap_or(0))
        };
        let kind = |holds: &'static str, measured: u64, predicted: u64| Kind {
            holds,
            forward_bytes: phase("forward", holds),
            backward_bytes: phase("backward", holds),
            optimizer_bytes: phase("optimizer", holds),
            measured_bytes: Some(measured),
            estimate_bytes: Some(predicted),
            difference_bytes: Some(predicted as f64 - measured as f64),
        };
        let breakdown = &profile.estimate.breakdown;
        let all = MemoryKind::ALL
            .map(|own| kind(own.name(), at_peak.bytes_of(own), breakdown.bytes_of(own)));
        let (shown, small): (Vec<Kind>, Vec<Kind>) = all.into_iter().partition(|kind| {
            kind.holds != MemoryKind::Other.name() && kind.most() > profile.peak_bytes / 100
        });
        let other = small.into_iter().reduce(Kind::plus);
        let sum = kind("peak", profile.peak_bytes, profile.estimate.peak_bytes);
        for kind in shown.into_iter().chain(other).chain([sum]) {
            self.kinds.push((run, Fields::of(&kind)?));
        }
        let numbered = |report: Report| report.rows.into_iter().map(move |row| (run, row));
        self.largest
            .extend(numbered(recording.largest_report(LARGEST)));
        if !profile.saved.tensors.is_empty() {
            let saved = profile.saved.report();
            self.saved_columns = saved.columns.iter().cloned().map(saved_column).collect();
            self.saved.extend(numbered(saved));
        }
        Ok(())
    }

    /// Adds what is known of a run by prediction alone: one that does not fit, or is planned.
    pub fn add_predicted(&mut self, run: usize, breakdown: &MemoryBreakdown) -> Result<()> {
        let kinds = MemoryKind::ALL.map(|kind| (kind.name(), breakdown.bytes_of(kind)));
        let kinds = kinds.into_iter().filter(|(_, bytes)| *bytes > 0);
        for (holds, bytes) in kinds.chain([("peak", breakdown.peak_bytes())]) {
            let kind = Kind {
                holds,
                estimate_bytes: Some(bytes),
                ..Default::default()
            };
            self.kinds.push((run, Fields::of(&kind)?));
        }
        Ok(())
    }

    /// How large the largest allocation of each run is and where it comes from; `None` where nothing was recorded.
    pub fn largest(&self, names: &[String]) -> Option<Answer> {
        let mut words: Vec<String> = Vec::new();
        for (run, name) in names.iter().enumerate() {
            let first = self.largest.iter().find(|(own, _)| *own == run);
            let Some(largest) = first.and_then(|(_, row)| row.read::<Largest>()) else {
                continue;
            };
            let Largest {
                bytes,
                blocks,
                holds,
                phase,
                origin,
            } = largest;
            let phase = phase.map_or(String::new(), |phase| format!(" in {phase}"));
            words.push(format!(
                "{name}: {} ({blocks} of them), {holds} from {origin}{phase}",
                format_mib(bytes)
            ));
        }
        let question = "How large are the largest allocations, and where do they come from?";
        words.truncate(6);
        (!words.is_empty()).then(|| Answer::new(question, words.join("; ") + "."))
    }

    /// The tables that have rows. `names` and `rows` are those of the runs.
    pub fn into_tables(self, names: &[String], rows: &[Row]) -> Result<Vec<Report>> {
        let mib = |key: &str, title: &str| Column::mib(key, title);
        let phase = |key: &str, title: &str| mib(key, title).under("At the peak of").minor(1);
        let kinds = vec![
            Column::text("holds", "Holds"),
            phase("forward_bytes", "forward"),
            phase("backward_bytes", "backward"),
            phase("optimizer_bytes", "optimizer"),
            mib("measured_bytes", "measured").under("At the highest peak"),
            mib("estimate_bytes", "predicted").under("At the highest peak"),
            mib("difference_bytes", "Difference").minor(2),
        ];
        let largest = vec![
            mib("bytes", "Each"),
            Column::count("blocks", "Blocks"),
            Column::text("holds", "Holds"),
            Column::text("phase", "Phase"),
            Column::text("origin", "Origin"),
        ];
        let tables = [
            ("Memory by kind at each peak", kinds, self.kinds),
            ("Largest allocations", largest, self.largest),
            ("Saved for backward", self.saved_columns, self.saved),
        ];
        let mut reports = Vec::new();
        for (title, own, numbered) in tables {
            let named = |(run, row): (usize, Fields)| {
                let mut named = Fields::from_iter([("run", names[run].as_str())]);
                named.merge(row);
                named.merge(labels(&rows[run])?);
                Ok(named)
            };
            let report = Report {
                title: title.into(),
                columns: [vec![Column::text("run", "Run")], own].concat(),
                rows: numbered.into_iter().map(named).collect::<Result<_>>()?,
                ..Default::default()
            };
            reports.extend((!report.rows.is_empty()).then_some(report));
        }
        Ok(reports)
    }
}

/// A column of what is saved: size first, shape last.
fn saved_column(column: Column) -> Column {
    let minor = match column.key.as_str() {
        "bytes" | "origin" => 0,
        "count" | "what" => 1,
        _ => 2,
    };
    match column.key.as_str() {
        "origin" => Column::text("origin", "Origin"),
        _ => column.minor(minor),
    }
}

/// What tells runs apart, without what was measured.
fn labels(row: &Row) -> Result<Fields> {
    let fields = Fields::of(row)?;
    let labels = fields.iter().take_while(|(key, _)| *key != "status");
    Ok(labels.map(|(key, value)| (key, value.clone())).collect())
}
