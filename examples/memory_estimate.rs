//! What a step will take before anything is run, line by line with its formula, and what follows: what fits, and with
//! which checkpointing.
//!
//! ```text
//! cargo run --example memory_estimate
//! cargo run --example memory_estimate -- --size small medium --context-length 512 --mode forward train-step
//! cargo run --example memory_estimate -- --size 2.7b --precision bf16 --attention flash --memory-limit-gib 80
//! cargo run --example memory_estimate -- --size medium --context-length 1024 --budget --memory-limit-gib 8
//! cargo run --example memory_estimate -- --size small --compile --precision bf16 --world-size 8 --strategy fully-shard
//! cargo run --example memory_estimate -- --size xl --compile --precision bf16 --device cuda --memory-limit-gib 80
//! cargo run --example memory_estimate -- --verify
//! ```
//!
//! `--compile` predicts the planned step, with its options and ranks, and within `--memory-limit-gib` what fits; without
//! it the eager one, with more answers. The GPU of `--device cuda` need not be there.
//!
//! `--verify` runs fifty small configurations and holds their peaks against the estimate; the exit code says whether
//! all of them are near.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "memory_estimate/answers.rs"]
mod answers;
#[path = "memory_estimate/cases.rs"]
mod cases;
mod common;
#[path = "memory_estimate/step.rs"]
mod step;
#[path = "memory_estimate/verify.rs"]
mod verify;

use answers::Question;
use candle_core::Device;
use clap::Parser;
use common::models::{Model, ModelFlags, VariantFlags, describe};
use common::modes::{ModeFlag, modes};
use common::precision::PrecisionFlags;
use common::{Effects, Output, values};
use std::process::ExitCode;
use tallow::compile::Target;
use tallow::memory::{Kernels, MemoryBreakdown, MemoryKind, Workload, estimate, planned_breakdown};
use tallow::model::TransformerConfig;
use tallow::precision::Precision;
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

/// Predicts the memory of a transformer's forward, backward and optimizer.
#[derive(Parser)]
#[command(version)]
struct Flags {
    #[command(flatten)]
    models: ModelFlags,

    /// Sequences in a batch; several allowed
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4")]
    batch_size: Vec<usize>,

    /// Tokens in a sequence; several allowed
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "256")]
    context_length: Vec<usize>,

    /// How much of a training step; several allowed
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "train-step")]
    mode: Vec<ModeFlag>,

    #[command(flatten)]
    variants: VariantFlags,

    #[command(flatten)]
    precision: PrecisionFlags,

    /// The memory that is to hold it, in GiB, instead of what is available; with --compile, which asks then what fits
    #[arg(long, value_parser = values::gib)]
    memory_limit_gib: Option<f64>,

    /// End in an error if no checkpointing lets a configuration fit
    #[arg(long)]
    budget: bool,

    #[command(flatten)]
    step: step::StepFlags,

    /// Run fifty small configurations on the CPU, and compare
    #[arg(long)]
    verify: bool,

    /// Threads of --verify
    #[arg(long, default_value_t = 2, requires = "verify", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,

    #[command(flatten)]
    output: Output,

    /// Whose kernels are predicted: cpu, cuda:0, metal:0; cuda need not be there
    #[arg(long, default_value = "cpu")]
    device: String,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
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
                ],
                |flags| !flags.verify,
            )
            .only("with --compile", step::NAMES, |flags| flags.step.compile)
            .only(
                "with --compile and a --world-size over 1",
                &["strategy", "exchange", "bucket-mib", "exchange-bf16"],
                |flags| flags.step.has_ranks(),
            )
            .only("without --compile", &["budget"], |flags| {
                !flags.step.compile
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
        let device = self.device()?;
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

    /// The device whose kernels are predicted; `None` for a GPU that is not there.
    fn device(&self) -> Result<Option<Device>> {
        match tallow::device(&self.device) {
            Ok(device) => Ok(Some(device)),
            Err(_) if self.device == "cuda" => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Every combination of the flags' lists, a row for each term of its account.
    fn predict(&self, report: &mut Report, device: Option<&Device>) -> Result<()> {
        let longest = self.context_length.iter().copied().max();
        let models = self
            .models
            .models(longest.unwrap_or_default(), &self.variants.attention)?;
        let precisions = self.precision.precisions()?;
        report.configuration = describe(&models);
        if device.is_none() {
            report
                .configuration
                .insert("kernels", "those of a CUDA GPU, which is not here");
        }
        let kernels = device.map_or(Kernels::Cuda, Kernels::of);
        let workloads = self.workloads(&precisions, kernels);
        report.columns = columns();
        self.output.check_columns([columns(), terms()])?;
        let mut analysis = Vec::new();
        if self.step.compile {
            step::check(&modes(&self.mode))?;
            let target = device.map_or(Target::Cuda, Target::from);
            let limit = self.memory_limit_gib.map(common::gib_bytes);
            for Model { name, config } in &models {
                for workload in &workloads {
                    let model = (name.as_str(), config);
                    let answers = self.predict_planned(report, model, workload, target, limit)?;
                    analysis.push(serde_json::to_value(answers).unwrap_or_default());
                }
            }
            report.analysis.insert("answers", analysis);
            return Ok(());
        }
        let available_bytes = self.available_bytes(device);
        let available_bytes = available_bytes.ok_or_else(|| Error::Config {
            config: common::PROGRAM,
            field: "--memory-limit-gib",
            expected: "given".into(),
            got: "nothing, where the system does not say what is available".into(),
            hint: "name a number of GiB".into(),
        })?;
        for Model { name, config } in &models {
            for workload in workloads.clone() {
                let question = Question {
                    title: title(name, &workload),
                    config,
                    workload: &workload,
                    available_bytes,
                };
                let plan = estimate(config, &workload)?;
                let labels = labels(name, &workload);
                let breakdown = add(report, &labels, &plan.breakdown);
                if self.budget {
                    question.within_budget()?;
                }
                let (notes, answers) = question.answers(&plan)?;
                report.details.push(Report {
                    title: question.title,
                    columns: terms(),
                    lines: breakdown.rows,
                    notes: [breakdown.notes, notes].concat(),
                    ..Default::default()
                });
                let mut labelled = labels;
                labelled.merge(answers);
                analysis.push(serde_json::to_value(labelled).unwrap_or_default());
            }
        }
        report.analysis.insert("answers", analysis);
        Ok(())
    }

    /// The planned step of one combination, and what fits, for programs.
    fn predict_planned(
        &self,
        report: &mut Report,
        (name, config): (&str, &TransformerConfig),
        workload: &Workload,
        target: Target,
        limit: Option<u64>,
    ) -> Result<Fields> {
        let (plan, checkpointing) = self.step.plan(config, workload, target)?;
        let workload = &Workload {
            checkpointing, // a budget may choose another
            ..workload.clone()
        };
        let labels = labels(name, workload);
        let breakdown = add(report, &labels, &planned_breakdown(&plan));
        let mut notes = breakdown.notes;
        let mut answers = labels;
        if let Some(limit) = limit {
            let fits = self.step.what_fits(config, workload, target, limit)?;
            notes.push(fits.0);
            answers.merge(fits.1);
        }
        report.details.push(Report {
            title: format!("{}, planned", title(name, workload)),
            columns: terms(),
            lines: breakdown.rows,
            notes,
            ..Default::default()
        });
        Ok(answers)
    }

    fn workloads(&self, precisions: &[Precision], kernels: Kernels) -> Vec<Workload> {
        let mut workloads = Vec::new();
        for &sequence_length in &self.context_length {
            for &batch_size in &self.batch_size {
                for &attention in &self.variants.attention {
                    for &checkpointing in &self.variants.checkpoint {
                        for &precision in precisions {
                            for mode in modes(&self.mode) {
                                workloads.push(Workload {
                                    batch_size,
                                    sequence_length,
                                    mode,
                                    attention,
                                    precision,
                                    checkpointing,
                                    kernels,
                                    ..Default::default()
                                });
                            }
                        }
                    }
                }
            }
        }
        workloads
    }

    /// What is to hold it; `None` where nobody says.
    fn available_bytes(&self, device: Option<&Device>) -> Option<u64> {
        let limit = self.memory_limit_gib.map(common::gib_bytes);
        limit.or_else(|| tallow::hardware::available_bytes_on(device?))
    }
}

fn title(name: &str, workload: &Workload) -> String {
    format!(
        "{name}, batch {}, context {}, {} attention, checkpointing {}, {}, {}",
        workload.batch_size,
        workload.sequence_length,
        workload.attention,
        workload.checkpointing,
        workload.precision,
        workload.mode.name()
    )
}

fn labels(name: &str, workload: &Workload) -> Fields {
    let mut row = Fields::new();
    row.insert("size", name);
    row.insert("batch_size", workload.batch_size);
    row.insert("context_length", workload.sequence_length);
    row.insert("mode", workload.mode.name());
    row.insert("attention", workload.attention.name());
    row.insert("precision", workload.precision.name());
    row.insert("checkpointing", workload.checkpointing.to_string());
    row
}

/// Adds a configuration's peak and what its bytes are there for, and returns its terms.
fn add(report: &mut Report, labels: &Fields, breakdown: &MemoryBreakdown) -> Report {
    let mut line = labels.clone();
    line.insert("peak_bytes", breakdown.peak_bytes());
    line.insert("after_forward_bytes", breakdown.before_backward_bytes);
    for kind in MemoryKind::ALL {
        let bytes = breakdown.bytes_of(kind);
        line.insert(kind.name(), (bytes > 0).then_some(bytes));
    }
    report.lines.push(line);
    let terms = breakdown.report();
    report.rows.extend(terms.rows.iter().map(|row| {
        let mut labelled = labels.clone();
        labelled.merge(row.clone());
        labelled
    }));
    terms
}

/// A line a configuration.
fn columns() -> Vec<Column> {
    let mut columns = vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("mode", "Mode"),
        Column::text("attention", "Attention"),
        Column::text("precision", "Precision"),
        Column::text("checkpointing", "Checkpointing"),
        Column::mib("peak_bytes", "Peak"),
        Column::mib("after_forward_bytes", "After forward").minor(1),
    ];
    let kinds = (2..).zip(MemoryKind::ALL);
    columns.extend(kinds.map(|(minor, kind)| {
        let column = Column::mib(kind.name(), kind.name());
        column.under("Of the peak").minor(minor)
    }));
    columns
}

/// A line a term.
fn terms() -> Vec<Column> {
    vec![
        Column::text("holds", "Holds"),
        Column::text("what", "What"),
        Column::count("count", "Count").minor(2),
        Column::text("formula", "Elements of each").minor(1),
        Column::number("element_bytes", "Bytes an element", "", 0).minor(3),
        Column::mib("bytes", "Memory"),
    ]
}
