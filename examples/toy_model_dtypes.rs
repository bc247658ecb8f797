//! Prints the dtype of each tensor of a small model under autocast, and why layer norm is computed in f32: CS336's
//! exercise "benchmarking_mixed_precision" (a) and (b), for f16 and bf16 and both of PyTorch's policies.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
#[path = "toy_model_dtypes/layer_norm.rs"]
mod layer_norm;
#[path = "toy_model_dtypes/table.rs"]
mod table;

use clap::{CommandFactory, Parser};
use common::effects;
use common::{Common, Output};
use std::process::ExitCode;
use tallow::Result;
use tallow::report::{Column, Fields, Report};

/// Prints which dtype each tensor of a small model has under autocast, and why layer norm is computed in f32
#[derive(Parser)]
#[command(version)]
struct Flags {
    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

fn main() -> ExitCode {
    let flags: Flags = effects::parse(Flags::command(), |_| Vec::new());
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        let device = self.common.device()?;
        let rows = table::rows(self.common.seed, &device)?;
        let policies = table::policies().map(|(key, title, _)| Column::text(key, title));
        let model = "fc1 (10, 20), ReLU, layer norm (10), fc2 (5, 10), cross entropy; batch 8";
        let note = "Rows of 1,024 numbers, eps 1e-5. Exact is f64 on the stored numbers.";
        let norms = layer_norm::rows();
        let answers = layer_norm::answers(&norms);
        let layer_norm = Report {
            title: "Layer norm in few bits".into(),
            notes: vec![note.into()],
            columns: vec![
                Column::text("activations", "Activations"),
                Column::text("stored", "Stored in"),
                Column::text("computed", "Computed in"),
                Column::text("variance", "Variance"),
                Column::number("variance_error_percent", "Error of variance", "%", 4),
                Column::number("output_error_percent", "Error of output", "%", 4),
            ],
            rows: norms,
            ..Default::default()
        };
        self.output.publish(&Report {
            environment: self.common.environment(&device),
            configuration: Fields::from_iter([("model", model)]),
            columns: [vec![Column::text("tensor", "Tensor")], policies.into()].concat(),
            rows,
            answers: answers.into(),
            details: vec![layer_norm],
            ..Default::default()
        })
    }
}
