//! Backward and optimizer of a training step as one phase.

use serde::Deserialize;
use tallow::bench::Timing;
use tallow::report::Fields;

/// Backward and optimizer together, as rows name them.
pub const UPDATE: &str = "backward+optimizer";

/// The times of one phase, step by step.
#[derive(Deserialize)]
struct Phase {
    mode: String,
    phase: String,
    samples_ms: Vec<f64>,
}

/// Returns the row of backward and optimizer together, of the training step among one run's `rows`: the sum of both
/// times in each step. `None` if none was measured.
pub fn update(rows: &[Fields]) -> Option<Fields> {
    let phases: Vec<(&Fields, Phase)> = rows
        .iter()
        .filter_map(|row| Some((row, row.read()?)))
        .collect();
    let of = |name: &str| {
        let is_own = |(_, own): &&(&Fields, Phase)| own.mode == "train-step" && own.phase == name;
        phases.iter().find(is_own)
    };
    let ((row, backward), (_, optimizer)) = (of("backward")?, of("optimizer")?);
    let both = backward.samples_ms.iter().zip(&optimizer.samples_ms);
    let timing = Timing {
        samples_ms: both.map(|(a, b)| a + b).collect(),
        ..Default::default()
    };
    // Rates are of single phases; labels, memory and the first step are the run's.
    let is_rate = |key: &str| ["tokens_per_s", "flops_per_s", "mfu_percent"].contains(&key);
    let mut sum: Fields = row
        .iter()
        .filter(|(key, _)| !is_rate(key))
        .map(|(key, value)| (key, value.clone()))
        .collect();
    sum.insert("phase", UPDATE)
        .insert("noisy", timing.statistics().ok()?.noisy());
    sum.merge(timing.fields().ok()?);
    Some(sum)
}
