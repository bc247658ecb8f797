//! Prints which dtype each tensor of a small model has under autocast, and why layer norm is kept in f32.
//!
//! The exercise "benchmarking_mixed_precision" (a) and (b) of Stanford CS336's second assignment, for f16 and bf16 and
//! both of PyTorch's policies.
//!
//! ```text
//! cargo run --example toy_model_dtypes
//! cargo run --example toy_model_dtypes -- --show layer-norm --format markdown
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "toy_model_dtypes/layer_norm.rs"]
mod layer_norm;
#[path = "toy_model_dtypes/table.rs"]
mod table;

use clap::{Parser, ValueEnum};
use common::{Common, Effects, Output};
use std::process::ExitCode;
use tallow::Result;
use tallow::report::{Column, Fields, Report};

/// Prints which dtype each tensor of a small model has under autocast, and why layer norm is kept in f32
#[derive(Parser)]
#[command(version)]
struct Flags {
    /// Which table
    #[arg(long, value_enum, default_value = "dtypes")]
    show: Show,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, ValueEnum)]
enum Show {
    /// The dtype of every tensor
    Dtypes,
    /// Layer norm's variance and output in f16, bf16 and f32
    LayerNorm,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only(
                "with --show dtypes",
                &["seed", "device", "tf32", "strict", "nvtx"],
                |flags| matches!(flags.show, Show::Dtypes),
            )
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        let device = self.common.device()?;
        let numbers = layer_norm::rows();
        let notes = layer_norm::answer(&numbers);
        self.output.check_columns([match self.show {
            Show::Dtypes => dtype_columns(),
            Show::LayerNorm => layer_norm_columns(),
        }])?;
        let mut report = Report {
            environment: self.common.environment(&device),
            notes,
            ..Default::default()
        };
        match self.show {
            Show::Dtypes => {
                let model =
                    "fc1 (10, 20), ReLU, layer norm (10), fc2 (5, 10), cross entropy; batch 8";
                report.configuration = Fields::from_iter([("model", model)]);
                report.columns = dtype_columns();
                report.rows = table::rows(self.common.seed, &device)?;
            }
            Show::LayerNorm => {
                let row = "rows of 1,024, eps 1e-5; exact is f64 from the stored numbers";
                report.configuration = Fields::from_iter([("layer norm", row)]);
                report.columns = layer_norm_columns();
                report.rows = numbers;
            }
        }
        report
            .environment
            .insert("reference ops", common::fallbacks());
        self.output.publish(&report)
    }
}

fn dtype_columns() -> Vec<Column> {
    let policies = table::policies();
    let policies = policies
        .iter()
        .map(|(key, title, _)| Column::text(*key, *title));
    std::iter::once(Column::text("tensor", "Tensor"))
        .chain(policies)
        .collect()
}

fn layer_norm_columns() -> Vec<Column> {
    vec![
        Column::text("activations", "Activations"),
        Column::text("stored", "Stored in"),
        Column::text("computed", "Computed in"),
        Column::text("variance", "Variance").minor(1),
        Column::text("exact_variance", "Exact").minor(2),
        Column::number("variance_error_percent", "Its error", "%", 4),
        Column::number("output_error_percent", "The output's", "%", 4),
    ]
}
