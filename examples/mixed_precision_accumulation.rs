//! Adds 0.01 up a thousand times in f32, f16 and bf16: CS336's exercise "mixed_precision_accumulation".

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
#[path = "mixed_precision_accumulation/rows.rs"]
mod rows;

use candle_core::Device;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use common::{Effects, Output, values};
use std::process::ExitCode;
use tallow::Result;
use tallow::report::{Column, Fields, Report};

/// The most additions. The terms in all dtypes have 12 bytes each.
const MOST: u64 = 10_000_000;

const EXAMPLES: &str = "Examples:
  mixed_precision_accumulation
  mixed_precision_accumulation --value 0.1 --count 100000
  mixed_precision_accumulation --format latex --output sums.tex";

/// Adds one number up many times, in several precisions
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Flags {
    /// The number
    #[arg(long, value_name = "X", default_value_t = 0.01, value_parser = values::not_0, allow_negative_numbers = true)]
    value: f64,

    /// How many times it is added, at most 10 million
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = RangedU64ValueParser::<usize>::new().range(1..=MOST))]
    count: usize,

    #[command(flatten)]
    output: Output,
}

fn main() -> ExitCode {
    let flags = Effects::<Flags>::new().parse();
    common::run(|| flags.run())
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        let rows = rows::rows(self.value, self.count);
        self.output.publish(&Report {
            environment: common::environment(&Device::Cpu),
            configuration: Fields::from_iter([
                ("value", self.value.to_string()),
                ("count", self.count.to_string()),
                ("exact sum", (self.value * self.count as f64).to_string()),
            ]),
            columns: columns(),
            rows: rows.iter().map(Fields::of).collect::<Result<_>>()?,
            answers: rows::answers(&rows).into(),
            notes: vec![
                "The error is that of the terms (the value rounded to their dtype) plus that of the additions (rounded \
                 to the accumulator's dtype)."
                    .into(),
            ],
            ..Default::default()
        })
    }
}

fn columns() -> Vec<Column> {
    vec![
        Column::text("accumulator", "Accumulator"),
        Column::text("terms", "Terms"),
        Column::number("sum", "Sum", "", 8),
        Column::number("error_percent", "Error", "%", 4),
        Column::text("cause", "Main cause"),
        Column::number("error_of_terms", "Error of terms", "", 8),
        Column::number("error_of_additions", "Error of additions", "", 8),
        Column::number("error", "Absolute error", "", 8),
    ]
}
