//! What the times answer. Each function takes plain figures.

use super::words::compared;
use serde::{Deserialize, Serialize};
use tallow::report::{Fields, Speedup, counted, format_mib, mean_and_std, speedup};

/// A timing: mean and standard deviation of `n` steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Time {
    pub mean_ms: f64,
    pub std_ms: Option<f64>,
    pub n: usize,
}

impl Time {
    fn fields(&self) -> Fields {
        Fields::of(self).unwrap_or_default()
    }

    /// How many times as long this takes as `other`.
    fn over(&self, other: &Self) -> Option<Speedup> {
        speedup(&self.fields(), &other.fields())
    }

    /// The standard deviation in percent of the mean.
    fn cv_percent(&self) -> Option<f64> {
        Some(100.0 * self.std_ms? / self.mean_ms).filter(|cv| cv.is_finite())
    }
}

/// `12.8 ± 0.6 ms`.
impl std::fmt::Display for Time {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let cell = mean_and_std(&self.fields());
        write!(f, "{} ms", cell.as_str().unwrap_or("n/a"))
    }
}

/// At most this many items are named in an answer.
const NAMED: usize = 6;

/// `a; b; and 3 more in the table.`, or `None` if there is no item.
fn listed(items: Vec<String>) -> Option<String> {
    let shown = items[..items.len().min(NAMED)].join("; ");
    match items.len().saturating_sub(NAMED) {
        0 => (!items.is_empty()).then(|| format!("{shown}.")),
        more => Some(format!("{shown}; and {more} more in the table.")),
    }
}

/// How long forward and backward take. Each item is a run's name with its forward, its backward, if any, and both in
/// the same steps.
pub fn durations(runs: &[(String, Time, Option<Time>)]) -> Option<String> {
    let runs = runs.iter().map(|(name, forward, backward)| {
        let named = match name.is_empty() {
            true => String::new(),
            false => format!("{name}: "),
        };
        let Some(backward) = backward else {
            return format!("{named}forward {forward}");
        };
        let ratio = match backward.over(forward) {
            Some(ratio) if ratio.is_clear() => format!("backward takes {ratio} as long"),
            Some(ratio) => format!("how much longer backward takes is unclear ({ratio})"),
            None => "one step has no spread to compare by".into(),
        };
        format!("{named}forward {forward}, backward {backward}; {ratio}")
    });
    listed(runs.collect())
}

/// A standard deviation up to this part of the mean counts as small, in percent.
const SMALL_PERCENT: f64 = 5.0;

/// Whether the times vary much between steps.
pub fn variability(times: &[(String, Time)]) -> Option<String> {
    let all = times.iter();
    let all: Vec<(f64, &str)> = all
        .filter_map(|(name, t)| Some((t.cv_percent()?, name.as_str())))
        .collect();
    let least = all.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
    let most = all.iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
    let steps = counted(times.first()?.1.n, "step");
    let small = all.iter().filter(|(cv, _)| *cv <= SMALL_PERCENT).count();
    let range = match all.len() {
        1 => format!(
            "The standard deviation over {steps} is {:.1}% of the mean",
            most.0
        ),
        _ => format!(
            "The standard deviation over {steps} is {:.1}% to {:.1}% of the mean (most: {})",
            least.0, most.0, most.1
        ),
    };
    Some(match all.len() - small {
        0 => format!("{range}: small, at most {SMALL_PERCENT}%."),
        large => format!(
            "{range}: over {SMALL_PERCENT}% in {large} of {}. Something else ran meanwhile, or warm-up was too short: \
             compare such times only with more --steps on a quiet machine.",
            counted(all.len(), "time")
        ),
    })
}

/// One phase of what is compared: the first value's time and another's.
pub struct Pair {
    /// The configuration, the phase and what both are, as `T 256: `, `forward`, `planned` and `eager`.
    pub name: String,
    pub phase: String,
    pub other: String,
    pub first: String,
    pub times: (Time, Time),
    pub peaks: Option<(u64, u64)>,
}

/// How planned steps, or precisions, compare in each phase, and in the peak of the longest mode.
pub fn comparison(pairs: &[Pair]) -> Option<String> {
    let sentences = pairs.iter().filter_map(|pair| {
        let (first, other) = pair.times;
        let verdict = compared(&pair.other, &pair.first, first.over(&other)?);
        let peak = pair.peaks.map_or(String::new(), |(first, other)| {
            format!(
                ", with a peak of {} instead of {}",
                format_mib(other),
                format_mib(first)
            )
        });
        Some(format!(
            "{}{}: {verdict}, {other} instead of {first}{peak}",
            pair.name, pair.phase
        ))
    });
    listed(sentences.collect())
}
