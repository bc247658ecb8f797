//! The figures of attention at each size, and the tables of them.

use super::words::{grouped, speedup_cell};
use serde::Deserialize;
use tallow::report::{Column, Fields, Report, Speedup, Statistics};

/// The implementation that others are compared with.
pub const NAIVE: &str = "naive";

/// The phases in the order of [`Measured::times`], each with the column of its speed-up.
pub const PHASES: [(&str, &str); 3] = [
    ("forward", "speedup_forward"),
    ("backward", "speedup_backward"),
    ("forward+backward", "speedup"),
];

/// The index of forward+backward in [`PHASES`].
pub const BOTH: usize = 2;

/// One implementation at one size.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Measured {
    pub implementation: String,
    pub precision: String,
    /// The values that vary apart from implementation and size, such as `bf16, 1 head`; empty if there are none.
    #[serde(skip)]
    pub variant: String,
    pub context_length: u64,
    /// The width of a head, or of the layer.
    #[serde(alias = "head_dim", alias = "d_model")]
    pub width: u64,
    pub status: String,
    pub reason: Option<String>,
    pub before_backward_bytes: Option<u64>,
    pub peak_bytes: Option<u64>,
    /// The times of each of [`PHASES`].
    #[serde(skip)]
    pub times: [Option<Statistics>; 3],
    /// The benchmark's rows.
    #[serde(skip)]
    pub rows: Vec<Fields>,
}

impl Measured {
    /// Reads the rows of one run.
    pub fn of(rows: Vec<Fields>, variant: String) -> Option<Self> {
        let own: Self = rows.last()?.read()?;
        let times = PHASES.map(|(phase, _)| {
            let is_of = |row: &&Fields| row.get("phase") == Some(&phase.into());
            rows.iter().find(is_of)?.read()
        });
        Some(Self {
            variant,
            times,
            rows,
            ..own
        })
    }

    /// Returns the implementation with its variant.
    pub fn name(&self) -> String {
        name(&self.implementation, &self.variant)
    }

    pub fn is_oom(&self) -> bool {
        self.status == "OOM"
    }

    /// Returns whether both have one size.
    pub fn is_at(&self, other: &Self) -> bool {
        (self.context_length, self.width) == (other.context_length, other.width)
    }

    /// Returns naive attention of the same variant and size.
    pub fn baseline<'m>(&self, all: &'m [Self]) -> Option<&'m Self> {
        let mut naive = all.iter().filter(|other| other.implementation == NAIVE);
        naive.find(|other| other.variant == self.variant && other.is_at(self))
    }

    /// Returns how many times as fast a phase is as that of `before`.
    pub fn speedup_over(&self, before: &Self, phase: usize) -> Option<Speedup> {
        Speedup::new(before.times[phase].as_ref()?, self.times[phase].as_ref()?)
    }

    pub fn mean_ms(&self, phase: usize) -> Option<f64> {
        Some(self.times[phase].as_ref()?.mean_ms)
    }

    /// Returns the phases side by side. A run that was not measured shows its status as the time of forward.
    fn line(&self, all: &[Self]) -> Fields {
        let naive = self.baseline(all);
        let mut line = self.rows.last().cloned().unwrap_or_default();
        let status = line.get("status").filter(|status| **status != "ok");
        line.insert("forward", status.cloned());
        for (i, (phase, key)) in PHASES.into_iter().enumerate() {
            if let Some(times) = &self.times[i] {
                line.insert(phase, times.to_string());
            }
            let speedup = naive.and_then(|naive| self.speedup_over(naive, i));
            let cell = match self.implementation == NAIVE {
                true => self.times[i].as_ref().map(|_| 1.0).into(),
                false => speedup_cell(speedup),
            };
            line.insert(key, cell);
        }
        let part = naive.and_then(|naive| Some(self.peak_bytes? as f64 / naive.peak_bytes? as f64));
        line.insert("saved_percent", part.map(|part| 100.0 * (1.0 - part)));
        line
    }
}

/// Returns an implementation with its variant, if it has one.
pub fn name(implementation: &str, variant: &str) -> String {
    match variant.is_empty() {
        true => implementation.into(),
        false => format!("{implementation} ({variant})"),
    }
}

/// Returns the field of the width and its letter.
pub fn width(is_layer: bool) -> (&'static str, &'static str) {
    match is_layer {
        true => ("d_model", "D"),
        false => ("head_dim", "d"),
    }
}

/// The columns that tell rows apart.
fn labels(is_layer: bool) -> Vec<Column> {
    let (key, letter) = width(is_layer);
    vec![
        Column::text("batch_size", "B"),
        Column::text(key, letter),
        Column::text("context_length", "T"),
        Column::text("implementation", "Attention"),
        Column::text("precision", "Precision"),
        Column::text("heads", "Heads"),
    ]
}

/// The columns of the main table.
pub fn columns(is_layer: bool) -> Vec<Column> {
    let speedup = |key: &str, title: &str| Column::number(key, title, "", 2).group("Speed-up");
    let mut columns = labels(is_layer);
    columns.extend([
        Column::ms("forward", "Forward"),
        Column::ms("backward", "Backward"),
        Column::ms("forward+backward", "F+B"),
        speedup("speedup", "F+B"),
        Column::mib("before_backward_bytes", "before B").group("Memory"),
        Column::mib("peak_bytes", "peak").group("Memory"),
        Column::number("saved_percent", "saved", "%", 1).group("Memory"),
        speedup("speedup_forward", "F"),
        speedup("speedup_backward", "B"),
        Column::text("status", "Status"),
        Column::count("n", "n"),
    ]);
    // A layer's memory has its own table.
    columns.retain(|column| !is_layer || column.key != "before_backward_bytes");
    columns
}

/// The columns of a layer's memory.
pub fn memory_columns() -> Vec<Column> {
    let mut columns = labels(true);
    for (key, title, under) in [
        ("model_bytes", "model", "Alive after"),
        ("model_forward_bytes", "forward", "Alive after"),
        ("model_forward_backward_bytes", "backward", "Alive after"),
        ("forward_bytes", "forward", "Added by"),
        ("backward_bytes", "backward", "Added by"),
        ("peak_bytes", "peak", ""),
    ] {
        columns.push(Column::mib(key, title).group(under));
    }
    columns
}

/// Returns a table for each variant, then that of a layer's memory.
pub fn tables(all: &[Measured], is_layer: bool) -> Vec<Report> {
    let mut tables = Vec::new();
    for (variant, own) in grouped(all, |m| m.variant.clone()) {
        let title = match variant.is_empty() {
            true => String::new(),
            false => format!("Attention, {variant}"),
        };
        tables.push(Report {
            title,
            columns: columns(is_layer),
            shown_rows: own.iter().map(|m| m.line(all)).collect(),
            ..Default::default()
        });
    }
    let note = "model is the weights and the input. After backward the gradients are alive and what forward saved is \
                freed.";
    tables.extend((is_layer && !all.is_empty()).then(|| Report {
        title: "Memory of the layer".into(),
        columns: memory_columns(),
        shown_rows: all.iter().map(|m| m.line(all)).collect(),
        notes: vec![note.into()],
        ..Default::default()
    }));
    tables
}

/// Returns notes on the columns, and on the runs that were not measured or in fewer than `steps` steps.
pub fn notes(all: &[Measured], is_layer: bool, steps: usize) -> Vec<String> {
    let mut notes = vec![
        "Times are mean ± standard deviation. Speed-up is naive's mean over the row's; unclear: its spread is too large \
         for a ratio. Forward keeps what backward needs."
            .to_string(),
        "Peak is the largest amount of memory in a step; saved is how far it is below naive's.".into(),
    ];
    notes.extend((!is_layer).then(|| {
        "Memory before B is what is allocated between forward and backward, inputs included; of planned attention, what \
         backward still reads."
            .into()
    }));
    let is_planned = |m: &Measured| m.implementation.starts_with("planned");
    notes.extend(all.iter().any(is_planned).then(|| {
        "Planned attention is compiled for its shape before it runs. Its peak includes the plan's whole buffer."
            .into()
    }));
    for m in all {
        let note = match (m.status.as_str(), &m.times[BOTH]) {
            ("ok", Some(times)) if times.n < steps => {
                format!("Some rows have fewer than {steps} steps: the time budget ended them.")
            }
            ("ok" | "OOM", _) => continue,
            (status, _) => format!("{status}: {}.", m.reason.as_deref().unwrap_or_default()),
        };
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    notes
}
