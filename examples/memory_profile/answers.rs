//! The rows of runs, and the answers from them, which tests call too.

use super::labels::Labels;
use super::words::{Peaks, answered, change, grouped, listed, memory};
use serde::Serialize;
use tallow::bench::{EndToEndRow, MemoryProfile, Status};
use tallow::memory::{MemoryKind, Mode};
use tallow::nn::Checkpointing;
use tallow::precision::Precision;
use tallow::report::{Answer, format_mib};

/// One run: prediction and measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub labels: Labels,
    /// `OOM` if the run needs more memory than is available.
    pub status: Status,
    pub peak_bytes: Option<u64>,
    pub estimate_bytes: u64,
    pub estimate_error_percent: Option<f64>,
    pub available_bytes: Option<u64>,
    pub reserved_peak_bytes: Option<u64>,
    pub forward_peak_bytes: Option<u64>,
    pub backward_peak_bytes: Option<u64>,
    pub optimizer_peak_bytes: Option<u64>,
    /// The phase with the highest peak.
    pub peak_phase: Option<&'static str>,
    /// Copies of the weights in half precision, at the peak.
    pub weight_cast_bytes: Option<u64>,
    pub saved_for_backward_bytes: Option<u64>,
    pub allocations: Option<u64>,
    pub lost_events: Option<u64>,
}

impl Row {
    /// Returns the row of a run, measured or not.
    pub fn new(labels: Labels, run: &EndToEndRow) -> Self {
        let memory = run.memory.clone().unwrap_or_default();
        let mut row = Self {
            labels,
            status: run.status,
            estimate_bytes: run.estimate_bytes,
            available_bytes: run.available_bytes,
            reserved_peak_bytes: memory.reserved_peak_bytes,
            weight_cast_bytes: run.weight_cast_bytes,
            ..Default::default()
        };
        row.set_peak(memory.peak_bytes);
        row
    }

    /// Adds the memory of a recorded step.
    pub fn add(&mut self, profile: &MemoryProfile) {
        let (recording, saved) = (&profile.recording, &profile.saved);
        let peak_event = recording.peak_event();
        self.set_peak(Some(profile.peak_bytes));
        self.reserved_peak_bytes = profile.reserved_peak_bytes;
        for phase in recording.phases() {
            let bytes = Some(recording.peak_bytes_in(phase));
            match phase.name {
                "forward" => self.forward_peak_bytes = bytes,
                "backward" => self.backward_peak_bytes = bytes,
                _ => self.optimizer_peak_bytes = bytes,
            }
            if self.peak_phase.is_none() && (phase.begins_at..=phase.ends_at).contains(&peak_event)
            {
                self.peak_phase = Some(phase.name);
            }
        }
        let at_peak = recording.bytes_by_kind_at(peak_event);
        self.weight_cast_bytes = Some(at_peak.bytes_of(MemoryKind::WeightCasts));
        self.saved_for_backward_bytes = (!saved.tensors.is_empty()).then(|| saved.residual_bytes());
        self.allocations = Some(profile.allocations);
        self.lost_events = Some(recording.lost_events);
    }

    /// Sets the measured peak, and the error of the prediction.
    fn set_peak(&mut self, peak_bytes: Option<u64>) {
        let error = |peak: u64| 100.0 * (self.estimate_bytes as f64 / peak as f64 - 1.0);
        self.estimate_error_percent = peak_bytes.map(error);
        self.peak_bytes = peak_bytes;
    }

    /// Formats the peak; for a run that was not measured, the predicted one.
    fn peak_words(&self) -> String {
        match self.peak_bytes {
            Some(bytes) => format_mib(bytes),
            None => format!("OOM (needs {})", format_mib(self.estimate_bytes)),
        }
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
    let named = || rows.iter().zip(names);
    let phases = named().filter_map(|(row, name)| Some(format!("{name}: {}", phases(row)?)));
    let peaks = named().map(|(row, name)| format!("{name} {}", row.peak_words()));
    let highest = "Which phase has the highest peak, and how high are the others?";
    let lengths = "What is the peak memory of each context length?";
    let mut answers = answered([(highest, sentence(phases)), (lengths, sentence(peaks))]);
    for (precision, own) in grouped(named(), |(row, _)| row.labels.precision) {
        let peaks = own.iter().filter_map(|(row, name)| {
            let in_f32 = Labels {
                precision: Precision::F32,
                ..row.labels.clone()
            };
            let before = rows.iter().find(|row| row.labels == in_f32)?.peak_bytes?;
            Some((name.to_string(), before, row.peak_bytes?))
        });
        let peaks: Vec<Peaks> = peaks.collect();
        if precision != Precision::F32 && !peaks.is_empty() {
            let copies = own.iter().filter_map(|(row, _)| row.weight_cast_bytes);
            let copies = copies.max().filter(|bytes| *bytes > 0);
            let question = format!("Does {precision} change the memory?");
            let text = memory(precision.name(), "f32", &peaks, copies);
            answers.push(Answer::new(question, text));
        }
    }
    let question = "Which activation checkpointing uses the least memory?";
    answers.extend(answered([(question, checkpointing(rows))]));
    answers
}

/// The phases of a step, and which is highest; `None` for a single phase.
fn phases(row: &Row) -> Option<String> {
    let peaks = [
        ("forward", row.forward_peak_bytes),
        ("backward", row.backward_peak_bytes),
        ("optimizer", row.optimizer_peak_bytes),
    ];
    let peaks = peaks.map(|(name, bytes)| Some((name, bytes?)));
    let peaks = peaks.iter().flatten();
    let (highest, _) = peaks.clone().max_by_key(|(_, bytes)| bytes)?;
    let words = peaks.map(|(name, bytes)| format!("{name} {}", format_mib(*bytes)));
    let words: Vec<String> = words.collect();
    (words.len() > 1).then(|| format!("{highest} is highest ({})", words.join(", ")))
}

/// Compares checkpointing strategies with none, among runs that are otherwise equal; `None` without such runs.
fn checkpointing(rows: &[Row]) -> Option<String> {
    let trained = rows.iter().filter(|row| row.labels.mode != Mode::Forward);
    let groups = grouped(trained, |row| Labels {
        checkpointing: Checkpointing::None,
        ..row.labels.clone()
    });
    sentence(groups.iter().filter_map(|(labels, group)| {
        let peaks = group.iter();
        let peaks = peaks.filter_map(|row| Some((row.peak_bytes?, row.labels.checkpointing)));
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
        let (precision, length) = (labels.precision, labels.context_length);
        let (execution, mode) = (labels.execution.name(), labels.mode.name());
        let run = format!("{precision} T {length} {execution} {mode}");
        Some(format!(
            "{run}: {least} uses the least ({words}; none {before})"
        ))
    }))
}
