//! What the summary shows: a line a configuration, its phases side by side; and what is compared, eager and planned or
//! f32 and half precision, under one heading with the speed-up.

use tallow::report::{Column, Fields, Report, mean_and_std, pivot};

/// A time of a line: its heading, the modes that have it (the first of them counts), the phase, and how minor it is.
struct Time(&'static str, &'static [&'static str], &'static str, u8);

const FORWARD: Time = Time(
    "Forward",
    &[
        "forward",
        "forward-keeping-graph",
        "forward-backward",
        "train-step",
    ],
    "forward",
    3,
);

/// Forward alone, without a loss: what the ratio is to.
const FORWARD_ALONE: Time = Time(
    "Forward",
    &["forward", "forward-keeping-graph"],
    "forward",
    3,
);
const BOTH: Time = Time("F+B", &["forward-backward"], "forward+backward", 1);
const TIMES: [Time; 5] = [
    FORWARD,
    BOTH,
    Time("Step", &["train-step"], "train step", 0),
    Time(
        "Backward",
        &["train-step", "forward-backward"],
        "backward",
        5,
    ),
    Time("Optimizer", &["train-step"], "optimizer", 5),
];

/// The other quantities, of the most that was run of a configuration: a field, its column, and how minor it is.
fn quantities() -> [(Column, u8); 6] {
    [
        (Column::ms("first_step_ms", "First step"), 6),
        (Column::mib("peak_bytes", "Peak"), 2),
        (Column::mib("reserved_peak_bytes", "Reserved"), 4),
        (Column::mib("allocated_bytes", "After the step"), 6),
        (Column::count("tokens_per_s", "Tokens/s"), 7),
        (Column::number("mfu_percent", "MFU", "%", 1), 8),
    ]
}

/// What sets lines apart.
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

/// The field that runs are compared in, and its values.
pub struct Compared {
    field: &'static str,
    values: Vec<String>,
}

impl Compared {
    /// Executions, or else precisions, where there are several.
    pub fn new(executions: Vec<String>, precisions: Vec<String>) -> Self {
        let (field, values) = match executions.len() {
            1 => ("precision", precisions),
            _ => ("execution", executions),
        };
        Self { field, values }
    }

    fn labels(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let is_across = |field| field == self.field && self.values.len() > 1;
        LABELS
            .into_iter()
            .filter(move |(field, _)| !is_across(*field))
    }

    /// A line for each configuration of `rows`.
    pub fn lines(&self, rows: &[Fields]) -> Vec<Fields> {
        let by: Vec<&str> = self.labels().map(|(field, _)| field).collect();
        let mut lines = pivot(rows, &by, "", |_| serde_json::Value::Null);
        for line in &mut lines {
            let is_own = |row: &&Fields| by.iter().all(|field| row.get(field) == line.get(field));
            let own: Vec<&Fields> = rows.iter().filter(is_own).collect();
            let sides = self.values.iter().map(|value| {
                let rows = own.iter().filter(|row| text(row, self.field) == value);
                (value, rows.copied().collect())
            });
            let sides: Vec<(&String, Vec<&Fields>)> = sides.collect();
            let first = sides.first().map_or(&[][..], |(_, rows)| rows);
            let cells: Vec<Fields> = sides
                .iter()
                .map(|(value, rows)| cells(value, rows, first))
                .collect();
            for cells in cells {
                line.merge(cells);
            }
        }
        lines
    }

    /// Where several runs are compared: the table of their phases, which `table` makes of `rows`, what tells lines
    /// apart, the field that is compared in and its values.
    pub fn details(
        &self,
        rows: &[Fields],
        table: impl Fn(&[Fields], &[(&str, &str)], &str, &[String]) -> Report,
    ) -> Vec<Report> {
        if self.values.len() < 2 {
            return Vec::new();
        }
        let by: Vec<(&str, &str)> = self.labels().collect();
        let table = table(rows, &by, self.field, &self.values);
        [table]
            .into_iter()
            .filter(|table| !table.lines.is_empty())
            .collect()
    }

    /// The columns; with the models' sizes where there are several models, and the first step's time among the needed
    /// ones where warm-up is what is asked about.
    pub fn columns(&self, is_any_other_model: bool, is_about_warmup: bool) -> Vec<Column> {
        let labels = self.labels();
        let mut columns: Vec<Column> = labels
            .map(|(field, title)| Column::text(field, title))
            .collect();
        for Time(title, _, _, minor) in TIMES {
            columns.extend(self.side_by_side(Column::ms(title, title), minor, true));
            if title == BOTH.0 {
                columns.extend(self.side_by_side(
                    Column::number("Ratio", "Ratio", "", 2),
                    4,
                    false,
                ));
            }
        }
        for (column, minor) in quantities() {
            let is_first_step = column.key == "first_step_ms";
            let minor = if is_first_step && is_about_warmup {
                0
            } else {
                minor
            };
            columns.extend(self.side_by_side(column, minor, false));
        }
        if is_any_other_model {
            columns.push(Column::count("parameters", "Parameters").minor(6));
            let sizes = [
                ("d_model", "d_model"),
                ("d_ff", "d_ff"),
                ("num_layers", "Layers"),
                ("num_heads", "Heads"),
            ];
            columns.extend(sizes.map(|(field, title)| Column::text(field, title).minor(6)));
        }
        columns.push(Column::text("device", "Device"));
        columns
    }

    /// One column of a quantity, or one for each of what is compared, with the speed-up over the first.
    fn side_by_side(&self, column: Column, minor: u8, has_speedup: bool) -> Vec<Column> {
        let Some((first, others)) = self.values.split_first() else {
            return Vec::new();
        };
        if others.is_empty() {
            let minor = if minor < 5 { 0 } else { minor };
            let key = key(&column.key, first);
            return vec![Column {
                key,
                minor,
                ..column
            }];
        }
        let own = |value: &String| Column {
            key: key(&column.key, value),
            title: value.clone(),
            under: column.title.clone(),
            minor,
            ..column.clone()
        };
        let mut columns = vec![own(first)];
        for other in others {
            columns.push(own(other));
            if has_speedup {
                let speedup = Column::number(speedup(&column.key, other), "speed-up", "", 2);
                columns.push(speedup.under(column.title.as_str()).minor(minor));
            }
        }
        columns
    }
}

/// What `rows` of one value show, beside those of the first.
fn cells(value: &str, rows: &[&Fields], first: &[&Fields]) -> Fields {
    let mut cells = Fields::new();
    for time in &TIMES {
        cells.insert(key(time.0, value), find(rows, time).map(mean_and_std));
        let means = mean(first, time).zip(mean(rows, time));
        cells.insert(
            speedup(time.0, value),
            means.map(|(first, own)| first / own),
        );
    }
    let means = mean(rows, &BOTH).zip(mean(rows, &FORWARD_ALONE));
    cells.insert(
        key("Ratio", value),
        means.map(|(both, forward)| both / forward),
    );
    for (column, _) in quantities() {
        let most = rows.last().and_then(|row| row.get(&column.key));
        cells.insert(key(&column.key, value), most.cloned());
    }
    cells
}

fn key(quantity: &str, value: &str) -> String {
    format!("{quantity} {value}")
}

fn speedup(quantity: &str, value: &str) -> String {
    format!("{quantity} speed-up {value}")
}

/// The row that has a time; the mode's only one where it did not run.
fn find<'r>(rows: &[&'r Fields], Time(_, modes, phase, _): &Time) -> Option<&'r Fields> {
    let of_mode = |mode: &&str| {
        let is_own = |row: &&&Fields| text(row, "mode") == *mode && text(row, "phase") == *phase;
        rows.iter().find(is_own).copied()
    };
    modes.iter().find_map(of_mode)
}

fn mean(rows: &[&Fields], time: &Time) -> Option<f64> {
    find(rows, time)?.get("mean_ms")?.as_f64()
}

fn text<'r>(row: &'r Fields, field: &str) -> &'r str {
    row.get(field)
        .and_then(|value| value.as_str())
        .unwrap_or_default()
}
