//! Compares half precision with f32, in turns: time and memory of forward and of forward and backward, for each size of
//! model. `--help` lists example commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
mod end_to_end;

use end_to_end::Program;
use std::process::ExitCode;

const EXAMPLES: &str = "Examples:
  mixed_precision_benchmark --size small medium large --context-length 256
  mixed_precision_benchmark --precision bf16-dropping-casts --context-length 32 128 512
  mixed_precision_benchmark --precision bf16 f16 --mode all --format markdown";

fn main() -> ExitCode {
    let program = Program {
        compares_precisions: true,
        ..Default::default()
    };
    let about = "Times half precision and f32 in turns, with their memory";
    let defaults: &[(&str, &[&str])] = &[
        ("precision", &["f32", "bf16"]),
        ("mode", &["forward", "forward-backward"]),
        ("rounds", &["2"]),
        ("warmup_steps", &["2"]), // a GPU records a planned step's second run
        ("steps", &["4"]),
    ];
    end_to_end::main(program, about, EXAMPLES, defaults)
}
