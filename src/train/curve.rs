//! The losses of a run as a chart and as a table.

use super::history::{History, mean_of_finite};
use crate::report::plot::{Chart, Series};
use crate::report::{Column, Fields, Report};

/// The most points of a line in the chart: more would be invisible, and slow to draw.
const CHART_POINTS: usize = 500;

impl History {
    /// Returns the loss curve over steps. In a long run each point of the training line is the mean of several steps;
    /// the line's name has their number.
    ///
    /// Drawing it is an error if there are no losses yet.
    pub fn chart(&self) -> Chart {
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
        Chart {
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

    /// Returns the losses as a table, a row for each step with `step`, `loss` and, if it was evaluated,
    /// `validation_loss`. Save it as CSV to plot it with other programs.
    pub fn report(&self) -> Report {
        let mut rows = Vec::with_capacity(self.losses.len() + 1);
        let mut evaluations = self.evaluations.iter().peekable();
        for step in 0..=self.losses.len() {
            let evaluation = evaluations.next_if(|e| e.step == step).map(|e| e.loss);
            // Step 0 has a row only if the loss was evaluated before the first step.
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
