//! The losses of a run as a chart and as a table.

use super::history::{History, mean_of_finite};
use crate::report::plot::{LineChart, Series};
use crate::report::{Column, Fields, Report};

/// Points that a line of the chart has at most: more would not be seen, and a file of them is slow to draw.
const CHART_POINTS: usize = 500;

impl History {
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
            // Before the first step there is a row only if the loss was evaluated there.
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
