//! Adds 0.01 up a thousand times in f32, f16 and bf16: CS336's exercise "mixed_precision_accumulation".

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
#[path = "mixed_precision_accumulation/rows.rs"]
mod rows;

use candle_core::Device;
use clap::{CommandFactory, Parser};
use common::Output;
use common::effects;
use std::process::ExitCode;
use tallow::report::{Column, Fields, Report};

/// Adds 0.01 up a thousand times, in several precisions
#[derive(Parser)]
#[command(version)]
struct Flags {
    #[command(flatten)]
    output: Output,
}

fn main() -> ExitCode {
    let Flags { output } = effects::parse(Flags::command(), |_| Vec::new());
    let note = "The error is that of the terms (the value rounded to their dtype) plus that of the additions (rounded \
                to the accumulator's dtype).";
    common::run(|| {
        output.check_with([])?;
        let rows = rows::rows();
        output.publish(&Report {
            environment: common::environment(&Device::Cpu),
            configuration: Fields::from_iter([
                ("value", rows::VALUE.to_string()),
                ("count", rows::COUNT.to_string()),
                ("exact sum", rows::EXACT.to_string()),
            ]),
            columns: vec![
                Column::text("accumulator", "Accumulator"),
                Column::text("terms", "Terms"),
                Column::number("sum", "Sum", "", 8),
                Column::number("error_percent", "Error", "%", 4),
                Column::text("cause", "Main cause"),
                Column::number("error_of_terms", "Error of terms", "", 8),
                Column::number("error_of_additions", "Error of additions", "", 8),
            ],
            answers: rows::answers(&rows).into(),
            rows: rows.into(),
            notes: vec![note.into()],
            ..Default::default()
        })
    })
}
