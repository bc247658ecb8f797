//! Times a transformer's forward, backward and optimizer, by preset or by sizes, with throughput and memory. `--help`
//! lists example commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
mod end_to_end;

use end_to_end::Program;
use std::process::ExitCode;

const EXAMPLES: &str = "Examples:
  e2e_benchmark --size small medium --context-length 128 256
  e2e_benchmark --size small --mode train-step --warmup-steps 0,1,2,5 --isolate
  e2e_benchmark --size small --compile";

fn main() -> ExitCode {
    let about = "Times a transformer's forward, backward and optimizer, with throughput and memory";
    end_to_end::main(Program::default(), about, EXAMPLES, &[("mode", &["all"])])
}
