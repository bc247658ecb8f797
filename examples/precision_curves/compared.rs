//! The comparison of runs in several precisions.

use tallow::report::{Answer, Fields, Statistics};

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

impl Run {
    /// Returns the row, compared with the run in f32 if there is one.
    pub fn row(&self, exact: Option<&Run>) -> Fields {
        let last = |run: &Run| mean(run.last()).filter(|loss| loss.is_finite());
        let exact_last = exact.and_then(last);
        let from_f32 = last(self)
            .zip(exact_last)
            .map(|(own, exact)| percent(own, exact));
        let validation = exact.map(|exact| percent(self.validation_loss, exact.validation_loss));
        let mut row = Fields::new();
        row.insert("precision", self.precision.as_str())
            .insert("first_loss", self.losses.first().copied())
            .insert("last_loss", last(self))
            .insert("from_f32_percent", from_f32)
            .insert("validation_loss", self.validation_loss)
            .insert("validation_from_f32_percent", validation)
            .insert("skipped_steps", self.skipped_steps)
            .insert("loss_scale", self.loss_scale)
            .insert("step_ms", self.seconds * 1e3 / self.losses.len() as f64)
            .insert("tokens_per_s", self.tokens as f64 / self.seconds);
        row
    }

    fn last(&self) -> &[f64] {
        &self.losses[self.losses.len().saturating_sub(STEPS_A_POINT)..]
    }

    /// Returns points of (step, mean loss of the steps up to it). Charts leave out a mean that is NaN.
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

/// Compares each run with that in f32: the difference at each of the last steps, whose batches are the same, by its
/// mean and twice its standard error. `None` without f32 and another precision.
pub fn answer(runs: &[Run]) -> Option<Answer> {
    let exact = runs.iter().find(|run| run.precision == "f32")?;
    let others = runs.iter().filter(|run| run.precision != "f32");
    let sentences: Vec<String> = others.map(|run| compared(run, exact)).collect();
    let question = "Does half precision train as well as f32?";
    (!sentences.is_empty()).then(|| Answer::new(question, sentences.join(" ")))
}

fn compared(run: &Run, exact: &Run) -> String {
    let pairs = run.last().iter().zip(exact.last());
    let mut differences: Vec<f64> = pairs.map(|(own, exact)| percent(*own, *exact)).collect();
    differences.retain(|percent| percent.is_finite());
    let n = differences.len();
    let statistics = Statistics::new(&differences).ok();
    let difference = statistics.as_ref().map_or(f64::NAN, |own| own.mean_ms);
    let std = statistics.and_then(|own| own.std_ms).unwrap_or(f64::NAN);
    let error = 2.0 * std / (n as f64).sqrt();
    let verdict = match difference {
        _ if n < 3 || !error.is_finite() => "too few steps to compare",
        d if d.abs() <= error => "no difference beyond the spread",
        d if d > 0.0 => "higher than in f32",
        _ => "lower than in f32",
    };
    let skipped = match run.skipped_steps {
        0 => String::new(),
        n => format!(" {n} steps overflowed at their loss scale and made no update."),
    };
    let (precision, difference) = (&run.precision, signed(difference));
    let validation = signed(percent(run.validation_loss, exact.validation_loss));
    format!(
        "{precision}: over the last {n} steps the loss differs from f32's by {difference} ± {error:.3}% (two standard \
         errors): {verdict}. The validation loss differs by {validation}.{skipped}"
    )
}

/// Returns how far a loss is above f32's, in percent.
pub fn percent(own: f64, exact: f64) -> f64 {
    100.0 * (own / exact - 1.0)
}

fn signed(percent: f64) -> String {
    match percent.abs() < 0.0005 {
        true => "0.000%".into(),
        false => format!("{percent:+.3}%"),
    }
}
