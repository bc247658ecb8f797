//! What the rows of an attention benchmark say together: the numbers here, the sentences and tables in `words`, the
//! picture in `figure`.

mod figure;
mod words;

pub use figure::figure;

use serde::Serialize;
use std::collections::BTreeMap;
use tallow::report::{Fields, PowerLaw};

/// Counts, extremes, growth and speed-ups, from the rows of [`AttentionRun`](tallow::bench::AttentionRun) or
/// [`SelfAttentionRun`](tallow::bench::SelfAttentionRun), any number of runs together.
///
/// A configuration is an implementation, a T and a width (the head dimension, or d_model); the rows are taken to agree
/// in everything else.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Analysis {
    /// How many configurations there are.
    pub configurations: usize,
    /// How many of them ended how: `ok`, `OOM`, `unsupported`, `over time budget`.
    pub statuses: BTreeMap<String, usize>,
    /// How many of each implementation's configurations ran out of memory.
    pub out_of_memory: Vec<OutOfMemory>,
    /// The configurations where naive ran out of memory and another implementation ran.
    pub beyond_naive: Vec<BeyondNaive>,
    /// The fastest and slowest of each implementation and phase, by mean time.
    pub extremes: Vec<Extremes>,
    /// The largest peak of each implementation.
    pub peaks: Vec<Peak>,
    /// How time and memory grow with T, for each implementation and width measured at three T or more.
    pub growth: Vec<Growth>,
    /// Naive over each other implementation, where both were measured.
    pub speedups: Vec<Speedup>,
}

/// How many configurations of an implementation ran out of memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OutOfMemory {
    /// The implementation.
    pub implementation: String,
    /// Those that did.
    pub count: usize,
    /// All of them.
    pub of: usize,
}

/// A configuration that memory did not hold with naive attention, as another implementation ran it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BeyondNaive {
    /// The other implementation.
    pub implementation: String,
    /// Its forward and backward.
    pub place: Place,
    /// The most bytes alive at once.
    pub peak_bytes: Option<u64>,
}

/// A configuration and its mean time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Place {
    /// T.
    pub context_length: u64,
    /// Dh or D.
    pub width: u64,
    /// The mean.
    pub mean_ms: f64,
}

/// The fastest and the slowest configuration of an implementation in a phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Extremes {
    /// The implementation.
    pub implementation: String,
    /// The phase.
    pub phase: String,
    /// The least mean time.
    pub fastest: Place,
    /// The greatest.
    pub slowest: Place,
}

/// The configuration of an implementation that takes the most memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Peak {
    /// The implementation.
    pub implementation: String,
    /// T.
    pub context_length: u64,
    /// Dh or D.
    pub width: u64,
    /// The most bytes alive at once.
    pub peak_bytes: u64,
}

/// Growth with T at one width: the exponents say 2 where T^2 dominates, 1 where T does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Growth {
    /// The implementation.
    pub implementation: String,
    /// Dh or D.
    pub width: u64,
    /// The median time of forward and backward, in ms.
    pub time: Option<PowerLaw>,
    /// The bytes alive between forward and backward.
    pub before_backward: Option<PowerLaw>,
    /// The most bytes alive at once.
    pub peak: Option<PowerLaw>,
    /// The smallest T measured.
    pub shortest: u64,
    /// The largest.
    pub longest: u64,
}

/// How many times as long, and as much, naive takes as another implementation: medians over medians.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Speedup {
    /// The other implementation.
    pub implementation: String,
    /// T.
    pub context_length: u64,
    /// Dh or D.
    pub width: u64,
    /// Of forward.
    pub forward: Option<f64>,
    /// Of backward.
    pub backward: Option<f64>,
    /// Of both together.
    pub forward_backward: Option<f64>,
    /// Of the bytes before backward.
    pub before_backward: Option<f64>,
    /// Of the peaks.
    pub peak: Option<f64>,
}

/// What the analysis reads of a row.
struct Row<'a> {
    implementation: &'a str,
    context_length: u64,
    width: u64,
    phase: &'a str,
    status: &'a str,
    fields: &'a Fields,
}

const WHOLE: &str = "forward+backward";

/// What others are compared with.
const NAIVE: &str = "naive";

impl<'a> Row<'a> {
    fn read(fields: &'a Fields, width_key: &str) -> Option<Self> {
        let text = |key: &str| fields.get(key)?.as_str();
        Some(Self {
            implementation: text("implementation")?,
            context_length: fields.get("context_length")?.as_u64()?,
            width: fields.get(width_key)?.as_u64()?,
            phase: text("phase")?,
            status: text("status")?,
            fields,
        })
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.fields.get(key)?.as_f64()
    }

    fn is_at(&self, other: &Row<'_>) -> bool {
        (self.context_length, self.width) == (other.context_length, other.width)
    }

    fn place(&self) -> Option<Place> {
        Some(Place {
            context_length: self.context_length,
            width: self.width,
            mean_ms: self.number("mean_ms")?,
        })
    }
}

/// The different values, in the order in which they first come.
fn different<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}

impl Analysis {
    /// Reads the rows; `width_key` is the field that holds the width, `head_dim` or `d_model`. Rows that lack a label
    /// are passed over.
    pub fn of(rows: &[Fields], width_key: &str) -> Self {
        let rows: Vec<Row<'_>> = rows
            .iter()
            .filter_map(|fields| Row::read(fields, width_key))
            .collect();
        // Every configuration has this row, whatever became of it.
        let whole: Vec<&Row<'_>> = rows.iter().filter(|row| row.phase == WHOLE).collect();
        let mut statuses = BTreeMap::new();
        for row in &whole {
            *statuses.entry(row.status.to_string()).or_default() += 1;
        }
        let mut analysis = Self {
            configurations: whole.len(),
            statuses,
            ..Default::default()
        };
        for name in different(rows.iter().map(|row| row.implementation)) {
            let own: Vec<&Row<'_>> = rows.iter().filter(|r| r.implementation == name).collect();
            let whole: Vec<_> = own.iter().filter(|row| row.phase == WHOLE).collect();
            analysis.out_of_memory.push(OutOfMemory {
                implementation: name.into(),
                count: whole.iter().filter(|row| row.status == "OOM").count(),
                of: whole.len(),
            });
            for phase in different(own.iter().map(|row| row.phase)) {
                analysis.extremes.extend(extremes(&own, name, phase));
            }
            analysis.peaks.extend(peak(&own, name));
            for width in different(own.iter().map(|row| row.width)) {
                analysis.growth.extend(growth(&own, name, width));
            }
        }
        analysis.beyond_naive = beyond_naive(&whole);
        analysis.speedups = speedups(&rows);
        analysis
    }
}

fn beyond_naive(rows: &[&Row<'_>]) -> Vec<BeyondNaive> {
    let is_out_for_naive = |row: &Row<'_>| {
        let is_naives = |other: &&&Row<'_>| other.implementation == NAIVE && other.is_at(row);
        rows.iter()
            .find(is_naives)
            .is_some_and(|naive| naive.status == "OOM")
    };
    let ran = rows
        .iter()
        .filter(|row| row.status == "ok" && is_out_for_naive(row));
    let beyond = ran.filter_map(|row| {
        Some(BeyondNaive {
            implementation: row.implementation.into(),
            place: row.place()?,
            peak_bytes: row
                .fields
                .get("peak_bytes")
                .and_then(|bytes| bytes.as_u64()),
        })
    });
    beyond.collect()
}

fn extremes(rows: &[&Row<'_>], implementation: &str, phase: &str) -> Option<Extremes> {
    let of_phase = rows.iter().filter(|row| row.phase == phase);
    let mut places: Vec<Place> = of_phase.filter_map(|row| row.place()).collect();
    places.sort_by(|a, b| a.mean_ms.total_cmp(&b.mean_ms));
    Some(Extremes {
        implementation: implementation.into(),
        phase: phase.into(),
        fastest: places.first()?.clone(),
        slowest: places.last()?.clone(),
    })
}

fn peak(rows: &[&Row<'_>], implementation: &str) -> Option<Peak> {
    let of_row = |row: &&Row<'_>| {
        Some(Peak {
            implementation: implementation.into(),
            context_length: row.context_length,
            width: row.width,
            peak_bytes: row.fields.get("peak_bytes")?.as_u64()?,
        })
    };
    let peaks = rows.iter().filter_map(of_row);
    peaks.max_by_key(|peak| peak.peak_bytes)
}

fn growth(rows: &[&Row<'_>], implementation: &str, width: u64) -> Option<Growth> {
    let measured: Vec<&&Row<'_>> = rows
        .iter()
        .filter(|row| row.width == width && row.phase == WHOLE && row.status == "ok")
        .collect();
    let law = |key: &str| {
        let points = measured
            .iter()
            .filter_map(|row| Some((row.context_length as f64, row.number(key)?)));
        PowerLaw::fit(&points.collect::<Vec<_>>())
    };
    let growth = Growth {
        implementation: implementation.into(),
        width,
        time: law("median_ms"),
        before_backward: law("before_backward_bytes"),
        peak: law("peak_bytes"),
        shortest: measured.iter().map(|row| row.context_length).min()?,
        longest: measured.iter().map(|row| row.context_length).max()?,
    };
    let laws = [growth.time, growth.before_backward, growth.peak];
    laws.iter().any(Option::is_some).then_some(growth)
}

fn speedups(rows: &[Row<'_>]) -> Vec<Speedup> {
    let of = |name: &str, phase: &'static str, at: &Row<'_>, key: &str| {
        let found =
            |row: &&Row<'_>| row.implementation == name && row.phase == phase && row.is_at(at);
        rows.iter().find(found)?.number(key)
    };
    let others = rows
        .iter()
        .filter(|row| row.implementation != NAIVE && row.phase == WHOLE);
    let speedups = others.map(|row| {
        let name = row.implementation;
        let ratio = |phase, key| Some(of(NAIVE, phase, row, key)? / of(name, phase, row, key)?);
        Speedup {
            implementation: name.into(),
            context_length: row.context_length,
            width: row.width,
            forward: ratio("forward", "median_ms"),
            backward: ratio("backward", "median_ms"),
            forward_backward: ratio(WHOLE, "median_ms"),
            before_backward: ratio(WHOLE, "before_backward_bytes"),
            peak: ratio(WHOLE, "peak_bytes"),
        }
    });
    speedups.filter(|s| s.forward_backward.is_some()).collect()
}
