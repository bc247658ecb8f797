//! The rows of runs, and the answers from them, which tests call too.

use super::words::{Peaks, answered, change, grouped, listed, memory, named};
use serde::Serialize;
use std::ops::Deref;
use tallow::bench::{EndToEndRow, MemoryProfile};
use tallow::memory::Mode;
use tallow::nn::Checkpointing;
use tallow::precision::Precision;
use tallow::report::{Answer, format_mib};

/// One run: prediction and measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub run: EndToEndRow,
    pub estimate_error_percent: Option<f64>,
    /// `None` of a planned run, and of one that is out of memory.
    #[serde(flatten)]
    pub recorded: Option<Recorded>,
}

/// Figures of a recorded step.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Recorded {
    pub forward_peak_bytes: Option<u64>,
    pub backward_peak_bytes: Option<u64>,
    pub optimizer_peak_bytes: Option<u64>,
    /// The phase with the highest peak.
    pub peak_phase: Option<&'static str>,
    pub saved_for_backward_bytes: Option<u64>,
    pub allocations: u64,
    pub lost_events: u64,
}

impl Deref for Row {
    type Target = EndToEndRow;

    fn deref(&self) -> &EndToEndRow {
        &self.run
    }
}

impl Row {
    /// Returns the row of a run, measured or not.
    pub fn new(run: EndToEndRow, profile: Option<&MemoryProfile>) -> Self {
        let error = |peak: u64| 100.0 * (run.estimate_bytes as f64 / peak as f64 - 1.0);
        Self {
            estimate_error_percent: run.peak_bytes().map(error),
            recorded: profile.map(Recorded::new),
            run,
        }
    }

    /// Formats the peak; for a run that was not measured, the predicted one.
    fn peak_words(&self) -> String {
        match self.peak_bytes() {
            Some(bytes) => format_mib(bytes),
            None => format!("OOM (needs {})", format_mib(self.estimate_bytes)),
        }
    }
}

impl Recorded {
    fn new(profile: &MemoryProfile) -> Self {
        let (recording, saved) = (&profile.recording, &profile.saved);
        let (phases, peak_event) = (recording.phases(), recording.peak_event());
        let peak = |name| {
            let phase = phases.iter().find(|phase| phase.name == name)?;
            Some(recording.peak_bytes_in(phase))
        };
        let mut at_peak = phases
            .iter()
            .filter(|phase| (phase.begins_at..=phase.ends_at).contains(&peak_event));
        Self {
            forward_peak_bytes: peak("forward"),
            backward_peak_bytes: peak("backward"),
            optimizer_peak_bytes: peak("optimizer"),
            peak_phase: at_peak.next().map(|phase| phase.name),
            saved_for_backward_bytes: (!saved.tensors.is_empty()).then(|| saved.residual_bytes()),
            allocations: profile.allocations,
            lost_events: recording.lost_events,
        }
    }

    /// Names the phase with the highest peak, and lists all; `None` for a single phase.
    fn phases(&self) -> Option<String> {
        let peaks = [
            ("forward", self.forward_peak_bytes),
            ("backward", self.backward_peak_bytes),
            ("optimizer", self.optimizer_peak_bytes),
        ];
        let peaks = peaks.map(|(name, bytes)| Some((name, bytes?)));
        let peaks = peaks.iter().flatten();
        let (highest, _) = peaks.clone().max_by_key(|(_, bytes)| bytes)?;
        let words = peaks.map(|(name, bytes)| format!("{name} {}", format_mib(*bytes)));
        let words: Vec<String> = words.collect();
        (words.len() > 1).then(|| format!("{highest} is highest ({})", words.join(", ")))
    }
}

/// Joins the first of these items; `None` without any.
fn sentence(items: impl Iterator<Item = String>) -> Option<String> {
    const NAMED: usize = 8;
    let items: Vec<String> = items.collect();
    (!items.is_empty()).then(|| listed(&items, NAMED) + ".")
}

/// Returns the answers from the rows, except those without figures. `names` are the runs' names.
pub fn answers(rows: &[Row], names: &[String]) -> Vec<Answer> {
    let named_rows = || rows.iter().zip(names);
    let phases = named_rows().filter_map(|(row, name)| {
        let phases = row.recorded.as_ref()?.phases()?;
        Some(format!("{name}: {phases}"))
    });
    let peaks = named_rows().map(|(row, name)| format!("{name} {}", row.peak_words()));
    let highest = "Which phase has the highest peak, and how high are the others?";
    let lengths = "What is the peak memory of each context length?";
    let mut answers = answered([(highest, sentence(phases)), (lengths, sentence(peaks))]);
    let runs = named(rows, &["precision"]);
    let of = |own: &[&Row], precision| {
        let row = own.iter().find(|row| row.precision == precision)?;
        row.peak_bytes()
    };
    for (precision, own) in grouped(rows, |row| row.precision) {
        let peaks = runs.iter().filter_map(|(name, own)| {
            let before = of(own, Precision::F32)?;
            Some((name.clone(), before, of(own, precision)?))
        });
        let peaks: Vec<Peaks> = peaks.collect();
        if precision != Precision::F32 && !peaks.is_empty() {
            let copies = own.iter().find_map(|row| row.weight_cast_bytes);
            let question = format!("Does {precision} change the memory?");
            let text = memory(precision.name(), "f32", &peaks, copies);
            answers.push(Answer::new(question, text));
        }
    }
    let question = "Which activation checkpointing uses the least memory?";
    answers.extend(answered([(question, checkpointing(rows))]));
    answers
}

/// Compares checkpointing strategies with none, among runs that are otherwise equal; `None` without such runs.
fn checkpointing(rows: &[Row]) -> Option<String> {
    let trained = rows.iter().filter(|row| row.mode != Mode::Forward);
    let runs = named(trained, &["checkpointing"]).into_iter();
    sentence(runs.filter_map(|(name, own)| {
        let peaks = own.iter();
        let peaks = peaks.filter_map(|row| Some((row.peak_bytes()?, row.checkpointing)));
        let (none, mut others): (Vec<_>, Vec<_>) =
            peaks.partition(|(_, strategy)| *strategy == Checkpointing::None);
        others.sort_by_key(|(bytes, _)| *bytes);
        let ((before, _), (lowest, least)) = (*none.first()?, *others.first()?);
        let least = Some(least).filter(|_| lowest < before).unwrap_or_default();
        let words = others.iter().map(|(bytes, strategy)| {
            let (peak, change) = (format_mib(*bytes), change(before, *bytes));
            format!("{strategy} {peak} ({change})")
        });
        let (words, before) = (words.collect::<Vec<_>>().join(", "), format_mib(before));
        Some(format!(
            "{name}: {least} uses the least ({words}; none {before})"
        ))
    }))
}
