//! The rows of runs, and what they answer. The tests read both.

use super::words::{change, listed, memory};
use serde::{Deserialize, Serialize};
use tallow::report::{Answer, format_mib};

/// One run: prediction and measurement. `OOM` where it was not run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    pub size: String,
    pub batch_size: usize,
    pub context_length: usize,
    pub attention: String,
    pub checkpointing: String,
    pub precision: String,
    pub execution: String,
    pub mode: String,
    pub status: String,
    pub peak_bytes: Option<u64>,
    pub estimate_bytes: Option<u64>,
    pub estimate_error_percent: Option<f64>,
    /// The peak compared with that of the same run in f32: `12.5% more`.
    pub than_f32: Option<String>,
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
    /// What tells runs apart, apart from one of its parts.
    fn labels_without(&self, part: &str) -> [String; 8] {
        let label = |name: &str, value: &str| match name == part {
            true => String::new(),
            false => value.to_string(),
        };
        [
            self.size.clone(),
            format!("B {}", self.batch_size),
            format!("T {}", self.context_length),
            self.attention.clone(),
            label("checkpointing", &self.checkpointing),
            label("precision", &self.precision),
            self.execution.clone(),
            label("mode", &self.mode),
        ]
    }

    /// The peak in words, predicted where it was not run.
    fn peak_words(&self) -> String {
        match (self.peak_bytes, self.estimate_bytes) {
            (Some(bytes), _) => format_mib(bytes),
            (None, Some(bytes)) => format!("OOM (needs {})", format_mib(bytes)),
            _ => "OOM".into(),
        }
    }
}

/// Fills in how each peak compares with f32's.
pub fn compare_with_f32(rows: &mut [Row]) {
    let own = |row: &Row| row.labels_without("precision");
    let of_f32 = rows.iter().filter(|row| row.precision == "f32");
    let of_f32: Vec<_> = of_f32.map(|row| (own(row), row.peak_bytes)).collect();
    for row in rows.iter_mut().filter(|row| row.precision != "f32") {
        let before = of_f32.iter().find(|(labels, _)| *labels == own(row));
        let pair = before.and_then(|(_, bytes)| *bytes).zip(row.peak_bytes);
        row.than_f32 = pair.map(|(before, after)| change(before, after));
    }
}

/// At most this many runs are named in an answer.
const NAMED: usize = 8;

/// Whatever the rows answer; `names` are the runs' names. A question without figures is left out.
pub fn answers(rows: &[Row], names: &[String]) -> Vec<Answer> {
    let named = || rows.iter().zip(names);
    let phases = named().filter_map(|(row, name)| Some(format!("{name}: {}", phases(row)?)));
    let phases: Vec<String> = phases.collect();
    let peaks = named().map(|(row, name)| format!("{name} {}", row.peak_words()));
    let peaks: Vec<String> = peaks.collect();
    let mut answers = Vec::new();
    if !phases.is_empty() {
        let text = format!(
            "{}. In the timeline, forward rises while it saves activations, backward falls as it frees them and adds \
             gradients, and the optimizer is level. A forward without a graph stays low: it frees each activation after \
             its last use.",
            listed(&phases, NAMED)
        );
        let question =
            "Which phase has the highest peak, and how do the phases look in the timeline?";
        answers.push(Answer::new(question, text));
    }
    let question = "What is the peak memory of each context length?";
    answers.push(Answer::new(question, listed(&peaks, NAMED) + "."));
    for precision in precisions(rows) {
        let (mut pairs, mut copies) = (Vec::new(), None);
        for (row, name) in named().filter(|(row, _)| row.precision == precision) {
            let labels = row.labels_without("precision");
            let mut others = rows.iter().filter(|other| other.precision == "f32");
            let before = others.find(|other| other.labels_without("precision") == labels);
            let before = before.and_then(|before| before.peak_bytes);
            if let Some((before, after)) = before.zip(row.peak_bytes) {
                pairs.push((name.clone(), before, after));
                copies = copies.max(row.weight_cast_bytes);
            }
        }
        if !pairs.is_empty() {
            let copies = copies.filter(|bytes| *bytes > 0);
            let question = format!("Does {precision} change the memory?");
            let text = memory(precision, "f32", &pairs, copies);
            answers.push(Answer::new(question, text));
        }
    }
    answers.extend(checkpointing(rows));
    answers
}

fn precisions(rows: &[Row]) -> Vec<&str> {
    let mut all: Vec<&str> = rows.iter().map(|row| row.precision.as_str()).collect();
    all.sort_unstable();
    all.dedup();
    all.retain(|precision| *precision != "f32");
    all
}

/// The phases of a step and which is highest; `None` for a single phase.
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

/// The strategies of runs that differ in nothing else, compared with no checkpointing; `None` where there is one.
pub fn checkpointing(rows: &[Row]) -> Option<Answer> {
    let is_whole = |row: &&Row| row.checkpointing == "none" && row.mode != "forward";
    let sentences = rows.iter().filter(is_whole).filter_map(|whole| {
        let before = whole.peak_bytes?;
        let labels = whole.labels_without("checkpointing");
        let others = rows.iter().filter(|row| {
            row.checkpointing != "none" && row.labels_without("checkpointing") == labels
        });
        let mut peaks: Vec<(u64, &Row)> = others
            .filter_map(|row| Some((row.peak_bytes?, row)))
            .collect();
        peaks.sort_by_key(|(bytes, _)| *bytes);
        let words = peaks.iter().map(|(after, row)| {
            let change = change(before, *after);
            format!(
                "{} {} ({change})",
                row.checkpointing,
                format_mib(*after)
            )
        });
        let words = words.collect::<Vec<_>>().join(", ");
        let least = peaks.first().filter(|(least, _)| *least < before);
        let least = least.map_or("none", |(_, row)| row.checkpointing.as_str());
        let Row {
            precision,
            context_length,
            execution,
            mode,
            ..
        } = whole;
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
