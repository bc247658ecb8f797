//! Answers from the rows, which tests call with made-up figures.

use super::reasons::reasons;
use super::table::{By, Compared, Comparison, Row};
use super::words::{self, answered, grouped, named};
use tallow::bench::UPDATE;
use tallow::report::{Answer, PowerLaw, Speedup, counted};

/// The largest number of items that an answer lists.
const NAMED: usize = 6;

/// Returns the answers about single runs, from those with the longest warm-up.
pub fn of_runs(rows: &[Row]) -> Vec<Answer> {
    let longest = rows.iter().map(|row| row.warmup_steps).max();
    let rows = rows.iter().filter(|row| Some(row.warmup_steps) == longest);
    let rows: Vec<&Row> = rows.collect();
    answered([
        ("How long do forward and backward take?", durations(&rows)),
        (
            "Is the variability between steps high, or is the standard deviation small?",
            variability(&rows),
        ),
    ])
}

/// Describes the times of forward and backward, from the same steps if both ran.
fn durations(rows: &[&Row]) -> Option<String> {
    let configurations = named(rows.iter().copied(), &["mode", "phase"]).into_iter();
    let items = configurations.filter_map(|(name, rows)| {
        let of = |phase| rows.iter().filter(move |row| row.phase == phase);
        let times = match of("backward").next() {
            None => format!("forward {} ms", of("forward").next()?.statistics()?),
            Some(backward) => {
                let forward = of("forward").find(|row| row.mode == backward.mode)?;
                let (forward, backward) = (forward.statistics()?, backward.statistics()?);
                let ratio = match Speedup::new(backward, forward) {
                    Some(ratio) => format!("backward takes {ratio} as long as forward"),
                    None => "one step has no spread to compare by".into(),
                };
                format!("forward with loss {forward} ms, backward {backward} ms; {ratio}")
            }
        };
        Some(match name.as_str() {
            "all" => times,
            name => format!("{name}: {times}"),
        })
    });
    let items: Vec<String> = items.collect();
    (!items.is_empty()).then(|| format!("{}.", words::listed(&items, NAMED)))
}

/// The largest standard deviation, in percent of the mean, that counts as small.
const SMALL_PERCENT: f64 = 5.0;

/// Describes how much times vary between steps.
fn variability(rows: &[&Row]) -> Option<String> {
    let named = named(rows.iter().copied(), &[]).into_iter();
    let cvs = named.filter_map(|(name, rows)| Some((rows[0].statistics()?.cv_percent?, name)));
    let mut cvs: Vec<(f64, String)> = cvs.collect();
    cvs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let ((least, _), (most, name)) = (cvs.first()?, cvs.last()?);
    let steps = rows.iter().find_map(|row| Some(row.statistics()?.n))?;
    let large = cvs.iter().filter(|(cv, _)| *cv > SMALL_PERCENT).count();
    let range = match cvs.len() {
        1 => format!("{most:.1}% of the mean"),
        _ => format!("{least:.1}% to {most:.1}% of the mean (most: {name})"),
    };
    let verdict = match large {
        0 => format!("small, at most {SMALL_PERCENT}%."),
        _ => format!(
            "over {SMALL_PERCENT}% in {large} of {}. Something else ran meanwhile, or warm-up was too short: compare \
             such times only with more --steps on a quiet machine.",
            counted(cvs.len(), "time")
        ),
    };
    let steps = counted(steps, "step");
    Some(format!(
        "The standard deviation over {steps} is {range}: {verdict}"
    ))
}

/// Returns the answers that compare each value with the first: speed, its trend over sizes, and memory.
pub fn of_values(all: &[Comparison], compared: &Compared) -> Vec<Answer> {
    let Some((first, others)) = compared.values.split_first() else {
        return Vec::new();
    };
    let whole = all.iter().filter(|own| own.first().is_whole_step());
    let whole: Vec<&Comparison> = whole.collect();
    let answers = others.iter().flat_map(|value| {
        let speedups = speedups(all, first, value);
        let few = "A trend needs three sizes of model (--size tiny small medium).";
        let trends = trends(&whole, first, value).or(Some(few.into()));
        let trends = trends.filter(|_| compared.by == By::Precision && speedups.is_some());
        let faster = match compared.by {
            By::Execution => {
                format!("How does {value} change forward, backward and the full step?")
            }
            By::Precision => format!("Is {value} faster than {first}?"),
        };
        answered([
            (faster, speedups),
            (
                format!("How does the speed-up of {value} change with the model's size?"),
                trends,
            ),
            (
                format!("Does {value} use less memory than {first}?"),
                memory(&whole, first, value, compared.by),
            ),
            (
                "What are the reasons for the difference?".into(),
                reasons(all),
            ),
        ])
    });
    answers.collect()
}

/// Compares the peaks of whole steps.
fn memory(whole: &[&Comparison], first: &str, value: &str, by: By) -> Option<String> {
    let peaks = whole.iter().filter_map(|own| {
        let (before, after) = own.peaks(first, value)?;
        Some((own.name.clone(), before, after))
    });
    let peaks: Vec<words::Peaks> = peaks.collect();
    let rows = whole.iter().filter_map(|own| own.of(value));
    let copies = rows.filter_map(|row| row.weight_cast_bytes).max();
    let copies = copies.filter(|_| by == By::Precision);
    (!peaks.is_empty()).then(|| words::memory(value, first, &peaks, copies))
}

/// Describes the speed-up of each whole step, and of backward with the optimizer: with its times for one configuration,
/// of each of a few, as a mean of many.
fn speedups(all: &[Comparison], before: &str, after: &str) -> Option<String> {
    let is_shown = |row: &Row| row.is_whole_step() || row.phase == UPDATE;
    let shown = all.iter().filter(|own| is_shown(own.first()));
    let timed = shown.filter_map(|own| Some((own, own.speedup(before, after)?)));
    let phases = grouped(timed, |(own, _)| &own.first().phase).into_iter();
    let shown = |speedup: &Speedup| match speedup.is_clear() {
        true => speedup.to_string(),
        false => format!("unclear, {speedup}"),
    };
    let sentences = phases.map(|(phase, pairs)| {
        if let [(own, speedup)] = &pairs[..] {
            let time = |value| own.of(value).map_or(String::new(), Row::time_cell);
            let (new, old) = (time(after), time(before));
            return format!(" {phase}: {} ({new} against {old} ms).", shown(speedup));
        }
        if pairs.len() > NAMED {
            let speedups: Vec<Speedup> = pairs.iter().map(|(_, speedup)| *speedup).collect();
            let mean = words::mean_speedup(&speedups);
            let of = counted(pairs.len(), "configuration");
            return format!(" {phase}: {mean} as the geometric mean of {of}.");
        }
        let each = pairs.iter().map(|(own, speedup)| {
            let configuration = own.name.strip_suffix(phase.as_str()).unwrap_or(&own.name);
            format!("{configuration}{}", shown(speedup))
        });
        let each: Vec<String> = each.collect();
        format!(" {phase}: {}.", each.join("; "))
    });
    let mut text: String = sentences.collect();
    if text.contains("unclear") {
        text += words::UNCLEAR;
    }
    let start = format!("Speed-ups of {after} over {before}, ratios of mean times.");
    (!text.is_empty()).then(|| start + &text)
}

/// Returns a sentence for each group of whole steps that differ only in the model's size.
fn trends(whole: &[&Comparison], before: &str, after: &str) -> Option<String> {
    let rows = whole.iter().flat_map(|own| own.rows.iter().copied());
    let groups = named(rows, &["size", By::Precision.key()]).into_iter();
    let sentences = groups.filter_map(|(name, rows)| {
        let sizes = grouped(rows, |row| row.parameters).into_iter();
        let points = sizes.filter_map(|(parameters, rows)| {
            let own = Comparison {
                name: String::new(),
                by: By::Precision,
                rows,
            };
            Some((parameters as f64, own.speedup(before, after)?))
        });
        Some(format!("{name}: {}.", trend(points.collect())?))
    });
    let sentences: Vec<String> = sentences.collect();
    (!sentences.is_empty()).then(|| sentences.join(" "))
}

/// Describes how the speed-up depends on the number of parameters; `None` for fewer than three sizes.
pub fn trend(mut points: Vec<(f64, Speedup)>) -> Option<String> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let shown: Vec<String> = points.iter().map(|(_, s)| s.to_string()).collect();
    let ratios: Vec<(f64, f64)> = points.iter().map(|(size, s)| (*size, s.ratio)).collect();
    let law = PowerLaw::fit(&ratios)?;
    let extreme = |f: fn(f64, f64) -> f64| ratios.iter().map(|(_, ratio)| *ratio).reduce(f);
    let verdict = if !points.iter().all(|(_, s)| s.is_clear()) {
        "the spread is too large for a trend (take more steps)".into()
    } else if extreme(f64::max)? < 1.1 * extreme(f64::min)? {
        "it does not depend on the size".into()
    } else if law.fits() {
        let (exponent, fit) = (law.exponent, law.r_squared);
        format!("it changes as parameters^{exponent:.2} (R^2 {fit:.2})")
    } else {
        format!("no trend, a power law has R^2 {:.2}", law.r_squared)
    };
    let shown = shown.join(", ");
    Some(format!(
        "{shown} from the smallest model to the largest: {verdict}"
    ))
}
