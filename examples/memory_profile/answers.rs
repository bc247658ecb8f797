//! The rows of runs, and the answers from them, which tests call too.

use super::labels::Labels;
use super::words::{Peaks, change, listed, memory};
use serde::Serialize;
use tallow::bench::Status;
use tallow::memory::Mode;
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
    pub peak_phase: Option<String>,
    /// Copies of the weights in half precision, at the peak.
    pub weight_cast_bytes: Option<u64>,
    pub saved_for_backward_bytes: Option<u64>,
    pub allocations: Option<u64>,
    pub lost_events: Option<u64>,
}

impl Row {
    /// The labels, in f32.
    fn in_f32(&self) -> Labels {
        Labels {
            precision: Precision::F32,
            ..self.labels.clone()
        }
    }

    /// The labels, without checkpointing.
    fn without_checkpointing(&self) -> Labels {
        Labels {
            checkpointing: Checkpointing::None,
            ..self.labels.clone()
        }
    }

    /// Sets the measured peak, and the error of the prediction.
    pub fn measured(&mut self, peak_bytes: u64) {
        self.peak_bytes = Some(peak_bytes);
        let error = self.estimate_bytes as f64 / peak_bytes as f64 - 1.0;
        self.estimate_error_percent = Some(100.0 * error);
    }

    /// Formats the peak; for a run that was not measured, the predicted one.
    fn peak_words(&self) -> String {
        match self.peak_bytes {
            Some(bytes) => format_mib(bytes),
            None => format!("OOM (needs {})", format_mib(self.estimate_bytes)),
        }
    }
}

/// The peak of the run with these labels.
fn peak_of(rows: &[Row], labels: &Labels) -> Option<u64> {
    rows.iter().find(|row| row.labels == *labels)?.peak_bytes
}

/// The largest number of runs that an answer lists.
const NAMED: usize = 8;

/// Returns the answers from the rows, except those without figures. `names` are the runs' names.
pub fn answers(rows: &[Row], names: &[String]) -> Vec<Answer> {
    let named = || rows.iter().zip(names);
    let phases = named().filter_map(|(row, name)| Some(format!("{name}: {}", phases(row)?)));
    let phases: Vec<String> = phases.collect();
    let peaks = named().map(|(row, name)| format!("{name} {}", row.peak_words()));
    let peaks: Vec<String> = peaks.collect();
    let mut answers = Vec::new();
    if !phases.is_empty() {
        let text = listed(&phases, NAMED) + ".";
        let question = "Which phase has the highest peak, and how high are the others?";
        answers.push(Answer::new(question, text));
    }
    let question = "What is the peak memory of each context length?";
    answers.push(Answer::new(question, listed(&peaks, NAMED) + "."));
    let mut precisions: Vec<Precision> = rows.iter().map(|row| row.labels.precision).collect();
    precisions.sort_by_key(|precision| precision.name());
    precisions.dedup();
    for precision in precisions.into_iter().filter(|own| *own != Precision::F32) {
        let own = named().filter(|(row, _)| row.labels.precision == precision);
        let pairs = own.filter_map(|(row, name)| {
            let before = peak_of(rows, &row.in_f32())?;
            Some((row, (name.clone(), before, row.peak_bytes?)))
        });
        let (own, peaks): (Vec<&Row>, Vec<Peaks>) = pairs.unzip();
        if !peaks.is_empty() {
            let copies = own.iter().filter_map(|row| row.weight_cast_bytes).max();
            let copies = copies.filter(|bytes| *bytes > 0);
            let question = format!("Does {precision} change the memory?");
            let text = memory(precision.name(), "f32", &peaks, copies);
            answers.push(Answer::new(question, text));
        }
    }
    answers.extend(checkpointing(rows));
    answers
}

/// The phases of a step, and which is highest; `None` for a single phase.
fn phases(row: &Row) -> Option<String> {
    let peaks = [
        ("forward", row.forward_peak_bytes),
        ("backward", row.backward_peak_bytes),
        ("optimizer", row.optimizer_peak_bytes),
    ];
    let peaks = peaks
        .into_iter()
        .filter_map(|(name, bytes)| Some((name, bytes?)));
    let peaks: Vec<(&str, u64)> = peaks.collect();
    let highest = peaks.iter().max_by_key(|(_, bytes)| *bytes)?.0;
    let words = peaks
        .iter()
        .map(|(name, bytes)| format!("{name} {}", format_mib(*bytes)));
    let words = words.collect::<Vec<_>>().join(", ");
    (peaks.len() > 1).then(|| format!("{highest} is highest ({words})"))
}

/// Compares checkpointing strategies with none, among runs that are otherwise equal; `None` without such runs.
pub fn checkpointing(rows: &[Row]) -> Option<Answer> {
    let is_whole = |row: &&Row| row.labels == row.without_checkpointing();
    let has_backward = |row: &&Row| row.labels.mode != Mode::Forward;
    let whole = rows.iter().filter(is_whole).filter(has_backward);
    let sentences = whole.filter_map(|whole| {
        let before = whole.peak_bytes?;
        let others = rows.iter().filter(|row| {
            row.labels != whole.labels && row.without_checkpointing() == whole.labels
        });
        let mut peaks: Vec<(u64, &Row)> = others
            .filter_map(|row| Some((row.peak_bytes?, row)))
            .collect();
        peaks.sort_by_key(|(bytes, _)| *bytes);
        let words = peaks.iter().map(|(after, row)| {
            let change = change(before, *after);
            format!(
                "{} {} ({change})",
                row.labels.checkpointing,
                format_mib(*after)
            )
        });
        let words = words.collect::<Vec<_>>().join(", ");
        let least = peaks.first().filter(|(bytes, _)| *bytes < before);
        let least = least.map_or(Checkpointing::None, |(_, row)| row.labels.checkpointing);
        let Labels {
            precision,
            context_length,
            execution,
            mode,
            ..
        } = &whole.labels;
        let (execution, mode) = (execution.name(), mode.name());
        Some(format!(
            "{precision} T {context_length} {execution} {mode}: {least} uses the least ({words}; none {})",
            format_mib(before)
        ))
        .filter(|_| !peaks.is_empty())
    });
    let sentences: Vec<String> = sentences.collect();
    let question = "Which activation checkpointing uses the least memory?";
    (!sentences.is_empty()).then(|| Answer::new(question, listed(&sentences, NAMED) + "."))
}
