//! The table for people: a line for each configuration, its phases next to each other. Where executions or precisions
//! are compared, a line for each phase, what is compared next to each other with the speed-up.

use super::answers::Measured;
use super::phases::UPDATE;
use super::words::{names, speedup_cell};
use serde::Deserialize;
use tallow::report::{Column, Fields, mean_and_std, speedup};

/// A time in the table: its heading, the modes that measure it (the first that ran counts) and its phase; and how soon
/// its column is dropped.
struct Time(&'static str, &'static [&'static str], &'static str, u8);

const WITH_BACKWARD: &[&str] = &["train-step", "forward-backward"];

const TIMES: [Time; 6] = [
    Time(
        "Forward",
        &["forward", "forward-backward", "train-step"],
        "forward",
        0,
    ),
    Time("F+B", &["forward-backward"], "forward+backward", 0),
    Time("Step", &["train-step"], "train step", 0),
    Time("Backward", WITH_BACKWARD, "backward", 1),
    Time("Optimizer", &["train-step"], "optimizer", 2),
    Time("B+O", &["train-step"], UPDATE, 5),
];

/// What tells lines apart.
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

/// A mode's phases, in their order.
const PHASES: [&str; 6] = [
    "forward",
    "backward",
    "optimizer",
    UPDATE,
    "forward+backward",
    "train step",
];

/// What names a row among those of one configuration.
#[derive(Default, Deserialize, PartialEq)]
struct Part {
    mode: String,
    phase: String,
}

fn part(row: &Fields) -> Part {
    row.read().unwrap_or_default()
}

/// A row's place among its mode's.
fn place(row: &Fields) -> Option<usize> {
    PHASES.iter().position(|name| *name == part(row).phase)
}

/// The field in which runs are compared, and its values: one if none are.
pub struct Compared {
    pub field: &'static str,
    values: Vec<String>,
    /// Whether each phase gets a line, with all statistics if nothing is compared.
    by_phase: bool,
}

impl Compared {
    /// Executions, or precisions if there is one execution.
    pub fn new(executions: Vec<String>, precisions: Vec<String>, by_phase: bool) -> Self {
        let (field, values) = match executions.len() {
            1 => ("precision", precisions),
            _ => ("execution", executions),
        };
        let by_phase = by_phase || values.len() > 1;
        Self {
            field,
            values,
            by_phase,
        }
    }

    /// Whether there is anything to compare.
    pub fn is_any(&self) -> bool {
        self.values.len() > 1
    }

    fn labels(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let own = |field| self.is_any() && field == self.field;
        LABELS.into_iter().filter(move |(field, _)| !own(*field))
    }

    /// The rows of each configuration, in their order.
    fn configurations<'r>(&self, rows: &'r [Fields]) -> Vec<Vec<&'r Fields>> {
        let by: Vec<&str> = self.labels().map(|(field, _)| field).collect();
        let mut all: Vec<Vec<&Fields>> = Vec::new();
        for row in rows {
            let is_same =
                |own: &&mut Vec<&Fields>| by.iter().all(|key| own[0].get(key) == row.get(key));
            match all.iter_mut().find(is_same) {
                Some(own) => own.push(row),
                None => all.push(vec![row]),
            }
        }
        all
    }

    /// The lines of `rows`.
    pub fn lines(&self, rows: &[Fields]) -> Vec<Fields> {
        let all = self.configurations(rows).into_iter();
        match self.by_phase {
            true => all.flat_map(|own| self.phases(&own)).collect(),
            false => all.map(|own| configuration(&own)).collect(),
        }
    }

    /// A line for each phase of a configuration.
    fn phases(&self, rows: &[&Fields]) -> Vec<Fields> {
        let mut parts: Vec<Part> = Vec::new();
        for part in rows.iter().map(|row| part(row)) {
            if !parts.contains(&part) {
                parts.push(part);
            }
        }
        let line = |own: &Part| {
            let own: Vec<&Fields> = rows
                .iter()
                .copied()
                .filter(|row| part(row) == *own)
                .collect();
            let of = |value: &String| {
                let is_own = |row: &&&Fields| row.get(self.field) == Some(&value.as_str().into());
                own.iter().find(is_own).copied()
            };
            let first = of(&self.values[0]);
            let mut line = own[0].clone();
            for value in &self.values {
                let row = of(value);
                let ratio = first.zip(row).and_then(|(first, row)| speedup(first, row));
                let peak = row.and_then(|row| row.get("peak_bytes"));
                line.insert(value, row.map(mean_and_std));
                line.insert(format!("speed-up {value}"), speedup_cell(ratio));
                line.insert(format!("peak {value}"), peak.cloned());
            }
            line
        };
        parts.iter().map(line).collect()
    }

    /// The columns. The first step's time is needed if warm-up is varied, and models' sizes if there are several.
    pub fn columns(&self, has_several_models: bool, is_about_warmup: bool) -> Vec<Column> {
        let mut columns: Vec<Column> = self
            .labels()
            .map(|(key, title)| Column::text(key, title))
            .collect();
        match self.by_phase {
            true => columns.extend(self.phase_columns()),
            false => columns.extend(time_columns(is_about_warmup)),
        }
        if has_several_models {
            columns.push(Column::count("parameters", "Parameters").minor(6));
            let sizes = "d_model d_ff num_layers num_heads".split(' ');
            columns.extend(sizes.map(|key| Column::text(key, key).minor(7)));
        }
        columns.push(Column::text("device", "Device"));
        columns
    }

    fn phase_columns(&self) -> Vec<Column> {
        let mut columns = vec![Column::text("mode", "Mode"), Column::text("phase", "Phase")];
        for (i, value) in self.values.iter().enumerate() {
            let time = Column::ms(value, value).under("Time");
            columns.push(match self.is_any() {
                true => time,
                false => Column::ms(value, "Time"),
            });
            if i > 0 {
                let key = format!("speed-up {value}");
                columns.push(Column::number(key, "speed-up", "", 2).under("Time"));
            }
        }
        if self.is_any() {
            let peaks = self.values.iter();
            let peak = |value| Column::mib(format!("peak {value}"), value).under("Peak");
            columns.extend(peaks.map(|value| peak(value).minor(1)));
            return columns;
        }
        columns.extend([
            Column::ms("min_ms", "Min").minor(2),
            Column::ms("max_ms", "Max").minor(2),
            Column::ms("median_ms", "Median").minor(1),
            Column::number("cv_percent", "CV", "%", 1).minor(1),
            Column::ms("first_step_ms", "First step").minor(4),
            Column::count("tokens_per_s", "Tokens/s").minor(3),
            Column::number("flops_per_s", "Rate", "GFLOP/s", 1)
                .scaled(1e9)
                .minor(4),
            Column::number("mfu_percent", "MFU", "%", 1).minor(4),
            Column::mib("peak_bytes", "Peak").minor(1),
            Column::mib("reserved_peak_bytes", "Reserved").minor(5),
            Column::mib("resident_peak_bytes", "Resident peak").minor(6),
            Column::mib("allocated_bytes", "After the step").minor(6),
            Column::mib("estimate_bytes", "Estimate").minor(5),
        ]);
        columns
    }

    /// The rows that were measured, named for answers.
    pub fn measured(&self, rows: &[Fields]) -> Vec<Measured> {
        let own = [self.field, "mode", "phase", "warmup_steps", "status"];
        let labels = rows.iter().map(|row| {
            let labels = row.iter().filter(|(key, _)| !own.contains(key));
            labels.map(|(key, value)| (key, value.clone())).collect()
        });
        let names = names(&labels.collect::<Vec<Fields>>());
        let named = rows.iter().zip(names).filter_map(|(row, name)| {
            let value = row.get(self.field).and_then(|value| value.as_str());
            Some(Measured {
                name: if name == "all" { String::new() } else { name },
                value: value.filter(|_| self.is_any()).unwrap_or_default().into(),
                ..row.read()?
            })
        });
        named.filter(|own| !own.samples_ms.is_empty()).collect()
    }
}

/// The columns of a line for each configuration.
fn time_columns(is_about_warmup: bool) -> Vec<Column> {
    let mut columns = Vec::new();
    for Time(title, _, _, minor) in TIMES {
        columns.push(Column::ms(title, title).minor(minor));
        if title == "F+B" {
            columns.push(Column::number("Ratio", "Ratio", "", 2));
        }
    }
    let first_step = if is_about_warmup { 0 } else { 6 };
    columns.extend([
        Column::ms("first_step_ms", "First step").minor(first_step),
        Column::mib("peak_bytes", "Peak").minor(3),
        Column::mib("reserved_peak_bytes", "Reserved").minor(4),
        Column::count("tokens_per_s", "Tokens/s").minor(6),
        Column::number("mfu_percent", "MFU", "%", 1).minor(7),
        Column::mib("allocated_bytes", "After the step").minor(8),
    ]);
    columns
}

/// The line of a configuration; what is not a time is that of the longest mode measured.
fn configuration(rows: &[&Fields]) -> Fields {
    let longest = rows.iter().max_by_key(|row| place(row));
    let mut line: Fields = longest.map_or_else(Fields::new, |row| (*row).clone());
    for Time(title, modes, phase, _) in &TIMES {
        line.insert(*title, find(rows, modes, phase).map(mean_and_std));
    }
    let both = find(rows, TIMES[1].1, TIMES[1].2);
    let ratio = find(rows, &["forward"], "forward").zip(both);
    let ratio = ratio.and_then(|(forward, both)| speedup(both, forward));
    line.insert("Ratio", speedup_cell(ratio));
    line
}

/// The row of a time, of the first of `modes` that ran.
fn find<'r>(rows: &[&'r Fields], modes: &[&str], phase: &str) -> Option<&'r Fields> {
    let of = |mode: &&str| {
        let is_own = |row: &&&Fields| {
            let part = part(row);
            part.mode == *mode && part.phase == phase
        };
        rows.iter().find(is_own).copied()
    };
    modes.iter().find_map(of)
}
