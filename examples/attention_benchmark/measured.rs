//! What attention took at each size, and the tables of it. `compiled_benchmark` prints them too.

use super::words::speedup_cell;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tallow::report::{
    Column, Fields, PowerLaw, Report, Speedup, format_mib, mean_and_std, speedup,
};

/// The implementation that others are compared with.
pub const NAIVE: &str = "naive";

/// The phases that are timed, in the order of [`Measured::times`].
pub const PHASES: [&str; 3] = ["forward", "backward", "forward+backward"];

/// The place of forward+backward in [`Measured::times`].
pub const BOTH: usize = 2;

/// The columns of speed-ups, a phase each.
const SPEEDUPS: [&str; 3] = ["speedup_forward", "speedup_backward", "speedup"];

/// The figures of one phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    pub mean_ms: f64,
    pub std_ms: Option<f64>,
    pub n: usize,
}

/// One implementation at one size.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Measured {
    pub implementation: String,
    #[serde(default)]
    pub precision: String,
    /// What tells it from others of its implementation and size, such as `bf16, 1 head`; empty if nothing does.
    #[serde(skip)]
    pub variant: String,
    pub context_length: u64,
    /// The width of a head, or of the layer.
    #[serde(alias = "head_dim", alias = "d_model")]
    pub width: u64,
    pub status: String,
    /// Of each of [`PHASES`].
    #[serde(skip)]
    pub times: [Option<Times>; 3],
    pub before_backward_bytes: Option<u64>,
    pub peak_bytes: Option<u64>,
}

impl Measured {
    /// Reads the rows of one run.
    pub fn of(rows: &[Fields], variant: String) -> Option<Self> {
        let own: Self = rows.last()?.read()?;
        let times = PHASES.map(|phase| rows.iter().find(|row| is_of(row, phase))?.read());
        Some(Self {
            variant,
            times,
            ..own
        })
    }

    /// The implementation with its variant.
    pub fn name(&self) -> String {
        match self.variant.is_empty() {
            true => self.implementation.clone(),
            false => format!("{} ({})", self.implementation, self.variant),
        }
    }

    /// Whether both were measured at one size.
    pub fn is_at(&self, other: &Self) -> bool {
        (self.context_length, self.width) == (other.context_length, other.width)
    }

    /// How many times as fast a phase is as that of `before`.
    pub fn speedup_over(&self, before: &Self, phase: usize) -> Option<Speedup> {
        let fields = |times: Option<Times>| Fields::of(&times?).ok();
        speedup(&fields(before.times[phase])?, &fields(self.times[phase])?)
    }

    fn mean_ms(&self, phase: usize) -> Option<f64> {
        Some(self.times[phase]?.mean_ms)
    }
}

fn is_of(row: &Fields, phase: &str) -> bool {
    row.get("phase").and_then(Value::as_str) == Some(phase)
}

/// Naive attention of the same variant and size.
pub fn baseline<'m>(all: &'m [Measured], own: &Measured) -> Option<&'m Measured> {
    all.iter().find(|other| {
        other.implementation == NAIVE && other.variant == own.variant && other.is_at(own)
    })
}

/// What the tables call the width: its field and its letter.
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
        Column::text(key, letter),
        Column::text("context_length", "T"),
        Column::text("implementation", "Attention"),
        Column::text("precision", "Precision"),
        Column::text("heads", "Heads"),
    ]
}

/// The columns of the main table. A layer's memory has a [table of its own](memory_columns).
pub fn columns(is_layer: bool) -> Vec<Column> {
    let speedup = |key: &str, title: &str| Column::number(key, title, "", 2).under("Speed-up");
    let memory = |key: &str, title: &str| Column::mib(key, title).under("Memory");
    let mut columns = labels(is_layer);
    columns.extend([
        Column::ms("forward", "Forward"),
        Column::ms("backward", "Backward"),
        Column::ms("forward+backward", "F+B").minor(if is_layer { 1 } else { 5 }),
        speedup("speedup_forward", "F").minor(2),
        speedup("speedup_backward", "B").minor(2),
        speedup("speedup", "F+B").minor(if is_layer { 1 } else { 4 }),
    ]);
    if !is_layer {
        columns.push(memory("before_backward_bytes", "before B"));
    }
    columns.extend([
        memory("peak_bytes", "peak"),
        Column::number("saved_percent", "saved", "%", 1)
            .under("Memory")
            .minor(3),
        Column::text("status", "Status").minor(6),
        Column::count("n", "n").minor(7),
    ]);
    columns
}

/// The columns of a layer's memory.
pub fn memory_columns() -> Vec<Column> {
    let mut columns = labels(true);
    for (key, title, under, minor) in [
        ("model_bytes", "model", "Alive after", 1),
        ("model_forward_bytes", "forward", "Alive after", 0),
        ("model_forward_backward_bytes", "backward", "Alive after", 0),
        ("forward_bytes", "forward", "Added by", 2),
        ("backward_bytes", "backward", "Added by", 2),
        ("peak_bytes", "peak", "", 0),
    ] {
        columns.push(Column::mib(key, title).under(under).minor(minor));
    }
    columns
}

/// A table for each variant, then that of a layer's memory.
pub fn tables(rows: &[Vec<Fields>], measured: &[Measured], is_layer: bool) -> Vec<Report> {
    let table = |title: &str, columns| Report {
        title: title.into(),
        columns,
        ..Default::default()
    };
    let mut tables: Vec<Report> = Vec::new();
    let mut memory = table("Memory of the layer", memory_columns());
    memory.notes.push(
        "model is the weights and the input. After backward the gradients are alive and what forward saved is freed."
            .into(),
    );
    for (rows, own) in rows.iter().zip(measured) {
        let line = line(rows, own, baseline(measured, own));
        memory.lines.push(line.clone());
        let title = match own.variant.is_empty() {
            true => String::new(),
            false => format!("Attention, {}", own.variant),
        };
        match tables.iter_mut().find(|table| table.title == title) {
            Some(table) => table.lines.push(line),
            None => tables.push(Report {
                lines: vec![line],
                ..table(&title, columns(is_layer))
            }),
        }
    }
    tables.extend(is_layer.then_some(memory));
    tables
}

/// The phases of a run side by side. A run that was not measured shows its status as the time of forward.
fn line(rows: &[Fields], own: &Measured, naive: Option<&Measured>) -> Fields {
    let mut line = rows.last().cloned().unwrap_or_default();
    line.insert("forward", mean_and_std(&line));
    for (phase, row) in PHASES.iter().zip(rows).filter(|_| rows.len() > 1) {
        line.insert(*phase, mean_and_std(row));
    }
    for (phase, key) in SPEEDUPS.into_iter().enumerate() {
        let is_naive = own.implementation == NAIVE && own.times[phase].is_some();
        let speedup = naive.and_then(|naive| own.speedup_over(naive, phase));
        let cell = speedup_cell(speedup);
        line.insert(key, if is_naive { 1.0.into() } else { cell });
    }
    let part = naive.and_then(|naive| Some(own.peak_bytes? as f64 / naive.peak_bytes? as f64));
    line.insert("saved_percent", part.map(|part| 100.0 * (1.0 - part)));
    line
}

/// Every implementation with its variants, each once, with what was measured of it.
pub fn by_name(all: &[Measured]) -> Vec<(String, Vec<&Measured>)> {
    let mut groups: Vec<(String, Vec<&Measured>)> = Vec::new();
    for own in all {
        let name = own.name();
        match groups.iter_mut().find(|(other, _)| *other == name) {
            Some((_, group)) => group.push(own),
            None => groups.push((name, vec![own])),
        }
    }
    groups
}

/// A line for each implementation: how often it ran out of memory, its fastest, slowest and largest size.
pub fn extremes(all: &[Measured], letter: &str) -> Report {
    let line = |(name, own): (String, Vec<&Measured>)| {
        let at = |m: &Measured| format!("(T {}, {letter} {})", m.context_length, m.width);
        let timed = || own.iter().filter_map(|m| Some((m.mean_ms(0)?, *m)));
        let time = |(ms, m): (f64, &Measured)| {
            let ms = Column::ms("", "").cell(Some(&ms.into()));
            format!("{ms} {}", at(m))
        };
        let largest = own.iter().max_by_key(|m| m.peak_bytes);
        let largest =
            largest.and_then(|m| Some(format!("{} {}", format_mib(m.peak_bytes?), at(m))));
        let out = own.iter().filter(|m| m.status == "OOM").count();
        let fastest = timed().min_by(|a, b| a.0.total_cmp(&b.0));
        let slowest = timed().max_by(|a, b| a.0.total_cmp(&b.0));
        let mut line = Fields::from_iter([("name", name)]);
        line.insert("out_of_memory", format!("{out} of {}", own.len()));
        line.insert("fastest", fastest.map(time));
        line.insert("slowest", slowest.map(time));
        line.insert("largest", largest);
        line
    };
    Report {
        title: "Fastest, slowest and largest size of each implementation".into(),
        columns: vec![
            Column::text("name", "Attention"),
            Column::text("out_of_memory", "OOM"),
            Column::text("fastest", "fastest")
                .under("Forward (ms)")
                .minor(2),
            Column::text("slowest", "slowest")
                .under("Forward (ms)")
                .minor(1),
            Column::text("largest", "Largest peak").minor(1),
        ],
        lines: by_name(all).into_iter().map(line).collect(),
        ..Default::default()
    }
}

/// How time and memory of one implementation grow with T at one width.
#[derive(Clone, Debug, PartialEq)]
pub struct Growth {
    pub name: String,
    pub width: u64,
    pub time: Option<PowerLaw>,
    pub before_backward: Option<PowerLaw>,
    pub shortest: u64,
    pub longest: u64,
}

/// The growth at the largest width that an implementation was measured at, at three lengths or more.
pub fn growth(all: &[Measured]) -> Vec<Growth> {
    let laws = by_name(all).into_iter().filter_map(|(name, own)| {
        let own: Vec<&Measured> = own.into_iter().filter(|m| m.status == "ok").collect();
        let width = own.iter().map(|m| m.width).max()?;
        let at: Vec<&Measured> = own.into_iter().filter(|m| m.width == width).collect();
        let law = |of: fn(&Measured) -> Option<f64>| {
            let points = at.iter();
            let points = points.filter_map(|m| Some((m.context_length as f64, of(m)?)));
            PowerLaw::fit(&points.collect::<Vec<_>>())
        };
        let growth = Growth {
            name,
            width,
            time: law(|m| m.mean_ms(BOTH)),
            before_backward: law(|m| Some(m.before_backward_bytes? as f64)),
            shortest: at.iter().map(|m| m.context_length).min()?,
            longest: at.iter().map(|m| m.context_length).max()?,
        };
        (growth.time.is_some() || growth.before_backward.is_some()).then_some(growth)
    });
    laws.collect()
}

/// How to read the main table.
pub fn notes(is_layer: bool, is_any_planned: bool) -> Vec<String> {
    let [peak, before_backward, planned, times] = [
        "Peak is the largest amount of memory in a step; saved is how far it is below naive's.",
        "Memory before B is what is allocated between forward and backward, inputs included; of planned attention, what \
         backward still reads.",
        "Planned attention is compiled for its shape before it runs. Its peak includes the plan's whole buffer.",
        "Times are mean ± standard deviation. Speed-up is naive's mean over the row's; unclear: its spread is too large \
         for a ratio. Forward keeps what backward needs.",
    ];
    let mut notes = vec![times.to_string(), peak.into()];
    notes.extend((!is_layer).then(|| before_backward.into()));
    notes.extend(is_any_planned.then(|| planned.into()));
    notes
}
