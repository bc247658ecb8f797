//! Where the memory of a step goes: predicted, measured, by phase and by origin, with a timeline and PyTorch's
//! snapshot.
//!
//! ```text
//! cargo run --example memory_profile
//! cargo run --example memory_profile -- --size small --context-length 128 256 512 --mode forward train-step
//! cargo run --example memory_profile -- --attention naive flash --timeline step.svg --snapshot step.pickle
//! cargo run --example memory_profile -- --mode train-step --checkpoint none block sqrt --timeline step.svg
//! cargo run --example memory_profile -- --size 2.7b --mode forward,train-step
//! cargo run --features cuda --example memory_profile -- --device cuda:0 --size 2.7b --precision f32 bf16 --compile
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "memory_profile/files.rs"]
mod files;
#[path = "memory_profile/planned.rs"]
mod planned;
#[path = "memory_profile/summary.rs"]
mod summary;

use clap::Parser;
use common::models::{Model, ModelFlags, VariantFlags, describe};
use common::modes::{
    CompileFlag, ModeFlag, check_planned_flags, executed, is_any, modes, not_planned,
    optimizer_words,
};
use common::precision::PrecisionFlags;
use common::{Common, Effects, Output, values, words};
use files::FileFlags;
use std::process::ExitCode;
use summary::{Details, columns, lines, row};
use tallow::bench::{EndToEnd, Execution, OptimizerChoice};
use tallow::memory::{Estimate, RecordConfig};
use tallow::report::{Fields, Report, format_mib, list_in_note};
use tallow::{Error, Result};

/// Where the memory of a step goes: predicted, measured, by phase and by origin.
#[derive(Parser)]
#[command(version)]
struct Flags {
    #[command(flatten)]
    models: ModelFlags,

    /// Sequences in a batch; several allowed
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4")]
    batch_size: Vec<usize>,

    /// Tokens in a sequence; several allowed
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values = ["128", "256", "512"])]
    context_length: Vec<usize>,

    /// How much of a training step; several allowed
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_values = ["forward", "train-step"])]
    mode: Vec<ModeFlag>,

    #[command(flatten)]
    variants: VariantFlags,

    #[command(flatten)]
    precision: PrecisionFlags,

    /// Run each as planned beforehand too, or with =only alone: its timeline is the map of its arena, and it has no
    /// snapshot
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "beside")]
    compile: Option<CompileFlag>,

    /// The most that the arena of a planned train step may take, in GiB: backward runs again what does not fit, as
    /// little as will do
    #[arg(long, requires = "compile", value_parser = values::gib)]
    memory_budget_gib: Option<f64>,

    /// Update each parameter in backward, as soon as its gradient is there, in the train steps that are planned
    #[arg(long, requires = "compile")]
    optimizer_in_backward: bool,

    /// Steps that are run before the one that is recorded
    #[arg(long, default_value_t = 1, value_parser = values::count_from_0())]
    warmup_steps: usize,

    /// How many of the largest allocations are listed for each run
    #[arg(long, default_value_t = 5)]
    largest: usize,

    /// Record blocks from this size on, in bytes
    #[arg(long, default_value_t = 4096)]
    threshold_bytes: usize,

    /// The memory that may be used, in GiB, instead of what is available
    #[arg(long, value_parser = values::gib)]
    memory_limit_gib: Option<f64>,

    #[command(flatten)]
    files: FileFlags,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
    common::run(|| flags.common.around(|| flags.run()))
}

/// What is run, and what it is called.
struct Run {
    size: String,
    end_to_end: EndToEnd,
}

impl Run {
    fn title(&self) -> String {
        let run = &self.end_to_end;
        format!(
            "{} B{} T{}, {}, {}, checkpointing {}, {}, {}",
            self.size,
            run.batch_size,
            run.sequence_length,
            run.mode.name(),
            run.config.attention,
            run.config.checkpointing,
            run.precision,
            run.execution.name()
        )
    }
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only(
                "where a step can be planned: in f32, or f32 parameters with kept copies",
                &["compile"],
                |flags| is_any(&flags.precision, flags.compile, &modes(&flags.mode), true),
            )
            .only(
                "where steps run eagerly: without --compile=only",
                &["snapshot", "largest", "threshold-bytes"],
                |flags| is_any(&flags.precision, flags.compile, &modes(&flags.mode), false),
            )
    }

    fn run(&self) -> Result<()> {
        if self.compile == Some(CompileFlag::Only) {
            common::take_blocks_from_the_system();
        }
        self.files.check(&self.output)?;
        let device = self.common.device()?;
        let longest = self.context_length.iter().copied().max();
        let longest = longest.unwrap_or_default();
        let models = self.models.models(longest, &self.variants.attention)?;
        let is_any_given = self.memory_budget_gib.is_some() || self.optimizer_in_backward;
        let precisions = self.precision.precisions()?;
        check_planned_flags(is_any_given, self.compile, &modes(&self.mode), &precisions)?;
        let mut runs = self.runs(&models)?;
        let available_bytes = common::memory::available_bytes(
            &device,
            self.memory_limit_gib,
            runs.iter().map(|run| &run.end_to_end),
        )?;
        for run in &mut runs {
            run.end_to_end.available_bytes = available_bytes;
        }
        self.output.check_columns([columns(&device)])?;
        let mut configuration = describe(&models);
        let optimizer = optimizer_words("adamw", self.optimizer_in_backward);
        configuration.insert("optimizer", optimizer);
        configuration.insert(
            "recorded blocks",
            format!("{} bytes and more", self.threshold_bytes),
        );
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration,
            columns: columns(&device),
            ..Default::default()
        };
        let mut details = Details::default();
        let mut refused = Vec::new(); // places of rows
        let mut kept = Ok(()); // a file that fails does not cost the table
        for run in &runs {
            common::progress(run.title());
            if run.end_to_end.execution == Execution::Planned {
                report.rows.push(planned::row(run, &device)?);
                let plan = match run.end_to_end.plan(&device) {
                    Err(error) if error.is_out_of_memory() => {
                        report.notes.push(format!("{}: {error}.", run.title()));
                        continue;
                    }
                    plan => plan?,
                };
                report.notes.push(planned::note(&run.title(), &plan));
                kept = kept.and(self.files.write_map(&run.title(), runs.len(), &plan));
                continue;
            }
            let estimate = run.end_to_end.estimate(&device)?;
            let available = run.end_to_end.available_bytes;
            if available.is_some_and(|bytes| estimate.peak_bytes > bytes) {
                report.rows.push(row(run, &estimate, None, available));
                refused.push(report.rows.len() - 1);
                details.add_refused(run, &estimate);
                continue;
            }
            let record = RecordConfig {
                threshold_bytes: self.threshold_bytes,
                ..Default::default()
            };
            let profile = match run.end_to_end.profile_memory(&device, record) {
                Err(error) if error.is_out_of_memory() => {
                    let available = tallow::hardware::available_bytes_on(&device);
                    report.rows.push(row(run, &estimate, None, available));
                    report.notes.push(out_of_memory(run, &estimate, &error));
                    continue;
                }
                profile => profile?,
            };
            report
                .rows
                .push(row(run, &estimate, Some(&profile), available));
            let notes = profile.recording.notes().into_iter();
            report
                .notes
                .extend(notes.map(|note| format!("{}: {note}.", run.title())));
            details.add(run, &profile, self.largest);
            kept = kept.and(self.files.write(&run.title(), runs.len(), &profile));
        }
        if !refused.is_empty() {
            let names = words::names(&report.rows);
            let refused: Vec<String> = refused.into_iter().map(|i| names[i].clone()).collect();
            let start = "Predicted not to fit, and not run";
            report.notes.push(list_in_note(start, &refused));
        }
        report.details = details.into_tables();
        report.lines = lines(&report.rows);
        report
            .notes
            .extend(not_planned(self.compile, &self.precision.precisions()?));
        report.notes.extend(self.residual_stream(&models));
        report
            .environment
            .insert("reference ops", common::fallbacks());
        let published = self.output.publish(&report);
        kept.and(published)
    }

    /// The size of one tensor of the residual stream, with its derivation.
    fn residual_stream(&self, models: &[Model]) -> Vec<String> {
        let note = |Model { name, config }: &Model| {
            let mut sizes = Vec::new();
            for &batch_size in &self.batch_size {
                for &length in &self.context_length {
                    let bytes = 4.0 * batch_size as f64 * length as f64 * config.d_model as f64;
                    let size = format_mib(bytes as u64);
                    sizes.push(format!(
                        "{batch_size} x {length} x {} x 4 = {size}",
                        config.d_model
                    ));
                }
            }
            let start =
                format!("{name}: a tensor of the residual stream in f32 has B x T x D x 4 bytes");
            list_in_note(&start, &sizes)
        };
        models.iter().map(note).collect()
    }

    /// Every combination of the flags' lists.
    fn runs(&self, models: &[Model]) -> Result<Vec<Run>> {
        let budget = self.memory_budget_gib;
        let budget = budget.map(common::gib_bytes);
        let precisions = self.precision.precisions()?;
        let mut runs = Vec::new();
        for Model { name, config } in models {
            let variants = self.variants.variants(config);
            for &batch_size in &self.batch_size {
                for &sequence_length in &self.context_length {
                    for config in &variants {
                        for &precision in &precisions {
                            for (mode, execution) in
                                executed(self.compile, modes(&self.mode), precision)
                            {
                                let end_to_end = EndToEnd {
                                    config: config.clone(),
                                    batch_size,
                                    sequence_length,
                                    mode,
                                    precision,
                                    warmup_steps: self.warmup_steps,
                                    steps: 1,
                                    optimizer: OptimizerChoice::AdamW(Default::default()),
                                    execution,
                                    optimizer_in_backward: self.optimizer_in_backward
                                        && execution.is_planned_step(mode),
                                    memory_budget_bytes: budget
                                        .filter(|_| execution.is_planned_step(mode)),
                                    seed: self.common.seed,
                                    peak_flops: None,
                                    available_bytes: None,
                                };
                                runs.push(Run {
                                    size: name.clone(),
                                    end_to_end,
                                });
                            }
                        }
                    }
                }
            }
        }
        Ok(runs)
    }
}

/// What is said of a run that had seemed to fit.
fn out_of_memory(run: &Run, estimate: &Estimate, error: &Error) -> String {
    format!(
        "{} was predicted to take {}, and ran out of memory: {error}.",
        run.title(),
        format_mib(estimate.peak_bytes)
    )
}

/// What every row says of its run.
fn labels(run: &Run) -> Fields {
    let mut fields = Fields::new();
    let Run { size, end_to_end } = run;
    fields.insert("size", size.as_str());
    fields.insert("batch_size", end_to_end.batch_size);
    fields.insert("context_length", end_to_end.sequence_length);
    fields.insert("attention", end_to_end.config.attention.name());
    let checkpointing = end_to_end.config.checkpointing.to_string();
    fields.insert("checkpointing", checkpointing);
    fields.insert("precision", end_to_end.precision.name());
    fields.insert("execution", end_to_end.execution.name());
    let in_backward = end_to_end.optimizer_in_backward;
    fields.insert("optimizer_in_backward", in_backward);
    fields.insert("mode", end_to_end.mode.name());
    fields
}
