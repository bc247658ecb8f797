//! Adds 0.01 up a thousand times: what is left of 10 in f32, f16 and bf16, and what Kahan's and the pairwise sum save.
//!
//! The exercise "mixed_precision_accumulation" of Stanford CS336's second assignment, and what follows from it.
//!
//! ```text
//! cargo run --example mixed_precision_accumulation
//! cargo run --example mixed_precision_accumulation -- --value 0.1 --count 100000 --format markdown
//! ```

mod common;
#[path = "mixed_precision_accumulation/rows.rs"]
mod rows;

use clap::Parser;
use common::{Common, Output};
use std::process::ExitCode;
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

/// Adds one number up many times, in several precisions and ways
#[derive(Parser)]
#[command(version)]
struct Flags {
    /// The number
    #[arg(long, default_value_t = 0.01)]
    value: f64,

    /// How many times
    #[arg(long, default_value_t = 1000)]
    count: usize,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    common::run(|| flags.run())
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check()?;
        self.check()?;
        let device = self.common.device()?;
        let report = Report {
            environment: self.common.environment(&device),
            configuration: Fields::from_iter([
                ("value", self.value.to_string()),
                ("count", self.count.to_string()),
                ("exact sum", (self.value * self.count as f64).to_string()),
            ]),
            columns: columns(),
            rows: rows::rows(self.value, self.count),
            notes: notes(),
            ..Default::default()
        };
        self.output.publish(&report)
    }

    fn check(&self) -> Result<()> {
        let refuse = |field, expected: &str, got: String, hint: &str| {
            Err(Error::Config {
                config: "mixed_precision_accumulation",
                field,
                expected: expected.into(),
                got,
                hint: hint.into(),
            })
        };
        if !self.value.is_finite() || self.value == 0.0 {
            let got = self.value.to_string();
            return refuse("--value", "finite and not 0", got, "the exercise adds 0.01");
        }
        match self.count {
            0 => refuse(
                "--count",
                "at least 1",
                "0".into(),
                "the exercise adds 1000 times",
            ),
            _ => Ok(()),
        }
    }
}

fn columns() -> Vec<Column> {
    vec![
        Column::text("accumulator", "Accumulator"),
        Column::text("terms", "Terms"),
        Column::text("method", "Method"),
        Column::number("sum", "Sum", "", 8),
        Column::number("error", "Error", "", 8),
        Column::number("error_percent", "Error", "%", 4),
        Column::number("error_of_terms", "Of the terms", "", 8),
        Column::number("error_of_additions", "Of the additions", "", 8),
        Column::text("cause", "Cause"),
    ]
}

fn notes() -> Vec<String> {
    [
        "The error is the terms' (the value has no exact form in their type) plus the additions' (each is rounded to the \
         accumulator's type).",
        "An f32 accumulator takes away the additions' part, not the terms': with f16 terms, added or cast first, it gives \
         the same sum, which is as good as the terms are. That is why matrix products in half precision accumulate in f32.",
    ]
    .map(String::from)
    .to_vec()
}
