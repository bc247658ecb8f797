//! The losses of a run so far.

use crate::report::plot::{LineChart, Series};
use crate::report::{Column, Fields, Report};
use serde::{Deserialize, Deserializer, Serialize};

/// Points that a line of the chart has at most: more would not be seen, and a file of them is slow to draw.
const CHART_POINTS: usize = 500;

/// Every step's loss, and every evaluation's: nats a token. Checkpoints keep it, so that a resumed run's curve is whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The loss of each step's own batch, before the step's update; the first step's first. NaN where it was no number,
    /// as may be where the loss is scaled.
    #[serde(deserialize_with = "null_as_nan")]
    pub losses: Vec<f64>,
    /// The steps, counted from 1, whose update was skipped for gradients that overflowed at their loss scale.
    #[serde(default)]
    pub skipped: Vec<usize>,
    /// The evaluations, in the order of their steps.
    pub evaluations: Vec<Evaluation>,
}

/// The mean loss over the validation tokens, after some steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps taken before it.
    pub step: usize,
    /// Nats a token.
    pub loss: f64,
}

/// JSON has no NaN.
fn null_as_nan<'de, D: Deserializer<'de>>(losses: D) -> Result<Vec<f64>, D::Error> {
    let losses = Vec::<Option<f64>>::deserialize(losses)?;
    Ok(losses
        .into_iter()
        .map(|loss| loss.unwrap_or(f64::NAN))
        .collect())
}

impl History {
    /// Puts a step down.
    pub(super) fn stepped(&mut self, loss: f64, skipped: bool) {
        // One value for all that is none: it comes back from a file as it went in.
        self.losses
            .push(if loss.is_finite() { loss } else { f64::NAN });
        if skipped {
            self.skipped.push(self.losses.len());
        }
    }

    /// Puts an evaluation down, in the place of an earlier one of the same step.
    pub(super) fn evaluated(&mut self, step: usize, loss: f64) {
        self.evaluations.retain(|earlier| earlier.step < step);
        self.evaluations.push(Evaluation { step, loss });
    }

    /// The mean loss of the last `steps` steps, or of as many as there are; one batch's loss says little. Losses that are
    /// no numbers are left out, and `None` says that nothing is left.
    pub fn recent_loss(&self, steps: usize) -> Option<f64> {
        mean_of_finite(&self.losses[self.losses.len().saturating_sub(steps)..])
    }

    /// The loss curve over steps. Of a long run, each point of the training line is the mean of as many steps as its
    /// name says.
    ///
    /// Drawing it is an error as long as there is no loss at all.
    pub fn chart(&self) -> LineChart {
        let steps_a_point = self.losses.len().div_ceil(CHART_POINTS).max(1);
        let means = self.losses.chunks(steps_a_point).enumerate();
        let training = means.filter_map(|(i, losses)| {
            let mean = mean_of_finite(losses)?;
            let middle = (i * steps_a_point) as f64 + (losses.len() + 1) as f64 / 2.0;
            Some((middle, mean))
        });
        let evaluations = self.evaluations.iter();
        let validation = evaluations.map(|e| (e.step as f64, e.loss));
        let name = match steps_a_point {
            1 => "training".to_string(),
            n => format!("training (mean of {n} steps)"),
        };
        LineChart {
            title: "Loss".into(),
            x_label: "step".into(),
            y_label: "loss (nats a token)".into(),
            series: vec![
                Series::new(name, training.collect()),
                Series::new("validation", validation.collect()),
            ],
            ..Default::default()
        }
    }

    /// The same as a table: a row for each step with `step`, `loss` and, where it was evaluated, `validation_loss`.
    /// Saved as CSV it is what other programs plot.
    pub fn report(&self) -> Report {
        let mut rows = Vec::with_capacity(self.losses.len() + 1);
        let mut evaluations = self.evaluations.iter().peekable();
        for step in 0..=self.losses.len() {
            let evaluation = evaluations.next_if(|e| e.step == step).map(|e| e.loss);
            // Before the first step there is a row only for who evaluated there.
            let loss = step.checked_sub(1).map(|last| self.losses[last]);
            if loss.is_none() && evaluation.is_none() {
                continue;
            }
            let mut row = Fields::new();
            row.insert("step", step);
            row.insert("loss", loss.filter(|loss| loss.is_finite()));
            row.insert("validation_loss", evaluation);
            rows.push(row);
        }
        Report {
            columns: vec![
                Column::text("step", "Step"),
                Column::number("loss", "Loss", "nats a token", 4),
                Column::number("validation_loss", "Validation loss", "nats a token", 4),
            ],
            rows,
            ..Default::default()
        }
    }
}

/// `None` if there is no number among them.
fn mean_of_finite(losses: &[f64]) -> Option<f64> {
    let finite = losses.iter().filter(|loss| loss.is_finite());
    let count = finite.clone().count();
    (count > 0).then(|| finite.sum::<f64>() / count as f64)
}
