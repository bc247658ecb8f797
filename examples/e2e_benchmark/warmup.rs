//! What warm-up changed, by the rows.

use tallow::report::{Fields, counted, list_in_note};

/// A mean that is no further from the warmest run's than this is as good.
const NEAR_PERCENT: f64 = 5.0;

/// Rows of one configuration's whole step, by how many steps came before the measured ones.
struct Runs<'r> {
    name: String,
    rows: Vec<(u64, &'r Fields)>,
}

/// What the first steps cost and did, and how many warm-up steps suffice; with the names of the rows.
pub fn notes(rows: &[Fields], names: &[String]) -> Vec<String> {
    let all = runs(rows, names);
    let mut notes = Vec::new();
    let first: Vec<String> = all.iter().filter_map(first_step).collect();
    if !first.is_empty() {
        notes.push(list_in_note(
            "The first step over the median of the measured ones",
            &first,
        ));
    }
    let why: Vec<String> = all.iter().filter_map(what_it_did).collect();
    if !why.is_empty() {
        notes.push(list_in_note(
            "What the first step did once and for all",
            &why,
        ));
    }
    let changed: Vec<String> = all.iter().filter_map(without).collect();
    if !changed.is_empty() {
        notes.push(list_in_note(
            "What the mean is without warm-up, against that with most",
            &changed,
        ));
    }
    let enough: Vec<String> = all.iter().filter_map(enough).collect();
    if !enough.is_empty() {
        let start =
            format!("Warm-up after which the mean is within {NEAR_PERCENT}% of that with most");
        notes.push(list_in_note(&start, &enough));
    }
    notes
}

/// Whole steps, joined over their warm-ups.
fn runs<'r>(rows: &'r [Fields], names: &[String]) -> Vec<Runs<'r>> {
    let mut all: Vec<Runs<'r>> = Vec::new();
    for (row, name) in rows.iter().zip(names) {
        let text = |key: &str| {
            row.get(key)
                .and_then(|value| value.as_str())
                .unwrap_or_default()
        };
        let whole = match text("mode") {
            "forward-backward" => "forward+backward",
            "train-step" => "train step",
            _ => "forward",
        };
        let Some(warmup) = row.get("warmup_steps").and_then(|n| n.as_u64()) else {
            continue;
        };
        if text("phase") != whole || text("status") != "ok" {
            continue;
        }
        let name = name.replace(&format!("warm-up {warmup} "), "");
        match all.iter_mut().find(|runs| runs.name == name) {
            Some(runs) => runs.rows.push((warmup, row)),
            None => all.push(Runs {
                name,
                rows: vec![(warmup, row)],
            }),
        }
    }
    all
}

fn number(row: &Fields, key: &str) -> Option<f64> {
    row.get(key)?.as_f64()
}

/// The run whose first step was the slowest: in one process only the first run of all is cold.
fn coldest<'r>(runs: &Runs<'r>) -> Option<&'r Fields> {
    let times = runs
        .rows
        .iter()
        .filter_map(|(_, row)| Some((number(row, "first_step_ms")?, *row)));
    times.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, row)| row)
}

fn first_step(runs: &Runs<'_>) -> Option<String> {
    let row = coldest(runs)?;
    let times = number(row, "first_step_ms")? / number(row, "median_ms")?;
    Some(format!("{} {times:.2}x", runs.name))
}

fn what_it_did(runs: &Runs<'_>) -> Option<String> {
    let row = coldest(runs)?;
    let [pages, later] =
        ["first_step_page_faults", "later_step_page_faults"].map(|key| number(row, key));
    let others = [
        ("first_step_threads", "thread"),
        ("first_step_kernels_compiled", "source compiled"),
        ("first_step_kernels_loaded", "module of kernels loaded"),
    ];
    let others = others.into_iter().filter_map(|(key, what)| {
        let count = number(row, key).filter(|count| *count > 0.0)?;
        let (noun, rest) = what.split_once(' ').unwrap_or((what, ""));
        Some(
            format!(" and {} {rest}", counted(count as usize, noun))
                .trim_end()
                .to_string(),
        )
    });
    let others: String = others.collect();
    Some(format!(
        "{} {} new pages ({:.0} in a later step){others}",
        runs.name, pages?, later?
    ))
}

/// The extreme runs, if there are two.
fn ends<'r>(runs: &Runs<'r>) -> Option<(&'r Fields, u64, &'r Fields)> {
    let (least, cold) = runs.rows.iter().min_by_key(|(warmup, _)| *warmup)?;
    let (most, warm) = runs.rows.iter().max_by_key(|(warmup, _)| *warmup)?;
    (least < most).then_some((*cold, *most, *warm))
}

fn without(runs: &Runs<'_>) -> Option<String> {
    let (cold, _, warm) = ends(runs)?;
    if cold.get("warmup_steps") != Some(&0.into()) {
        return None;
    }
    let percent = 100.0 * (number(cold, "mean_ms")? / number(warm, "mean_ms")? - 1.0);
    let by = if percent < 0.0 { "lower" } else { "higher" };
    Some(format!("{} {:.0}% {by}", runs.name, percent.abs()))
}

fn enough(runs: &Runs<'_>) -> Option<String> {
    let (_, most, warm) = ends(runs)?;
    let wanted = number(warm, "mean_ms")?;
    let is_near = |row: &Fields| {
        let mean = number(row, "mean_ms");
        mean.is_some_and(|mean| 100.0 * (mean / wanted - 1.0).abs() <= NEAR_PERCENT)
    };
    let mut sorted: Vec<&(u64, &Fields)> = runs.rows.iter().collect();
    sorted.sort_by_key(|(warmup, _)| std::cmp::Reverse(*warmup));
    let near = sorted.into_iter().take_while(|(_, row)| is_near(row));
    let fewest = near.last().map_or(most, |(warmup, _)| *warmup);
    let steps = counted(fewest as usize, "step");
    Some(match fewest {
        0 => format!("{} without any", runs.name),
        _ if fewest == most => format!("{} not before {steps}", runs.name),
        _ => format!("{} after {steps}", runs.name),
    })
}
