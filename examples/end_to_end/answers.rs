//! Answers from the measured times. Functions take plain figures, so that tests can call them with made-up ones.

use super::reasons::{Counted, reasons};
use super::table::{By, Compared, Comparison, Row};
use super::words::{self, grouped, names};
use serde_json::Value;
use tallow::bench::{EndToEndRow, UPDATE};
use tallow::memory::Mode;
use tallow::report::{Answer, PowerLaw, Speedup, Statistics, counted, format_mib};

/// A measured phase of a run.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// The prefix that distinguishes the configuration from the others, `T 256 planned: `; empty if there is only one.
    pub title: String,
    pub row: EndToEndRow,
}

impl Measured {
    pub fn samples_ms(&self) -> &[f64] {
        self.row.time.as_ref().map_or(&[], |time| &time.samples_ms)
    }

    pub fn warmup_ms(&self) -> &[f64] {
        self.row.time.as_ref().map_or(&[], |time| &time.warmup_ms)
    }

    /// Returns the ratio of this time to that of `other`.
    pub fn over(&self, other: &Self) -> Option<Speedup> {
        Speedup::new(self.row.statistics()?, other.row.statistics()?)
    }
}

/// Returns the rows that were measured, with the names of their configurations, whose runs may differ in warm-up.
pub fn measured(rows: &[Row], compared: &Compared) -> Vec<Measured> {
    let labels = rows.iter().map(|row| {
        let mut labels = compared.labels_of(row);
        labels.insert("warmup_steps", Value::Null);
        labels.insert(compared.by.key(), compared.by.value(row));
        labels
    });
    let names = names(&labels.collect::<Vec<_>>());
    let named = rows.iter().zip(names).map(|(row, name)| Measured {
        title: match name.as_str() {
            "all" => String::new(),
            name => format!("{name}: "),
        },
        row: row.row.clone(),
    });
    named.filter(|own| own.row.time.is_some()).collect()
}

/// Formats samples as `12.8 ± 0.6 ms`.
pub fn ms(samples_ms: &[f64]) -> String {
    Statistics::new(samples_ms).map_or("n/a".into(), |own| format!("{own} ms"))
}

/// The largest number of items that an answer lists.
const NAMED: usize = 6;

/// Returns the answers about single runs, from those with the longest warm-up.
pub fn of_runs(all: &[Measured]) -> Vec<Answer> {
    let longest = all.iter().map(|own| own.row.warmup_steps).max();
    let all = all
        .iter()
        .filter(|own| Some(own.row.warmup_steps) == longest);
    let all: Vec<&Measured> = all.collect();
    let answers = [
        ("How long do forward and backward take?", durations(&all)),
        (
            "Is the variability between steps high, or is the standard deviation small?",
            variability(&all),
        ),
    ];
    let answers = answers.into_iter();
    answers
        .filter_map(|(question, answer)| Some(Answer::new(question, answer?)))
        .collect()
}

/// Describes the times of forward and backward, from the same steps if both ran.
pub fn durations(all: &[&Measured]) -> Option<String> {
    let is_same = |a: &Measured, b: &Measured| a.title == b.title;
    let mut items: Vec<String> = Vec::new();
    for (i, own) in all.iter().enumerate() {
        let is_first = !all[..i].iter().any(|other| is_same(other, own));
        if !is_first {
            continue;
        }
        let of = |phase: &str, mode: Option<Mode>| {
            all.iter().find(|other| {
                let is_mode = mode.is_none_or(|mode| other.row.mode == mode);
                is_same(other, own) && other.row.phase == phase && is_mode
            })
        };
        let Some(backward) = of("backward", None) else {
            let forward = of("forward", None);
            items.extend(
                forward.map(|own| format!("{}forward {}", own.title, ms(own.samples_ms()))),
            );
            continue;
        };
        let Some(forward) = of("forward", Some(backward.row.mode)) else {
            continue;
        };
        let ratio = match backward.over(forward) {
            Some(ratio) if ratio.is_clear() => format!("backward takes {ratio} as long as forward"),
            Some(ratio) => format!("how many times as long backward takes is unclear ({ratio})"),
            None => "one step has no spread to compare by".into(),
        };
        items.push(format!(
            "{}forward with loss {}, backward {}; {ratio}",
            own.title,
            ms(forward.samples_ms()),
            ms(backward.samples_ms())
        ));
    }
    (!items.is_empty()).then(|| format!("{}.", words::listed(&items, NAMED)))
}

/// The largest standard deviation, in percent of the mean, that counts as small.
const SMALL_PERCENT: f64 = 5.0;

/// Describes how much times vary between steps.
pub fn variability(all: &[&Measured]) -> Option<String> {
    let cvs = all.iter().filter_map(|own| {
        let cv = own.row.statistics()?.cv_percent?;
        let part = match own.row.is_whole_step() {
            true => own.row.phase.clone(),
            false => format!("{} of {}", own.row.phase, own.row.mode.name()),
        };
        Some((cv, format!("{}{part}", own.title)))
    });
    let mut cvs: Vec<(f64, String)> = cvs.collect();
    cvs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let ((least, _), (most, name)) = (cvs.first()?, cvs.last()?);
    let steps = counted(all.first()?.samples_ms().len(), "step");
    let large = cvs.iter().filter(|(cv, _)| *cv > SMALL_PERCENT).count();
    let range = match cvs.len() {
        1 => format!("{most:.1}% of the mean"),
        _ => format!("{least:.1}% to {most:.1}% of the mean (most: {name})"),
    };
    let range = format!("The standard deviation over {steps} is {range}");
    Some(match large {
        0 => format!("{range}: small, at most {SMALL_PERCENT}%."),
        _ => format!(
            "{range}: over {SMALL_PERCENT}% in {large} of {}. Something else ran meanwhile, or warm-up was too short: \
             compare such times only with more --steps on a quiet machine.",
            counted(cvs.len(), "time")
        ),
    })
}

/// Returns the answers that compare each value with the first: speed, its trend over sizes, memory, and what fits.
pub fn of_values(all: &[Comparison], values: &[&str], by: By, counted: &[Counted]) -> Vec<Answer> {
    let mut answers = Vec::new();
    let mut answer = |question: String, text: Option<String>| {
        answers.extend(text.map(|text| Answer::new(question, text)));
    };
    let Some((first, others)) = values.split_first() else {
        return answers;
    };
    let whole = || all.iter().filter(|own| own.first().is_whole_step());
    for value in others {
        let pairs: Vec<Pair> = all
            .iter()
            .filter_map(|own| own.pair(first, value))
            .collect();
        answer(
            match by {
                By::Execution => {
                    format!("How does {value} change forward, backward and the full step?")
                }
                By::Precision => format!("Is {value} faster than {first}?"),
            },
            speedups(first, value, &pairs),
        );
        if by == By::Precision && !pairs.is_empty() {
            let few = "A trend needs three sizes of model (--size tiny small medium).";
            answer(
                format!("How does the speed-up of {value} change with the model's size?"),
                trends(all, first, value).or(Some(few.into())),
            );
        }
        let peaks = whole().filter_map(|own| {
            let (before, after) = own.peaks(first, value)?;
            Some((own.name.clone(), before, after))
        });
        let peaks: Vec<words::Peaks> = peaks.collect();
        let copies = whole()
            .filter_map(|own| own.of(value)?.weight_cast_bytes)
            .max();
        let copies = copies.filter(|_| by == By::Precision);
        answer(
            format!("Does {value} use less memory than {first}?"),
            (!peaks.is_empty()).then(|| words::memory(value, first, &peaks, copies)),
        );
        if by == By::Execution {
            answer(
                "What are the reasons for the difference?".into(),
                of_longest(&pairs, counted),
            );
        }
    }
    let not_ok = whole().filter(|own| own.outcome() != "ok").map(|own| {
        let refused = values.iter().filter_map(|value| own.of(value));
        let refused = refused.filter(|row| row.time.is_none());
        let needed: Vec<String> = refused
            .map(|row| format!("{} needs {}", by.value(row), format_mib(row.estimate_bytes)))
            .collect();
        format!("{}: {} ({})", own.name, own.outcome(), needed.join(", "))
    });
    let not_ok: Vec<String> = not_ok.collect();
    let fits = match values.len() {
        1 => "What does not fit?".into(),
        _ => format!("What does not fit in every {}?", by.key()),
    };
    answer(fits, (!not_ok.is_empty()).then(|| not_ok.join("; ") + "."));
    answers
}

/// One phase, measured with two of the compared values.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The name of the configuration and its phase.
    pub name: String,
    pub phase: String,
    pub before_ms: f64,
    pub after_ms: f64,
    pub speedup: Option<Speedup>,
}

impl Comparison<'_> {
    /// Pairs two values of a whole step, or of backward and optimizer together; `None` for other phases.
    fn pair(&self, before: &str, after: &str) -> Option<Pair> {
        let phase = &self.first().phase;
        let [before, after] = [before, after].map(|value| self.of(value)?.statistics());
        let (before, after) = before.zip(after)?;
        (self.first().is_whole_step() || phase == UPDATE).then(|| Pair {
            name: self.name.clone(),
            phase: phase.clone(),
            before_ms: before.mean_ms,
            after_ms: after.mean_ms,
            speedup: Speedup::new(before, after),
        })
    }
}

/// Describes the speed-up of each phase: with its times for one configuration, as a mean for several.
pub fn speedups(before: &str, after: &str, all: &[Pair]) -> Option<String> {
    let timed = all.iter().filter(|pair| pair.speedup.is_some());
    let phases = grouped(timed, |pair| &pair.phase);
    let sentences = phases.into_iter().map(|(phase, pairs)| {
        let own: Vec<Speedup> = pairs.iter().filter_map(|pair| pair.speedup).collect();
        match (&own[..], &pairs[..]) {
            ([speedup], [pair]) => {
                let unclear = if speedup.is_clear() { "" } else { "unclear, " };
                let [new, old] = [pair.after_ms, pair.before_ms].map(words::ms);
                format!(" {phase}: {unclear}{speedup} ({new} against {old} ms).")
            }
            _ => {
                let clear = own.iter().filter(|speedup| speedup.is_clear()).count();
                let mean = words::mean_speedup(&own);
                match mean == "unclear" {
                    true => {
                        format!(
                            " {phase}: unclear in {}.",
                            counted(own.len(), "configuration")
                        )
                    }
                    false => {
                        let of = counted(clear, "configuration");
                        format!(" {phase}: {mean}, the geometric mean of {of}.")
                    }
                }
            }
        }
    });
    let mut text: String = sentences.collect();
    if text.contains("unclear") {
        text += words::UNCLEAR;
    }
    let start = format!("Speed-ups of {after} over {before}, as ratios of mean times.");
    (!text.is_empty()).then(|| format!("{start}{text}"))
}

/// Returns a sentence for each group of whole steps that differ only in the model's size.
fn trends(all: &[Comparison], before: &str, after: &str) -> Option<String> {
    let group = |own: &Comparison| {
        let row = own.first();
        let checkpointing = match row.checkpointing.to_string() {
            none if none == "none" => String::new(),
            strategy => format!(", checkpointing {strategy},"),
        };
        let (attention, t) = (row.attention, row.context_length);
        format!("{attention}{checkpointing} {}, T {t}", row.phase)
    };
    let whole = all.iter().filter(|own| own.first().is_whole_step());
    let mut groups = grouped(whole, |own| group(own));
    groups.sort_by(|(a, _), (b, _)| a.cmp(b));
    let sentences = groups.into_iter().filter_map(|(name, own)| {
        let points = own.into_iter().filter_map(|own| {
            let parameters = own.first().parameters as f64;
            Some((parameters, own.speedup(before, after)?))
        });
        Some(format!("{name}: {}.", trend(&points.collect::<Vec<_>>())?))
    });
    let sentences: Vec<String> = sentences.collect();
    (!sentences.is_empty()).then(|| sentences.join(" "))
}

/// Describes how the speed-up depends on the number of parameters; `None` for fewer than three sizes.
pub fn trend(points: &[(f64, Speedup)]) -> Option<String> {
    let mut points = points.to_vec();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let ratios: Vec<(f64, f64)> = points.iter().map(|(size, s)| (*size, s.ratio)).collect();
    let law = PowerLaw::fit(&ratios)?;
    let extreme = |f: fn(f64, f64) -> f64| ratios.iter().map(|(_, ratio)| *ratio).reduce(f);
    let (least, most) = (extreme(f64::min)?, extreme(f64::max)?);
    let shown: Vec<String> = points.iter().map(|(_, s)| s.to_string()).collect();
    let verdict = if !points.iter().all(|(_, s)| s.is_clear()) {
        "the spread is too large for a trend (take more steps)".into()
    } else if most < 1.1 * least {
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

/// Returns whether the longest training step is faster when planned, and why; `None` if no step was counted.
fn of_longest(pairs: &[Pair], counted: &[Counted]) -> Option<String> {
    let steps = pairs.iter().filter(|pair| pair.phase == "train step");
    let longest = steps.max_by(|a, b| a.before_ms.total_cmp(&b.before_ms))?;
    let mut own = counted
        .iter()
        .filter(|own| own.configuration == longest.name);
    let planned = own.find(|own| own.execution == "planned")?;
    reasons(planned.plan_ms, longest)
}
