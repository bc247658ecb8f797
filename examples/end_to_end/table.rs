//! The table. It has a line for each configuration with its phases in columns. If executions or precisions are
//! compared, it has a line for each phase with the compared values in columns.

use super::reasons::Counted;
use super::words::{change, label_columns, named, speedup_cell};
use serde::Serialize;
use std::ops::Deref;
use tallow::bench::{EndToEndRow, Status, UPDATE};
use tallow::memory::Mode;
use tallow::report::{Column, Fields, Report, Speedup};

/// A row of the benchmark.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub row: EndToEndRow,
    /// The counts of a training step, if they were requested.
    #[serde(flatten)]
    pub counted: Option<Counted>,
}

impl Deref for Row {
    type Target = EndToEndRow;

    fn deref(&self) -> &EndToEndRow {
        &self.row
    }
}

impl Row {
    pub fn fields(&self) -> Fields {
        Fields::of(self).unwrap_or_default() // a struct always has fields
    }

    /// Returns mean and standard deviation, or `OOM` for a run without times.
    pub fn time_cell(&self) -> String {
        let times = self.statistics();
        times.map_or("OOM".into(), |times| times.to_string())
    }

    /// Returns the phase, with its mode unless it is a whole step: `step: backward`.
    fn part(&self) -> String {
        match (self.is_whole_step(), self.mode) {
            (true, _) => self.phase.clone(),
            (false, Mode::TrainStep) => format!("step: {}", self.phase),
            (false, _) => format!("F+B: {}", self.phase),
        }
    }
}

/// The label by which runs are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Execution,
    Precision,
}

impl By {
    pub fn key(self) -> &'static str {
        match self {
            Self::Execution => "execution",
            Self::Precision => "precision",
        }
    }

    pub fn value(self, row: &EndToEndRow) -> &'static str {
        match self {
            Self::Execution => row.execution.name(),
            Self::Precision => row.precision.name(),
        }
    }
}

/// The compared label and its values; a single value if nothing is compared.
pub struct Compared {
    pub by: By,
    pub values: Vec<&'static str>,
    /// Whether each phase has its own line.
    pub by_phase: bool,
}

/// One phase of one configuration, with each of the compared values.
pub struct Comparison<'r> {
    /// The name of the configuration and its phase.
    pub name: String,
    pub by: By,
    pub rows: Vec<&'r Row>,
}

/// A quantity of each compared value: heading, column and field.
type Quantity = (
    &'static str,
    fn(String, &'static str) -> Column,
    &'static str,
);

/// The quantities that are compared.
const QUANTITIES: [Quantity; 4] = [
    ("Time", Column::ms, TIME),
    ("Peak", Column::mib, "peak_bytes"),
    ("Tokens/s", Column::count, "tokens_per_s"),
    ("Reserved", Column::mib, "reserved_peak_bytes"),
];

/// The field of a line with mean and standard deviation.
const TIME: &str = "time";

impl Compared {
    /// Compares executions, or precisions if there is only one execution.
    pub fn new(
        executions: Vec<&'static str>,
        precisions: Vec<&'static str>,
        by_phase: bool,
    ) -> Self {
        let (by, values) = match executions.len() {
            1 => (By::Precision, precisions),
            _ => (By::Execution, executions),
        };
        Self {
            by,
            by_phase: by_phase || values.len() > 1,
            values,
        }
    }

    /// Returns whether there is anything to compare.
    pub fn is_any(&self) -> bool {
        self.values.len() > 1
    }

    /// Returns each phase of each configuration.
    pub fn comparisons<'r>(&self, rows: &'r [Row]) -> Vec<Comparison<'r>> {
        let by = self.by;
        let groups = named(rows, &[by.key()]).into_iter();
        groups
            .map(|(name, rows)| Comparison { name, by, rows })
            .collect()
    }

    /// Sets the rows of a report and their lines.
    pub fn show(&self, rows: &[Row], report: &mut Report) {
        report.rows = rows.iter().map(Row::fields).collect();
        report.shown_rows = self.shown_rows(rows);
    }

    /// Returns the lines of `rows`.
    pub fn shown_rows(&self, rows: &[Row]) -> Vec<Fields> {
        match self.by_phase {
            true => {
                let comparisons = self.comparisons(rows);
                comparisons.iter().map(|own| self.line(own)).collect()
            }
            false => {
                let configurations = named(rows, &["mode", "phase"]).into_iter();
                configurations.map(|(_, own)| wide_line(own)).collect()
            }
        }
    }

    fn line(&self, comparison: &Comparison) -> Fields {
        let mut line = comparison.first().fields();
        let first = self.values[0];
        for value in &self.values {
            if let Some(row) = comparison.of(value) {
                let mut fields = row.fields();
                fields.insert(TIME, row.time_cell());
                for (_, _, field) in QUANTITIES {
                    line.insert(key(field, value), fields.get(field).cloned());
                }
            }
            let speedup = comparison.speedup(first, value);
            let peaks = comparison.peaks(first, value);
            line.insert(key("speed-up", value), speedup_cell(speedup))
                .insert(key("change", value), peaks.map(|(a, b)| change(a, b)));
        }
        line.insert("part", comparison.first().part())
            .insert("outcome", comparison.outcome());
        line
    }

    pub fn columns(&self) -> Vec<Column> {
        let mut columns = label_columns();
        columns.retain(|column| column.key != "mode"); // the phases tell the modes apart
        columns.retain(|column| !self.is_any() || column.key != self.by.key());
        if self.by_phase {
            columns.push(Column::text("part", "Phase"));
        }
        columns.extend(match (self.is_any(), self.by_phase) {
            (true, _) => self.compared_columns(),
            (false, true) => phase_columns(&key(TIME, self.values[0])),
            (false, false) => wide_columns(),
        });
        columns
    }

    /// Returns the columns of each quantity for each value, with speed-up and change relative to the first value.
    fn compared_columns(&self) -> Vec<Column> {
        let mut columns = Vec::new();
        for (heading, column, field) in QUANTITIES {
            let mut push = |column: Column| columns.push(column.group(heading));
            for (i, value) in self.values.iter().enumerate() {
                push(column(key(field, value), value));
                if i > 0 && heading == "Time" {
                    push(Column::number(key("speed-up", value), "speed-up", "", 2));
                }
                if i > 0 && heading == "Peak" && self.by == By::Precision {
                    let title = format!("than {}", self.values[0]);
                    push(Column::text(key("change", value), title));
                }
            }
        }
        columns.push(Column::text("outcome", "Status"));
        columns
    }
}

/// Returns the key of a field of one compared value.
fn key(field: &str, value: &str) -> String {
    format!("{field} {value}")
}

impl Comparison<'_> {
    pub fn of(&self, value: &str) -> Option<&Row> {
        let mut rows = self.rows.iter().copied();
        rows.find(|row| self.by.value(row) == value)
    }

    /// Returns the row of the first value, or that of another if it is missing.
    pub fn first(&self) -> &Row {
        self.rows[0]
    }

    /// Returns the speedup of `value` over `other`.
    pub fn speedup(&self, other: &str, value: &str) -> Option<Speedup> {
        let of = |value| self.of(value)?.statistics();
        Speedup::new(of(other)?, of(value)?)
    }

    /// Returns the peaks of `other` and of `value`, in bytes.
    pub fn peaks(&self, other: &str, value: &str) -> Option<(u64, u64)> {
        let of = |value| self.of(value)?.peak_bytes();
        of(other).zip(of(value))
    }

    /// Returns `ok`, or which values run out of memory; `bf16 avoids OOM` if only the first value does.
    pub fn outcome(&self) -> String {
        let named = |status: Status| {
            let rows = self.rows.iter().filter(|row| row.status == status);
            let names: Vec<&str> = rows.map(|row| self.by.value(row)).collect();
            names.join(", ")
        };
        let (fits, fails) = (named(Status::Ok), named(Status::OutOfMemory));
        match (fits.is_empty(), fails.is_empty()) {
            (_, true) => "ok".into(),
            (true, _) => "OOM".into(),
            _ if self.first().status == Status::Ok => format!("{fails} OOM"),
            _ => format!("{fits} avoids OOM"),
        }
    }
}

/// Returns the columns of all statistics of a phase. `time` is the key of its time.
fn phase_columns(time: &str) -> Vec<Column> {
    vec![
        Column::ms(time, "Time"),
        Column::ms("median_ms", "Median"),
        Column::number("cv_percent", "CV", "%", 1),
        Column::mib("peak_bytes", "Peak"),
        Column::ms("min_ms", "Min"),
        Column::ms("max_ms", "Max"),
        Column::count("tokens_per_s", "Tokens/s"),
        Column::ms("first_step_ms", "First step"),
        Column::number("flops_per_s", "Rate", "GFLOP/s", 1).scaled(1e9),
        Column::number("mfu_percent", "MFU", "%", 1),
        Column::mib("reserved_peak_bytes", "Reserved"),
        Column::mib("resident_peak_bytes", "Resident peak"),
        Column::mib("allocated_bytes", "After the step"),
        Column::mib("estimate_bytes", "Estimate"),
    ]
}

/// Returns the columns of a configuration's times and memory.
fn wide_columns() -> Vec<Column> {
    vec![
        Column::ms("forward", "Forward"),
        Column::ms("forward+backward", "F+B"),
        Column::number("ratio", "Ratio", "", 2),
        Column::ms("train step", "Step"),
        Column::ms("backward", "Backward"),
        Column::ms("optimizer", "Optimizer"),
        Column::mib("peak_bytes", "Peak"),
        Column::ms(UPDATE, "B+O"),
        Column::ms("first_step_ms", "First step"),
        Column::mib("reserved_peak_bytes", "Reserved"),
        Column::count("tokens_per_s", "Tokens/s"),
        Column::number("mfu_percent", "MFU", "%", 1),
        Column::mib("allocated_bytes", "After the step"),
    ]
}

/// Returns the line of a configuration. The time of a phase is that of the shortest mode with this phase; everything else
/// belongs to the longest mode.
fn wide_line(mut rows: Vec<&Row>) -> Fields {
    rows.sort_by_key(|row| row.mode as u8); // from forward to the training step
    let of = |phase: &str| rows.iter().find(|row| row.phase == phase);
    let longest = rows.iter().rfind(|row| row.is_whole_step());
    let mut line = longest.unwrap_or(&rows[0]).fields();
    for row in rows.iter().rev() {
        line.insert(row.phase.as_str(), row.time_cell());
    }
    let forward = of("forward").filter(|row| row.mode == Mode::Forward);
    let ratio = of("forward+backward")
        .zip(forward)
        .and_then(|(both, forward)| Speedup::new(both.statistics()?, forward.statistics()?));
    line.insert("ratio", speedup_cell(ratio));
    line
}
