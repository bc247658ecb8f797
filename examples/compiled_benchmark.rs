//! Compares planned steps of models (compiled for their shapes before they run) with eager steps, in turns, and counts
//! the calls of a training step. `attention_benchmark --compare naive planned flash` compares attention alone. `--help`
//! lists example commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
mod end_to_end;

use end_to_end::Program;
use std::process::ExitCode;

const EXAMPLES: &str = "Examples:
  compiled_benchmark --config 4-256-256-4-8 4-512-512-6-8 8-256-768-6-12 8-512-768-12-12
  compiled_benchmark --size small --context-length 256 512 --precision bf16
  compiled_benchmark --size small medium large --format json --output results.json";

fn main() -> ExitCode {
    let program = Program {
        config: Some("4-256-256-4-8"),
        counts: true,
        ..Default::default()
    };
    let about = "Compares planned (compiled) with eager steps of models";
    let defaults: &[(&str, &[&str])] = &[
        ("mode", &["all"]),
        ("compile", &["both"]),
        ("rounds", &["2"]),
        ("warmup_steps", &["2"]), // a GPU records a planned step's second run
        ("steps", &["5"]),
    ];
    end_to_end::main(program, about, EXAMPLES, defaults)
}
