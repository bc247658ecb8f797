//! What the times answer. Each function takes plain figures.

use super::phases::UPDATE;
use super::words::compared;
use serde::Deserialize;
use tallow::report::{Answer, Speedup, Statistics, counted, format_mib, mean_and_std};

/// A phase of a run, as its row has it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Measured {
    /// The configuration's name among others; empty if there is one.
    #[serde(skip)]
    pub name: String,
    /// The execution or precision, where several are compared.
    #[serde(skip)]
    pub value: String,
    pub mode: String,
    pub phase: String,
    pub warmup_steps: usize,
    /// The measured steps.
    pub samples_ms: Vec<f64>,
    /// The steps before them.
    pub warmup_ms: Vec<f64>,
    pub peak_bytes: Option<u64>,
    pub first_step_page_faults: Option<u64>,
    pub later_step_page_faults: Option<f64>,
    pub first_step_threads: Option<u64>,
    pub first_step_kernels_compiled: Option<u64>,
    pub first_step_kernels_loaded: Option<u64>,
}

impl Measured {
    pub fn statistics(&self) -> Option<Statistics> {
        Statistics::new(&self.samples_ms).ok()
    }

    /// How many times as long this took as `other`.
    pub fn over(&self, other: &Self) -> Option<Speedup> {
        Speedup::new(&self.statistics()?, &other.statistics()?)
    }

    /// `T 256 planned: `, or nothing where there is nothing to tell apart.
    pub fn title(&self) -> String {
        let parts = [self.name.as_str(), self.value.as_str()];
        let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        match parts.is_empty() {
            true => String::new(),
            false => format!("{}: ", parts.join(" ")),
        }
    }

    /// Whether it is the whole of its mode's step.
    pub fn is_step(&self) -> bool {
        let is_part = ["backward", "optimizer", UPDATE].contains(&self.phase.as_str());
        !is_part && (self.phase != "forward" || self.mode == "forward")
    }
}

/// `12.8 ± 0.6 ms`.
pub fn ms(samples_ms: &[f64]) -> String {
    let cell = Statistics::new(samples_ms).map(|own| mean_and_std(&own.fields()));
    match cell.as_ref().map(|cell| cell.as_str()) {
        Ok(Some(cell)) => format!("{cell} ms"),
        _ => "n/a".into(),
    }
}

/// At most this many items are named in an answer.
const NAMED: usize = 6;

/// `a; b; and 3 more in the table.`, or `None` if there is no item.
fn listed(items: &[String]) -> Option<String> {
    let shown = items[..items.len().min(NAMED)].join("; ");
    match items.len().saturating_sub(NAMED) {
        0 => (!items.is_empty()).then(|| format!("{shown}.")),
        more => Some(format!("{shown}; and {more} more in the table.")),
    }
}

/// The answers, apart from those on warm-up: of the runs with the longest one. `comparison` asks how the compared
/// values differ.
pub fn answers(all: &[Measured], comparison: Option<&str>) -> Vec<Answer> {
    let longest = all.iter().map(|own| own.warmup_steps).max();
    let all = all.iter().filter(|own| Some(own.warmup_steps) == longest);
    let all: Vec<&Measured> = all.collect();
    let answers = [
        ("How long do forward and backward take?", durations(&all)),
        (
            "Is the variability between steps high, or is the standard deviation small?",
            variability(&all),
        ),
        (
            comparison.unwrap_or_default(),
            comparison.and_then(|_| self::comparison(&all)),
        ),
    ];
    let answers = answers.into_iter();
    answers
        .filter_map(|(question, answer)| Some(Answer::new(question, answer?)))
        .collect()
}

/// How long forward and backward take, in the same steps where both ran.
pub fn durations(all: &[&Measured]) -> Option<String> {
    let is_same = |a: &Measured, b: &Measured| (&a.name, &a.value) == (&b.name, &b.value);
    let mut items: Vec<String> = Vec::new();
    let mut seen: Vec<&Measured> = Vec::new();
    for own in all.iter().filter(|own| own.phase == "forward") {
        let with_backward = |other: &&&Measured| is_same(other, own) && other.phase == "backward";
        if seen.iter().any(|other| is_same(other, own)) {
            continue;
        }
        seen.push(own);
        let Some(backward) = all.iter().find(with_backward) else {
            items.push(format!("{}forward {}", own.title(), ms(&own.samples_ms)));
            continue;
        };
        let is_forward = |other: &&&Measured| {
            is_same(other, own) && other.phase == "forward" && other.mode == backward.mode
        };
        let forward = all.iter().find(is_forward).unwrap_or(own);
        let ratio = match backward.over(forward) {
            Some(ratio) if ratio.is_clear() => format!("backward takes {ratio} as long as forward"),
            Some(ratio) => format!("how many times as long backward takes is unclear ({ratio})"),
            None => "one step has no spread to compare by".into(),
        };
        items.push(format!(
            "{}forward with loss {}, backward {}; {ratio}",
            own.title(),
            ms(&forward.samples_ms),
            ms(&backward.samples_ms)
        ));
    }
    listed(&items)
}

/// A standard deviation up to this part of the mean counts as small, in percent.
const SMALL_PERCENT: f64 = 5.0;

/// Whether the times vary much between steps.
pub fn variability(all: &[&Measured]) -> Option<String> {
    let cvs = all.iter().filter_map(|own| {
        let cv = own.statistics()?.cv_percent?;
        Some((cv, format!("{}{} of {}", own.title(), own.phase, own.mode)))
    });
    let mut cvs: Vec<(f64, String)> = cvs.collect();
    cvs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let ((least, _), (most, name)) = (cvs.first()?, cvs.last()?);
    let steps = counted(all.first()?.samples_ms.len(), "step");
    let large = cvs.iter().filter(|(cv, _)| *cv > SMALL_PERCENT).count();
    let range = format!(
        "The standard deviation over {steps} is {least:.1}% to {most:.1}% of the mean (most: {name})"
    );
    Some(match large {
        0 => format!("{range}: small, at most {SMALL_PERCENT}%."),
        _ => format!(
            "{range}: over {SMALL_PERCENT}% in {large} of {}. Something else ran meanwhile, or warm-up was too short: \
             compare such times only with more --steps on a quiet machine.",
            counted(cvs.len(), "time")
        ),
    })
}

/// How the compared values differ in forward alone, in forward and backward, in backward and optimizer, and in the whole
/// step, with the peak of their mode.
pub fn comparison(all: &[&Measured]) -> Option<String> {
    let is_named = |own: &&&Measured| own.phase == UPDATE || own.is_step();
    let mut items: Vec<String> = Vec::new();
    for own in all.iter().filter(is_named) {
        let is_first = |other: &&&Measured| {
            (&other.name, &other.mode, &other.phase) == (&own.name, &own.mode, &own.phase)
        };
        let Some(first) = all
            .iter()
            .find(is_first)
            .filter(|first| first.value != own.value)
        else {
            continue;
        };
        let Some(speedup) = first.over(own) else {
            continue;
        };
        let peaks = first.peak_bytes.zip(own.peak_bytes);
        let peaks = peaks.filter(|_| own.is_step());
        let peak = |bytes| format!(" with a peak of {}", format_mib(bytes));
        let [first_peak, own_peak] = [peaks.map(|both| both.0), peaks.map(|both| both.1)]
            .map(|p| p.map_or(String::new(), peak));
        let name = match own.name.is_empty() {
            true => String::new(),
            false => format!("{}, ", own.name),
        };
        items.push(format!(
            "{name}{}: {} {}{first_peak}, {} {}{own_peak}; {}",
            own.phase,
            first.value,
            ms(&first.samples_ms),
            own.value,
            ms(&own.samples_ms),
            compared(&own.value, &first.value, speedup)
        ));
    }
    listed(&items)
}
