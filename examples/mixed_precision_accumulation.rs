//! Adds 0.01 up a thousand times: what is left of 10 in f32, f16 and bf16, and what Kahan's and the pairwise sum save.
//!
//! The exercise "mixed_precision_accumulation" of Stanford CS336's second assignment, and what follows from it.
//!
//! ```text
//! cargo run --example mixed_precision_accumulation
//! cargo run --example mixed_precision_accumulation -- --value 0.1 --count 100000 --format markdown
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "mixed_precision_accumulation/rows.rs"]
mod rows;

use candle_core::Device;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use common::{Effects, Output, values};
use std::process::ExitCode;
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

/// The most additions: sums of 24 bits times a count beyond 2^29 are not exact in f64.
const MOST: u64 = 100_000_000;

/// Adds one number up many times, in several precisions and ways
#[derive(Parser)]
#[command(version)]
struct Flags {
    /// The number
    #[arg(long, default_value_t = 0.01, value_parser = values::not_0, allow_negative_numbers = true)]
    value: f64,

    /// How many times, at most 100 million
    #[arg(long, default_value_t = 1000, value_parser = RangedU64ValueParser::<usize>::new().range(1..=MOST))]
    count: usize,

    #[command(flatten)]
    output: Output,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
    common::run(|| flags.run())
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new().of_output(|flags| &flags.output)
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        self.output.check_columns([columns()])?;
        self.check_memory()?;
        let rows = rows::rows(self.value, self.count);
        let report = Report {
            environment: common::environment(&Device::Cpu),
            configuration: Fields::from_iter([
                ("value", self.value.to_string()),
                ("count", self.count.to_string()),
                ("exact sum", (self.value * self.count as f64).to_string()),
            ]),
            columns: columns(),
            notes: notes(&rows),
            rows,
            ..Default::default()
        };
        self.output.publish(&report)
    }

    /// Refuses terms that memory does not hold.
    fn check_memory(&self) -> Result<()> {
        const BYTES_A_TERM: u64 = 12; // in f32 twice, in f16 and in bf16
        let wanted_bytes = self.count as u64 * BYTES_A_TERM;
        match tallow::hardware::available_bytes_on(&Device::Cpu) {
            Some(available_bytes) if wanted_bytes > available_bytes => Err(Error::OutOfMemory {
                what: format!("{} terms in four dtypes", self.count),
                wanted_bytes,
                available_bytes,
            }),
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
        Column::number("error_percent", "Error", "%", 4),
        Column::number("error", "Error", "", 8).minor(3),
        Column::number("error_of_terms", "of the terms", "", 8)
            .under("Error")
            .minor(1),
        Column::number("error_of_additions", "of the additions", "", 8)
            .under("Error")
            .minor(1),
    ]
}

fn notes(rows: &[Fields]) -> Vec<String> {
    let general = [
        "The error is the terms' (the value has no exact form in their type) plus the additions' (each is rounded to \
         the \
         accumulator's type).",
        "An f32 accumulator takes away the additions' part, not the terms': with f16 terms, added or cast first, it \
         gives \
         the same sum, which is as good as the terms are.",
        "That is why matrix products in half precision accumulate in f32.",
    ];
    let text = |row: &Fields, key: &str| {
        let text = row.get(key).and_then(|value| value.as_str());
        text.unwrap_or_default().to_string()
    };
    let cause = |row: &Fields| {
        let [accumulator, terms, method, cause] =
            ["accumulator", "terms", "method", "cause"].map(|key| text(row, key));
        format!("{accumulator} of {terms} terms, {method}: {cause}.")
    };
    let general = general.map(String::from).into_iter();
    general.chain(rows.iter().map(cause)).collect()
}
