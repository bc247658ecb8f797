//! The parts of a step as a table: each phase of what is compared side by side, and what lies between the phases.

use tallow::bench::Timing;
use tallow::report::{Column, Fields, Report, mean_and_std};

/// What rows have phases for.
const MEASURED: [&str; 3] = ["forward", "backward", "optimizer"];

/// Two of them together, step by step.
const UPDATE: &str = "backward+optimizer";

/// The step less its phases.
const REST: &str = "between the phases";

/// Their names for a step as a whole.
const WHOLE: [&str; 2] = ["forward+backward", "train step"];

/// The modes that have several phases.
const MODES: [&str; 2] = ["forward-backward", "train-step"];

/// A line for each phase of the steps in `rows`, with mean ± std for each of `values` of `field`, and how many times as
/// long as the others the first takes, by means. Lines are told apart by the fields of `by`.
pub fn table(rows: &[Fields], by: &[(&str, &str)], field: &str, values: &[String]) -> Report {
    let mut columns: Vec<Column> = by
        .iter()
        .map(|(key, title)| Column::text(*key, *title))
        .collect();
    columns.push(Column::text("mode", "Mode"));
    columns.push(Column::text("phase", "Phase"));
    for (i, value) in values.iter().enumerate() {
        columns.push(Column::ms(value.as_str(), value.as_str()));
        if i > 0 {
            columns.push(Column::number(speedup(value), "speed-up", "", 2).minor(1));
        }
    }
    let is_same = |a: &Fields, b: &Fields| by.iter().all(|(key, _)| a.get(key) == b.get(key));
    let mut lines: Vec<Fields> = Vec::new();
    let mut seen: Vec<&Fields> = Vec::new();
    for row in rows {
        if seen.iter().any(|other| is_same(other, row)) {
            continue;
        }
        seen.push(row);
        let own: Vec<&Fields> = rows.iter().filter(|other| is_same(other, row)).collect();
        for mode in MODES {
            let sides: Vec<Vec<(&str, Fields)>> = values
                .iter()
                .map(|value| {
                    let is_own =
                        |row: &&&Fields| text(row, "mode") == mode && text(row, field) == value;
                    parts(&own.iter().filter(is_own).copied().collect::<Vec<_>>())
                })
                .collect();
            for phase in MEASURED.into_iter().chain([UPDATE, REST]).chain(WHOLE) {
                let cells: Vec<Option<&Fields>> =
                    sides.iter().map(|side| find(side, phase)).collect();
                if cells.iter().all(Option::is_none) {
                    continue;
                }
                let mut line: Fields = by
                    .iter()
                    .map(|(key, _)| (*key, row.get(key).cloned()))
                    .collect();
                line.insert("mode", mode).insert("phase", phase);
                for (value, cell) in values.iter().zip(&cells) {
                    line.insert(value.as_str(), cell.map(mean_and_std));
                    // What is left has no speed of its own.
                    let means = mean(cells[0]).zip(mean(*cell)).filter(|_| phase != REST);
                    line.insert(speedup(value), means.map(|(first, own)| first / own));
                }
                lines.push(line);
            }
        }
    }
    Report {
        title: "Phases of a step".into(),
        columns,
        lines,
        notes: notes(rows),
        ..Default::default()
    }
}

fn notes(rows: &[Fields]) -> Vec<String> {
    const OF_ALL: &str = "Phases and steps are of the same runs: phases and what lies between them add up to the \
        step. Speed-ups are ratios of means.";
    const OF_PLANNED: &str = "A planned step is timed at the calls where its phases begin; on a GPU each \
        phase is a launch, timed by events between them.";
    let is_any_planned = rows.iter().any(|row| text(row, "execution") == "planned");
    let of_planned = is_any_planned.then_some(OF_PLANNED);
    [OF_ALL]
        .into_iter()
        .chain(of_planned)
        .map(String::from)
        .collect()
}

/// The phases of one mode's rows, of the same steps: with backward and optimizer together, and what is left.
fn parts<'r>(rows: &[&'r Fields]) -> Vec<(&'r str, Fields)> {
    let mut parts: Vec<(&str, Fields)> = rows
        .iter()
        .map(|row| (text(row, "phase"), (*row).clone()))
        .collect();
    let own = |phase: &str| find(&parts, phase).map(samples);
    let update = own("backward").zip(own("optimizer"));
    let update = update.and_then(|(backward, optimizer)| combined(&backward, &optimizer, 1.0));
    let whole = WHOLE.into_iter().find_map(own);
    let phases: Vec<Vec<f64>> = MEASURED.into_iter().filter_map(own).collect();
    let rest = whole.filter(|_| !phases.is_empty()).and_then(|mut whole| {
        for phase in &phases {
            whole = combined(&whole, phase, -1.0)?;
        }
        Some(whole)
    });
    for (name, samples_ms) in [(UPDATE, update), (REST, rest)] {
        let timing = samples_ms.map(|samples_ms| Timing {
            samples_ms,
            ..Default::default()
        });
        parts.extend(timing.and_then(|timing| Some((name, timing.fields().ok()?))));
    }
    parts
}

/// What backward and optimizer took together in the training steps among `rows`.
pub fn update(rows: &[Fields]) -> Option<Fields> {
    let steps = rows.iter().filter(|row| text(row, "mode") == MODES[1]);
    find(&parts(&steps.collect::<Vec<_>>()), UPDATE).cloned()
}

/// `a + sign b`, step by step.
fn combined(a: &[f64], b: &[f64], sign: f64) -> Option<Vec<f64>> {
    let sums = a.iter().zip(b).map(|(a, b)| a + sign * b);
    (a.len() == b.len() && !a.is_empty()).then(|| sums.collect())
}

fn samples(row: &Fields) -> Vec<f64> {
    let samples = row.get("samples_ms").and_then(|samples| samples.as_array());
    let samples = samples.into_iter().flatten();
    samples.filter_map(|ms| ms.as_f64()).collect()
}

fn find<'p>(parts: &'p [(&str, Fields)], phase: &str) -> Option<&'p Fields> {
    let found = parts.iter().find(|(name, _)| *name == phase);
    found.map(|(_, fields)| fields)
}

fn mean(row: Option<&Fields>) -> Option<f64> {
    row?.get("mean_ms")?.as_f64()
}

fn speedup(value: &str) -> String {
    format!("speed-up {value}")
}

fn text<'r>(row: &'r Fields, field: &str) -> &'r str {
    let value = row.get(field).and_then(|value| value.as_str());
    value.unwrap_or_default()
}
