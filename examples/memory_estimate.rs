//! Predicts the memory of a step without running it, term by term with formulas, and the sizes and checkpointing that
//! fit.
//!
//! `--device cuda` does not need a GPU. `memory_profile` measures what this program predicts.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

#[path = "memory_estimate/answers.rs"]
mod answers;
mod common;
#[path = "memory_estimate/question.rs"]
mod question;
#[path = "memory_estimate/step.rs"]
mod step;

use candle_core::Device;
use clap::{CommandFactory, Parser};
use common::effects::{self, Effect, only, only_group};
use common::models::describe;
use common::ranks::ExchangeFlags;
use common::runs::{self, GridFlags};
use common::{Output, words};
use question::Question;
use std::process::ExitCode;
use step::StepFlags;
use tallow::Result;
use tallow::bench::{EndToEnd, Execution};
use tallow::compile::Target;
use tallow::memory::{MemoryBreakdown, MemoryKind, Mode};
use tallow::nn::DropoutRates;
use tallow::report::{Column, Fields, Report, format_mib};

const EXAMPLES: &str = "Examples:
  memory_estimate --size small medium --context-length 512 --mode forward train-step
  memory_estimate --size medium --context-length 1024 --memory-limit-gib 8
  memory_estimate --size small --compile=only --world-size 8 --strategy fully-shard
  memory_estimate --size xl --compile=only --precision bf16 --device cuda --memory-limit-gib 80";

/// Predicts the memory of a transformer's forward, backward and optimizer
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
#[command(mut_arg("mode", |arg| arg.default_value("train-step")))]
#[command(mut_arg("memory_limit_gib", |arg| arg.help("Memory to fit; planned steps are asked with it only")))]
struct Flags {
    #[command(flatten)]
    grid: GridFlags,

    /// Kernels: cpu, cuda (need not be there), metal:0
    #[arg(long, default_value = "cpu", value_name = "NAME", help_heading = "Run")]
    device: String,

    #[command(flatten)]
    step: StepFlags,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,
}

fn main() -> ExitCode {
    let flags = effects::parse(Flags::command(), Flags::effects);
    common::run(|| flags.run())
}

impl Flags {
    fn effects(&self) -> Vec<Effect> {
        let mut effects = self.grid.effects();
        effects.extend([
            only_group::<StepFlags>(
                "in a planned training step: with --compile and --mode train-step",
                self.grid.has_planned_step(),
            ),
            only_group::<ExchangeFlags>("with a --world-size over 1", self.step.has_ranks()),
            only(
                "without --memory-budget-gib",
                !self.step.has_budget(),
                &["memory-limit-gib"],
            ),
        ]);
        effects
    }

    /// Predicts every run. The answers are about one of them: preferably eager, and with a backward.
    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        let device = match tallow::device(&self.device) {
            Ok(device) => Some(device),
            Err(_) if self.device == "cuda" => None,
            Err(error) => return Err(error),
        };
        let target = device.as_ref().map_or(Target::Cuda, Target::from);
        let mut models = self.grid.models()?;
        if let Some(rate) = self.step.dropout {
            for model in &mut models {
                model.config.dropout = DropoutRates::all(rate);
                model.config.validate()?;
            }
        }
        let mut configuration = describe(&models);
        if device.is_none() {
            let kernels = "those of a CUDA GPU, which is not here";
            configuration.insert("kernels", kernels);
        }
        let precisions = self.grid.precision.precisions();
        let base = EndToEnd {
            step: self.step.config(),
            ..Default::default()
        };
        let runs = self.grid.runs(&models, &precisions, &base);
        let has_limit = self.grid.memory_limit_gib.is_some();
        let available_bytes = match (self.grid.memory_limit_gib, &device) {
            (Some(gib), _) => Some(common::gib_bytes(gib)),
            (None, Some(device)) => tallow::hardware::available_bytes_on(device),
            (None, None) => None, // a GPU that is not here
        };
        // What fits is computed for a planned step only if a limit is given, because each size that is tried needs a plan.
        let question = |run| Question {
            run,
            target,
            available_bytes: available_bytes.filter(|_| !is_planned(run) || has_limit),
        };
        if let Some(bytes) = runs.iter().find_map(|run| question(run).available_bytes) {
            configuration.insert("available memory", format_mib(bytes));
        }
        let predicted = runs.iter().map(|run| question(run).row());
        let (rows, breakdowns): (Vec<Fields>, Vec<MemoryBreakdown>) =
            predicted.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let names = runs::names(&runs);
        let mut report = Report {
            environment: common::environment(device.as_ref().unwrap_or(&Device::Cpu)),
            configuration,
            columns: columns(),
            rows,
            notes: self.grid.not_planned(&precisions).into_iter().collect(),
            ..Default::default()
        };
        let preference = |run: &EndToEnd| (is_planned(run), run.mode == Mode::Forward);
        let numbered = runs.iter().enumerate();
        if let Some((i, run)) = numbered.min_by_key(|(_, run)| preference(run)) {
            let (answers, strategies) = question(run).answers()?;
            report.answers = answers;
            report.details.extend(strategies);
            if runs.len() > 1 {
                let note = format!("The answers are about one configuration: {}.", names[i]);
                report.notes.push(note);
            }
        }
        let mut terms = Report {
            title: "Terms of the peak".into(),
            ..Default::default()
        };
        for ((run, name), breakdown) in runs.iter().zip(&names).zip(&breakdowns) {
            runs::append(&mut terms, name, run, breakdown.report());
        }
        terms.notes.truncate(4);
        report.details.push(terms);
        self.output.publish(&report)
    }
}

fn is_planned(run: &EndToEnd) -> bool {
    run.execution == Execution::Planned
}

/// Returns the columns of one line a configuration. The kinds of memory share a rank, because together they are the
/// peak.
fn columns() -> Vec<Column> {
    let mut columns = words::label_columns();
    columns.extend([
        Column::mib("peak_bytes", "Peak"),
        Column::count("largest_batch_size", "Largest B"),
        Column::count("largest_context_length", "Largest T"),
        Column::mib("after_forward_bytes", "After forward"),
        Column::text("recommended_checkpointing", "Checkpointing that fits"),
        Column::mib("residual_stream_bytes", "Residual stream"),
    ]);
    columns.extend(MemoryKind::ALL.map(|kind| {
        let column = Column::mib(kind.name(), kind.name());
        column.group("Of the peak")
    }));
    columns
}
