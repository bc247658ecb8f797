//! Runs in several precisions, and their comparison.

use tallow::precision::Precision;
use tallow::report::plot::{Chart, Series};
use tallow::report::{Answer, Column, Fields, Statistics};
use tallow::train::History;

/// Steps whose mean loss is a run's last loss, and a point of the curves: one batch's loss says little.
pub const STEPS_A_POINT: usize = 10;

/// A finished run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    pub precision: Precision,
    pub history: History,
    /// Points of (step, mean loss of the steps up to it).
    pub curve: Vec<(f64, f64)>,
    pub loss_scale: Option<f64>,
    pub tokens: usize,
    pub seconds: f64,
}

impl Run {
    /// Returns the row, compared with the run in f32 if there is one.
    pub fn row(&self, exact: Option<&Run>) -> Fields {
        let from_f32 = |loss: fn(&Run) -> Option<f64>| Some(percent(loss(self)?, loss(exact?)?));
        let losses = &self.history.losses;
        let mut row = Fields::from_iter([("precision", self.precision.name())]);
        row.insert("first_loss", losses.first().copied())
            .insert("last_loss", self.last_loss())
            .insert("from_f32_percent", from_f32(Run::last_loss))
            .insert("validation_loss", self.validation_loss())
            .insert(
                "validation_from_f32_percent",
                from_f32(Run::validation_loss),
            )
            .insert("skipped_steps", self.history.skipped.len())
            .insert("loss_scale", self.loss_scale)
            .insert("step_ms", self.seconds * 1e3 / losses.len() as f64)
            .insert("tokens_per_s", self.tokens as f64 / self.seconds);
        row
    }

    fn last_loss(&self) -> Option<f64> {
        self.history.recent_loss(STEPS_A_POINT)
    }

    fn validation_loss(&self) -> Option<f64> {
        self.history.evaluations.last().map(|last| last.loss)
    }
}

/// The columns of [`Run::row`].
pub fn columns() -> Vec<Column> {
    vec![
        Column::text("precision", "Precision"),
        Column::number("last_loss", "Last loss", "nats", 4),
        Column::number("from_f32_percent", "From f32", "%", 3),
        Column::number("validation_loss", "Validation", "nats", 4),
        Column::number("validation_from_f32_percent", "Validation from f32", "%", 3),
        Column::number("first_loss", "First loss", "nats", 4),
        Column::count("skipped_steps", "Skipped steps"),
        Column::number("loss_scale", "Loss scale", "", 0),
        Column::ms("step_ms", "Step"),
        Column::count("tokens_per_s", "Tokens/s"),
    ]
}

/// Returns the run in f32.
pub fn exact(runs: &[Run]) -> Option<&Run> {
    runs.iter().find(|run| run.precision == Precision::F32)
}

/// Draws the curves, and their distance from f32's.
pub fn figure(runs: &[Run]) -> Vec<Chart> {
    let chart = |title: String, y_label: &str, y: &dyn Fn(usize, f64) -> f64| {
        let series = runs.iter().map(|run| {
            let points = run.curve.iter().enumerate();
            let points = points.map(|(i, (step, loss))| (*step, y(i, *loss)));
            Series::new(run.precision.name(), points.collect())
        });
        Chart {
            title,
            x_label: "step".into(),
            y_label: y_label.into(),
            series: series.collect(),
            ..Default::default()
        }
    };
    let title = format!("Loss (mean of {STEPS_A_POINT} steps)");
    let mut charts = vec![chart(title, "loss (nats a token)", &|_, loss| loss)];
    charts.extend(exact(runs).map(|exact| {
        let distance = |i: usize, loss| percent(loss, exact.curve[i].1);
        chart("Distance from f32".into(), "loss over f32's (%)", &distance)
    }));
    charts
}

/// Compares each run with that in f32: the difference at each of the last steps, whose batches are the same, by its
/// mean and twice its standard error. `None` without f32 and another precision.
pub fn answer(runs: &[Run]) -> Option<Answer> {
    let exact = exact(runs)?;
    let others = runs.iter().filter(|run| run.precision != exact.precision);
    let sentences: Vec<String> = others.map(|run| compared(run, exact)).collect();
    let question = "Does half precision train as well as f32?";
    (!sentences.is_empty()).then(|| Answer::new(question, sentences.join(" ")))
}

fn compared(run: &Run, exact: &Run) -> String {
    let pairs = run.history.losses.iter().zip(&exact.history.losses);
    let pairs = pairs.rev().take(STEPS_A_POINT);
    let mut differences: Vec<f64> = pairs.map(|(own, f32)| percent(*own, *f32)).collect();
    differences.retain(|percent| percent.is_finite());
    let n = differences.len();
    let statistics = Statistics::new(&differences).ok();
    let (mean, std) = statistics.map_or((f64::NAN, None), |own| (own.mean_ms, own.std_ms));
    let error = 2.0 * std.unwrap_or(f64::NAN) / (n as f64).sqrt();
    let verdict = match mean {
        _ if n < 3 => "too few steps to compare",
        mean if mean.abs() <= error => "no difference beyond the spread",
        mean if mean > 0.0 => "higher than in f32",
        _ => "lower than in f32",
    };
    let skipped = match run.history.skipped.len() {
        0 => String::new(),
        n => format!(" {n} steps overflowed at their loss scale and made no update."),
    };
    let [own, f32] = [run, exact].map(|run| run.validation_loss().unwrap_or(f64::NAN));
    let (mean, validation) = (signed(mean), signed(percent(own, f32)));
    format!(
        "{}: over the last {n} steps the loss differs from f32's by {mean} ± {error:.3}% (two standard errors): \
         {verdict}. The validation loss differs by {validation}.{skipped}",
        run.precision
    )
}

/// Returns how far a loss is above f32's, in percent.
fn percent(own: f64, exact: f64) -> f64 {
    100.0 * (own / exact - 1.0)
}

fn signed(percent: f64) -> String {
    match percent.abs() < 0.0005 {
        true => "0.000%".into(),
        false => format!("{percent:+.3}%"),
    }
}
