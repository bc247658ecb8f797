//! The memory of a step before anything is run, term by term with its formula, and what follows: what fits, and with
//! which checkpointing.
//!
//! ```text
//! cargo run --example memory_estimate -- --size small medium --context-length 512 --mode forward train-step
//! cargo run --example memory_estimate -- --size medium --context-length 1024 --budget --memory-limit-gib 8
//! cargo run --example memory_estimate -- --size small --compile=only --precision bf16 --world-size 8 --strategy fully-shard
//! cargo run --example memory_estimate -- --verify
//! ```
//!
//! The GPU of `--device cuda` need not be there. `--verify` runs fifty small configurations and compares their peaks
//! with the estimate; the exit code is 1 where one is outside its bounds.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "memory_estimate/answers.rs"]
mod answers;
#[path = "memory_estimate/cases.rs"]
mod cases;
mod common;
#[path = "memory_estimate/eager.rs"]
mod eager;
#[path = "memory_estimate/step.rs"]
mod step;
#[path = "memory_estimate/verify.rs"]
mod verify;

use candle_core::Device;
use clap::{Parser, ValueEnum};
use common::models::{Model, ModelFlags, VariantFlags, describe};
use common::modes::{CompileFlag, ModeFlag, modes};
use common::precision::PrecisionFlags;
use common::{Effects, Output, values, words};
use eager::{Question, residual_stream_bytes};
use serde::Serialize;
use std::process::ExitCode;
use tallow::bench::Execution;
use tallow::compile::Target;
use tallow::memory::{
    Kernels, MemoryBreakdown, MemoryKind, Mode, Workload, estimate, planned_breakdown,
};
use tallow::model::TransformerConfig;
use tallow::optim::Moments;
use tallow::precision::Precision;
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

const EXAMPLES: &str = "Examples:
  memory_estimate --size small medium --context-length 512 --mode forward train-step
  memory_estimate --size medium --context-length 1024 --budget --memory-limit-gib 8
  memory_estimate --size xl --compile=only --precision bf16 --device cuda --memory-limit-gib 80";

/// Predicts the memory of a transformer's forward, backward and optimizer
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
struct Flags {
    #[command(flatten)]
    models: ModelFlags,

    #[command(flatten)]
    variants: VariantFlags,

    /// Sequences in a batch; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4", value_name = "N")]
    batch_size: Vec<usize>,

    /// Tokens in a sequence; several [default: 256]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "sequence-length")]
    context_length: Vec<usize>,

    #[command(flatten, next_help_heading = "Run")]
    precision: PrecisionFlags,

    /// forward, forward-backward, train-step, all
    #[arg(long, value_enum, hide_possible_values = true, num_args = 1.., value_delimiter = ',', default_value = "train-step", value_name = "NAME", help_heading = "Run")]
    mode: Vec<ModeFlag>,

    /// adamw, or adamw-bf16 with running means in bf16
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        default_value = "adamw",
        value_name = "NAME",
        help_heading = "Run"
    )]
    optimizer: OptimizerFlag,

    /// Memory to fit; planned steps are asked with it only
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    memory_limit_gib: Option<f64>,

    /// Fail if no checkpointing lets a step fit
    #[arg(long, help_heading = "Run")]
    budget: bool,

    /// Kernels: cpu, cuda (need not be there), metal:0
    #[arg(long, default_value = "cpu", value_name = "NAME", help_heading = "Run")]
    device: String,

    #[command(flatten)]
    step: step::StepFlags,

    /// Run fifty small steps on the CPU, and compare
    #[arg(long, help_heading = "Verification")]
    verify: bool,

    /// Threads of --verify
    #[arg(long, hide_short_help = true, default_value_t = 2, value_name = "N", requires = "verify", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Verification")]
    threads: u16,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum OptimizerFlag {
    Adamw,
    AdamwBf16,
}

/// A configuration's prediction.
#[derive(Clone, Debug, Serialize)]
struct Row {
    size: String,
    batch_size: usize,
    context_length: usize,
    mode: &'static str,
    attention: &'static str,
    precision: &'static str,
    checkpointing: String,
    execution: &'static str,
    peak_bytes: u64,
    after_forward_bytes: u64,
    residual_stream_bytes: u64,
    available_bytes: Option<u64>,
    /// At the context length.
    largest_batch_size: Option<usize>,
    /// At the batch size.
    largest_context_length: Option<usize>,
    /// The one that fits and recomputes the fewest blocks.
    recommended_checkpointing: Option<String>,
}

fn main() -> ExitCode {
    let mut flags = Flags::effects().parse();
    flags.models.fill_context(&mut flags.context_length, &[256]);
    let mut near = true;
    let done = common::run(|| {
        near = flags.run()?;
        Ok(())
    });
    match near {
        true => done,
        false => ExitCode::FAILURE,
    }
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only(
                "without --verify, which has configurations of its own",
                &[
                    "handout",
                    "size",
                    "family",
                    "d-model",
                    "d-ff",
                    "num-layers",
                    "num-heads",
                    "vocab-size",
                    "batch-size",
                    "context-length",
                    "mode",
                    "attention",
                    "checkpoint",
                    "precision",
                    "autocast",
                    "full-half",
                    "drop-casts",
                    "memory-limit-gib",
                    "budget",
                    "compile",
                    "device",
                    "optimizer",
                ],
                |flags| !flags.verify,
            )
            .only("in a training step", &["optimizer"], |flags| {
                modes(&flags.mode).contains(&Mode::TrainStep)
            })
            .only("with --compile", step::NAMES, |flags| {
                flags.step.compile.is_some()
            })
            .only(
                "with --compile and a --world-size over 1",
                &["strategy", "exchange", "bucket-mib", "exchange-bf16"],
                |flags| flags.step.has_ranks(),
            )
            .only("without --compile=only", &["budget"], |flags| {
                flags.step.compile != Some(CompileFlag::Only)
            })
            .only(
                "without --memory-budget-gib",
                &["memory-limit-gib"],
                |flags| !flags.step.has_budget(),
            )
    }

    /// Whether every prediction that was checked is near.
    fn run(&self) -> Result<bool> {
        self.output.check_with([])?;
        let device = match tallow::device(&self.device) {
            Ok(device) => Some(device),
            Err(_) if self.device == "cuda" => None,
            Err(error) => return Err(error),
        };
        let mut report = Report {
            environment: common::environment(device.as_ref().unwrap_or(&Device::Cpu)),
            ..Default::default()
        };
        let near = match self.verify {
            true => {
                report.configuration.insert("threads", self.threads);
                verify::verify(&mut report, self.threads.into())?
            }
            false => {
                self.predict(&mut report, device.as_ref())?;
                true
            }
        };
        self.output.publish(&report)?;
        Ok(near)
    }

    /// Every combination of the flags' lists; the answers are about the first eager one, with a backward if any has.
    fn predict(&self, report: &mut Report, device: Option<&Device>) -> Result<()> {
        self.output.check_columns([columns(), terms()])?;
        let longest = self.context_length.iter().copied().max();
        let models = self
            .models
            .models(longest.unwrap_or_default(), &self.variants.attention)?;
        report.configuration = describe(&models);
        if device.is_none() {
            let kernels = "those of a CUDA GPU, which is not here";
            report.configuration.insert("kernels", kernels);
        }
        let workloads = self.workloads(
            &self.precision.precisions()?,
            device.map_or(Kernels::Cuda, Kernels::of),
        );
        let executions: &[Execution] = match self.step.compile {
            None => &[Execution::Eager],
            Some(CompileFlag::Beside) => &[Execution::Eager, Execution::Planned],
            Some(CompileFlag::Only) => &[Execution::Planned],
        };
        if self.step.compile.is_some() {
            step::check(&modes(&self.mode))?;
        }
        let mut breakdowns: Vec<MemoryBreakdown> = Vec::new();
        let mut strategies = None;
        let mut answered: Option<(usize, Mode)> = None;
        for model in &models {
            for workload in &workloads {
                for execution in executions {
                    let (row, breakdown) = match execution {
                        Execution::Planned => self.planned(model, workload, device)?,
                        Execution::Eager => {
                            let question = Question {
                                config: &model.config,
                                workload,
                                available_bytes: self.available_bytes(device)?,
                            };
                            if self.budget {
                                question.within_budget(&model.name)?;
                            }
                            let is_first_step = |(_, mode): (usize, Mode)| {
                                mode == Mode::Forward && workload.mode != Mode::Forward
                            };
                            if answered.is_none_or(is_first_step) {
                                answered = Some((report.rows.len(), workload.mode));
                                report.answers = question.answers()?;
                                strategies = question.strategy_table()?;
                            }
                            eager_row(&model.name, &question)?
                        }
                    };
                    report.rows.push(with_kinds(&row, &breakdown)?);
                    breakdowns.push(breakdown);
                }
            }
        }
        report.columns = columns();
        let named = report.rows.iter().map(|row| {
            let mut row = row.clone();
            let mode = row.get("mode").cloned().unwrap_or_default();
            row.insert("phase", mode); // names end in it
            row
        });
        let names = words::names(&named.collect::<Vec<_>>());
        if let Some((index, _)) = answered.filter(|_| report.rows.len() > 1) {
            let note = format!("The answers are about one configuration: {}.", names[index]);
            report.notes.push(note);
        }
        let mut sizes: Vec<String> = Vec::new();
        let mut rows = Vec::new();
        for (name, breakdown) in names.iter().zip(&breakdowns) {
            let own = breakdown.report();
            sizes.extend(
                own.notes
                    .into_iter()
                    .filter(|note| !sizes.contains(note))
                    .collect::<Vec<_>>(),
            );
            rows.extend(own.rows.into_iter().map(|term| {
                let mut row = Fields::from_iter([("run", name.as_str())]);
                row.merge(term);
                row
            }));
        }
        sizes.truncate(4);
        report.details.extend(strategies);
        report.details.push(Report {
            title: "Terms of the peak".into(),
            columns: terms(),
            rows,
            notes: sizes,
            ..Default::default()
        });
        Ok(())
    }

    /// A planned step; what fits is searched only where a limit is given, since every try is a plan.
    fn planned(
        &self,
        Model { name, config }: &Model,
        workload: &Workload,
        device: Option<&Device>,
    ) -> Result<(Row, MemoryBreakdown)> {
        let target = device.map_or(Target::Cuda, Target::from);
        let (plan, checkpointing) = self.step.plan(config, workload, target)?;
        let workload = &Workload {
            checkpointing, // a budget may choose another
            ..workload.clone()
        };
        let breakdown = planned_breakdown(&plan);
        let mut row = new_row(name, config, workload, &breakdown);
        row.execution = Execution::Planned.name();
        row.available_bytes = self.memory_limit_gib.map(common::gib_bytes);
        if let Some(bytes) = row.available_bytes {
            let largest = self.step.largest(config, workload, target, bytes)?;
            (row.largest_batch_size, row.largest_context_length) = largest;
        }
        Ok((row, breakdown))
    }

    fn workloads(&self, precisions: &[Precision], kernels: Kernels) -> Vec<Workload> {
        let moments = match self.optimizer {
            OptimizerFlag::Adamw => Moments::Wide,
            OptimizerFlag::AdamwBf16 => Moments::Bf16 { seed: 0 },
        };
        let mut workloads = Vec::new();
        for &sequence_length in &self.context_length {
            for &batch_size in &self.batch_size {
                for &attention in &self.variants.attention {
                    for &checkpointing in &self.variants.checkpoint {
                        for &precision in precisions {
                            workloads.extend(modes(&self.mode).into_iter().map(|mode| Workload {
                                batch_size,
                                sequence_length,
                                mode,
                                attention,
                                precision,
                                checkpointing,
                                kernels,
                                moments,
                            }));
                        }
                    }
                }
            }
        }
        workloads
    }

    fn available_bytes(&self, device: Option<&Device>) -> Result<u64> {
        let limit = self.memory_limit_gib.map(common::gib_bytes);
        let available = limit.or_else(|| tallow::hardware::available_bytes_on(device?));
        available.ok_or_else(|| Error::Config {
            config: common::PROGRAM,
            field: "--memory-limit-gib",
            expected: "given".into(),
            got: "nothing, where the system does not say what is available".into(),
            hint: "name a number of GiB".into(),
        })
    }
}

fn new_row(
    name: &str,
    config: &TransformerConfig,
    workload: &Workload,
    breakdown: &MemoryBreakdown,
) -> Row {
    Row {
        size: name.into(),
        batch_size: workload.batch_size,
        context_length: workload.sequence_length,
        mode: workload.mode.name(),
        attention: workload.attention.name(),
        precision: workload.precision.name(),
        checkpointing: workload.checkpointing.to_string(),
        execution: Execution::Eager.name(),
        peak_bytes: breakdown.peak_bytes(),
        after_forward_bytes: breakdown.before_backward_bytes,
        residual_stream_bytes: residual_stream_bytes(config, workload),
        available_bytes: None,
        largest_batch_size: None,
        largest_context_length: None,
        recommended_checkpointing: None,
    }
}

fn eager_row(name: &str, question: &Question<'_>) -> Result<(Row, MemoryBreakdown)> {
    let breakdown = estimate(question.config, question.workload)?.breakdown;
    let (largest_batch_size, largest_context_length) = question.largest()?;
    let row = Row {
        available_bytes: Some(question.available_bytes),
        largest_batch_size,
        largest_context_length,
        recommended_checkpointing: question.recommended()?.map(|strategy| strategy.to_string()),
        ..new_row(name, question.config, question.workload, &breakdown)
    };
    Ok((row, breakdown))
}

/// The row with what its bytes are there for.
fn with_kinds(row: &Row, breakdown: &MemoryBreakdown) -> Result<Fields> {
    let mut fields = Fields::of(row)?;
    for kind in MemoryKind::ALL {
        let bytes = breakdown.bytes_of(kind);
        fields.insert(kind.name(), (bytes > 0).then_some(bytes));
    }
    Ok(fields)
}

/// A line a configuration. The kinds of memory are shown together or not at all: they add up to the peak.
fn columns() -> Vec<Column> {
    let mut columns = vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("mode", "Mode"),
        Column::text("attention", "Attention"),
        Column::text("precision", "Precision"),
        Column::text("checkpointing", "Checkpointing"),
        Column::text("execution", "Execution"),
        Column::mib("peak_bytes", "Peak"),
        Column::count("largest_batch_size", "Largest B").minor(1),
        Column::count("largest_context_length", "Largest T").minor(1),
        Column::mib("after_forward_bytes", "After forward").minor(2),
        Column::text("recommended_checkpointing", "Checkpointing that fits").minor(3),
        Column::mib("residual_stream_bytes", "Residual stream").minor(4),
    ];
    columns.extend(MemoryKind::ALL.map(|kind| {
        let column = Column::mib(kind.name(), kind.name());
        column.under("Of the peak").minor(5)
    }));
    columns
}

/// A line a term.
fn terms() -> Vec<Column> {
    vec![
        Column::text("run", "Run"),
        Column::text("holds", "Holds"),
        Column::text("what", "What"),
        Column::count("count", "Count").minor(2),
        Column::text("formula", "Elements of each").minor(1),
        Column::number("element_bytes", "Bytes an element", "", 0).minor(3),
        Column::mib("bytes", "Memory"),
    ]
}
