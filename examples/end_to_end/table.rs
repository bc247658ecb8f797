//! The table. It has a line for each configuration with its phases in columns. If executions or precisions are
//! compared, it has a line for each phase with the compared values in columns.

use super::words::{change, grouped, names, speedup_cell};
use std::ops::Deref;
use tallow::bench::{EndToEndRow, Status, UPDATE};
use tallow::memory::Mode;
use tallow::report::{Column, Fields, Report, Speedup};

/// A row of the benchmark: tallow's row, the model's name and the device.
#[derive(Clone, Debug, Default)]
pub struct Row {
    pub size: String,
    pub device: String,
    pub row: EndToEndRow,
}

impl Deref for Row {
    type Target = EndToEndRow;

    fn deref(&self) -> &EndToEndRow {
        &self.row
    }
}

impl Row {
    pub fn fields(&self) -> Fields {
        let mut fields = Fields::from_iter([("size", self.size.as_str())]);
        fields.merge(self.row.fields().unwrap_or_default());
        fields.insert("device", self.device.as_str());
        fields
    }

    /// Returns mean and standard deviation, or `OOM` for a run without times.
    fn time_cell(&self) -> String {
        self.statistics()
            .map_or("OOM".into(), |own| own.to_string())
    }

    /// Returns the phase, with its mode unless it is a whole step: `step: backward`.
    pub fn part(&self) -> String {
        match (self.is_whole_step(), self.mode) {
            (true, _) => self.phase.clone(),
            (false, Mode::TrainStep) => format!("step: {}", self.phase),
            (false, _) => format!("F+B: {}", self.phase),
        }
    }
}

/// The labels that distinguish configurations.
const LABELS: [(&str, &str); 8] = [
    ("size", "Model"),
    ("batch_size", "B"),
    ("context_length", "T"),
    ("attention", "Attention"),
    ("checkpointing", "Checkpointing"),
    ("warmup_steps", "Warm-up"),
    ("precision", "Precision"),
    ("execution", "Execution"),
];

/// A time in the table: its heading, the modes that measure it (the first one that ran is used), and its phase.
struct Time(&'static str, &'static [Mode], &'static str);

const WITH_BACKWARD: &[Mode] = &[Mode::TrainStep, Mode::ForwardBackward];

const TIMES: [Time; 6] = [
    Time(
        "Forward",
        &[Mode::Forward, Mode::ForwardBackward, Mode::TrainStep],
        "forward",
    ),
    Time("F+B", &[Mode::ForwardBackward], "forward+backward"),
    Time("Step", &[Mode::TrainStep], "train step"),
    Time(
        "Backward",
        &[Mode::ForwardBackward, Mode::TrainStep],
        "backward",
    ),
    Time("Optimizer", &[Mode::TrainStep], "optimizer"),
    Time("B+O", &[Mode::TrainStep], UPDATE),
];

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
    by_phase: bool,
}

/// One phase of one configuration, with each of the compared values.
pub struct Comparison<'r> {
    /// The name of the configuration and its phase.
    pub name: String,
    by: By,
    rows: Vec<&'r Row>,
}

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

    fn labels(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let own = |key| self.is_any() && key == self.by.key();
        LABELS.into_iter().filter(move |(key, _)| !own(*key))
    }

    /// Returns the labels of a row, except the compared one.
    pub fn labels_of(&self, row: &Row) -> Fields {
        let fields = row.fields();
        let labels = self.labels();
        let labels = labels.map(|(key, _)| (key, fields.get(key).cloned()));
        labels.collect()
    }

    /// Returns each phase of each configuration.
    pub fn comparisons<'r>(&self, rows: &'r [Row]) -> Vec<Comparison<'r>> {
        let configurations = grouped(rows, |row| self.labels_of(row)).into_iter();
        let phases = |(_, own)| grouped(own, |row: &&Row| (row.mode, row.phase.clone()));
        let groups = configurations.flat_map(phases);
        let groups: Vec<Vec<&Row>> = groups.map(|(_, group)| group).collect();
        let labels = groups.iter().map(|rows| {
            let mut labels = self.labels_of(rows[0]);
            labels.insert("mode", rows[0].mode.name());
            labels.insert("phase", rows[0].phase.as_str());
            labels
        });
        let names = names(&labels.collect::<Vec<_>>());
        let comparisons = groups.into_iter().zip(names);
        comparisons
            .map(|(rows, name)| Comparison {
                name,
                by: self.by,
                rows,
            })
            .collect()
    }

    /// Sets the rows of a report and their lines.
    pub fn show(&self, rows: &[Row], report: &mut Report) {
        report.rows = rows.iter().map(Row::fields).collect();
        report.shown_rows = self.shown_rows(rows);
    }

    /// Returns the name of the comparison that contains this row.
    pub fn name_of(&self, row: &Row, all: &[Comparison]) -> String {
        let labels = self.labels_of(row);
        let is_own = |own: &&Comparison| {
            own.first().phase == row.phase && self.labels_of(own.first()) == labels
        };
        let own = all.iter().find(is_own);
        own.map_or(String::new(), |own| own.name.clone())
    }

    /// Returns the lines of `rows`.
    pub fn shown_rows(&self, rows: &[Row]) -> Vec<Fields> {
        match self.by_phase {
            true => {
                let comparisons = self.comparisons(rows);
                comparisons.iter().map(|own| self.line(own)).collect()
            }
            false => {
                let configurations = grouped(rows, |row| self.labels_of(row)).into_iter();
                configurations.map(|(_, own)| wide_line(&own)).collect()
            }
        }
    }

    fn line(&self, comparison: &Comparison) -> Fields {
        let mut line = comparison.rows[0].fields();
        let first = self.values[0];
        for value in &self.values {
            let row = comparison.of(value);
            let peak = row.and_then(|row| row.peak_bytes());
            let time = row.and_then(|row| row.time.as_ref());
            let reserved = row.and_then(|row| row.memory.as_ref()?.reserved_peak_bytes);
            let changed = comparison.peaks(first, value);
            let speedup = comparison.speedup(first, value);
            line.insert(key("time", value), row.map(Row::time_cell))
                .insert(key("speed-up", value), speedup_cell(speedup))
                .insert(key("peak", value), peak)
                .insert(key("change", value), changed.map(|(a, b)| change(a, b)))
                .insert(key("reserved", value), reserved)
                .insert(
                    key("tokens", value),
                    time.and_then(|time| time.tokens_per_s),
                )
                .insert(key("predicted", value), row.map(|row| row.estimate_bytes));
        }
        line.insert("part", comparison.first().part())
            .insert("outcome", comparison.outcome());
        line
    }

    /// Returns the columns. Models' sizes are included if there are several models.
    pub fn columns(&self, has_several_models: bool) -> Vec<Column> {
        let mut columns: Vec<Column> = self
            .labels()
            .map(|(key, title)| Column::text(key, title))
            .collect();
        if self.by_phase {
            columns.push(Column::text("part", "Phase"));
        }
        columns.extend(match (self.is_any(), self.by_phase) {
            (true, _) => self.compared_columns(),
            (false, true) => phase_columns(&key("time", self.values[0])),
            (false, false) => wide_columns(),
        });
        if has_several_models {
            columns.push(Column::count("parameters", "Parameters"));
            let sizes = "d_model d_ff num_layers num_heads".split(' ');
            columns.extend(sizes.map(|key| Column::text(key, key)));
        }
        columns.push(Column::text("device", "Device"));
        columns
    }

    /// Returns the columns of each quantity for each value, with speed-up and change relative to the first value.
    fn compared_columns(&self) -> Vec<Column> {
        let of_memory = [
            ("tokens", "Tokens/s"),
            ("reserved", "Reserved"),
            ("predicted", "Predicted peak"),
        ];
        let mut quantities = vec![("time", "Time"), ("peak", "Peak")];
        if self.by == By::Precision {
            quantities.extend(of_memory);
        }
        let mut columns = Vec::new();
        for (quantity, heading) in quantities {
            let mut push = |column: Column| columns.push(column.group(heading));
            for (i, value) in self.values.iter().enumerate() {
                let own = key(quantity, value);
                push(match quantity {
                    "time" => Column::ms(own, *value),
                    "tokens" => Column::count(own, *value),
                    _ => Column::mib(own, *value),
                });
                if i > 0 && quantity == "time" {
                    push(Column::number(key("speed-up", value), "speed-up", "", 2));
                }
                if i > 0 && quantity == "peak" && self.by == By::Precision {
                    let title = format!("than {}", self.values[0]);
                    push(Column::text(key("change", value), title));
                }
            }
        }
        columns.push(Column::text("outcome", "Status"));
        columns
    }
}

/// Returns the key of a quantity of one compared value.
fn key(quantity: &str, value: &str) -> String {
    format!("{quantity} {value}")
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

    /// Returns the speedup of `value` over `other`; `None` if they are the same.
    pub fn speedup(&self, other: &str, value: &str) -> Option<Speedup> {
        let of = |value| self.of(value)?.statistics();
        (other != value).then(|| Speedup::new(of(other)?, of(value)?))?
    }

    /// Returns the peaks of `other` and of `value`, in bytes.
    pub fn peaks(&self, other: &str, value: &str) -> Option<(u64, u64)> {
        let of = |value| self.of(value)?.peak_bytes();
        (other != value).then(|| of(other).zip(of(value)))?
    }

    /// Returns `ok`, or which values run out of memory; `bf16 avoids OOM` if only the first value does.
    pub fn outcome(&self) -> String {
        let named = |status: fn(&Row) -> bool| {
            let rows = self.rows.iter().filter(|row| status(row));
            let names: Vec<&str> = rows.map(|row| self.by.value(row)).collect();
            names.join(", ")
        };
        let fits = named(|row| row.status == Status::Ok);
        let fails = named(|row| row.status == Status::OutOfMemory);
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
    let mut columns = Vec::new();
    for Time(title, ..) in TIMES {
        columns.push(Column::ms(title, title));
        match title {
            "F+B" => columns.push(Column::number("Ratio", "Ratio", "", 2)),
            "Optimizer" => columns.push(Column::mib("peak_bytes", "Peak")),
            _ => {}
        }
    }
    columns.extend([
        Column::ms("first_step_ms", "First step"),
        Column::mib("reserved_peak_bytes", "Reserved"),
        Column::count("tokens_per_s", "Tokens/s"),
        Column::number("mfu_percent", "MFU", "%", 1),
        Column::mib("allocated_bytes", "After the step"),
    ]);
    columns
}

/// Returns the line of a configuration. Everything but times belongs to the longest mode measured.
fn wide_line(rows: &[&Row]) -> Fields {
    let find = |modes: &[Mode], phase: &str| {
        let of = |mode: &Mode| {
            rows.iter()
                .find(|row| row.mode == *mode && row.phase == phase)
        };
        modes.iter().find_map(of)
    };
    let longest = [WITH_BACKWARD, &[Mode::Forward]].concat();
    let longest = longest.iter().find_map(|mode| {
        let mut own = rows.iter().filter(|row| row.mode == *mode);
        own.find(|row| row.is_whole_step())
    });
    let mut line = longest.unwrap_or(&rows[0]).fields();
    for Time(title, modes, phase) in &TIMES {
        let cell = find(modes, phase).map(|row| row.time_cell());
        line.insert(*title, cell);
    }
    let both = find(&[Mode::ForwardBackward], "forward+backward");
    let forward = find(&[Mode::Forward], "forward");
    let ratio = both.zip(forward);
    let ratio =
        ratio.and_then(|(both, forward)| Speedup::new(both.statistics()?, forward.statistics()?));
    line.insert("Ratio", speedup_cell(ratio));
    line
}
