//! The runs of several precisions compared: rows and the answer. The tests read both.

use serde::Serialize;
use tallow::report::Answer;

/// Steps whose mean loss is a run's last loss, and a point of the curves: one batch's loss says little.
pub const STEPS_A_POINT: usize = 10;

/// A finished run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    pub precision: String,
    /// The loss of each step's batch; infinite or NaN where f16 overflowed.
    pub losses: Vec<f64>,
    pub validation_loss: f64,
    pub skipped_steps: usize,
    pub loss_scale: Option<f64>,
    pub tokens: usize,
    pub seconds: f64,
}

/// A run's row.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    precision: String,
    first_loss: Option<f64>,
    last_loss: Option<f64>,
    from_f32_percent: Option<f64>,
    validation_loss: f64,
    validation_from_f32_percent: Option<f64>,
    skipped_steps: usize,
    loss_scale: Option<f64>,
    step_ms: f64,
    tokens_per_s: f64,
}

impl Run {
    /// The row, compared with the run in f32 if there is one.
    pub fn row(&self, exact: Option<&Run>) -> Row {
        let percent = |own: f64, exact: f64| 100.0 * (own / exact - 1.0);
        let last = |run: &Run| mean(run.last()).filter(|loss| loss.is_finite());
        let exact_last = exact.and_then(last);
        Row {
            precision: self.precision.clone(),
            first_loss: self.losses.first().copied(),
            last_loss: last(self),
            from_f32_percent: last(self).zip(exact_last).map(|(a, b)| percent(a, b)),
            validation_loss: self.validation_loss,
            validation_from_f32_percent: exact
                .map(|exact| percent(self.validation_loss, exact.validation_loss)),
            skipped_steps: self.skipped_steps,
            loss_scale: self.loss_scale,
            step_ms: self.seconds * 1e3 / self.losses.len() as f64,
            tokens_per_s: self.tokens as f64 / self.seconds,
        }
    }

    fn last(&self) -> &[f64] {
        &self.losses[self.losses.len().saturating_sub(STEPS_A_POINT)..]
    }

    /// (step, mean loss of the steps up to it). A mean that is NaN is left out of charts.
    pub fn points(&self) -> Vec<(f64, f64)> {
        let chunks = self.losses.chunks(STEPS_A_POINT).enumerate();
        let points = chunks.map(|(i, losses)| {
            let step = (i * STEPS_A_POINT + losses.len()) as f64;
            (step, mean(losses).unwrap_or(f64::NAN))
        });
        points.collect()
    }
}

/// The mean of the finite losses.
fn mean(losses: &[f64]) -> Option<f64> {
    let finite: Vec<f64> = losses.iter().copied().filter(|l| l.is_finite()).collect();
    (!finite.is_empty()).then(|| finite.iter().sum::<f64>() / finite.len() as f64)
}

/// Whether half precision trains as f32 does: the difference at each of the last steps, whose batches are the same, by
/// its mean and twice its standard error. `None` without f32 and another precision.
pub fn answer(runs: &[Run]) -> Option<Answer> {
    let exact = runs.iter().find(|run| run.precision == "f32")?;
    let others = runs.iter().filter(|run| run.precision != "f32");
    let sentences: Vec<String> = others.map(|run| compared(run, exact)).collect();
    let question = "Does half precision train as well as f32?";
    (!sentences.is_empty()).then(|| Answer::new(question, sentences.join(" ")))
}

fn compared(run: &Run, exact: &Run) -> String {
    let Run {
        precision,
        validation_loss,
        skipped_steps,
        ..
    } = run;
    let pairs = run.last().iter().zip(exact.last());
    let percent: Vec<f64> = pairs
        .map(|(own, exact)| 100.0 * (own / exact - 1.0))
        .filter(|percent| percent.is_finite())
        .collect();
    let n = percent.len() as f64;
    let difference = percent.iter().sum::<f64>() / n;
    let variance = percent
        .iter()
        .map(|p| (p - difference).powi(2))
        .sum::<f64>()
        / (n - 1.0);
    let error = 2.0 * (variance / n).sqrt();
    let verdict = match difference {
        _ if n < 3.0 || !error.is_finite() => "too few steps to compare",
        d if d.abs() <= error => "no difference beyond the spread",
        d if d > 0.0 => "higher than in f32",
        _ => "lower than in f32",
    };
    let validation = 100.0 * (validation_loss / exact.validation_loss - 1.0);
    let skipped = match skipped_steps {
        0 => String::new(),
        n => format!(" {n} steps overflowed at their loss scale and made no update."),
    };
    format!(
        "{precision}: over the last {n} steps the loss differs from f32's by {} ± {error:.3}% (two standard errors): \
         {verdict}. The validation loss differs by {}.{skipped}",
        signed(difference),
        signed(validation)
    )
}

fn signed(percent: f64) -> String {
    match percent.abs() < 0.0005 {
        true => "0.000%".into(),
        false => format!("{percent:+.3}%"),
    }
}
