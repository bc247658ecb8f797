//! Where the memory of a step goes: predicted, measured, by phase and by origin, with a timeline and PyTorch's
//! snapshot.
//!
//! ```text
//! cargo run --example memory_profile
//! cargo run --example memory_profile -- --size 2.7b --mode forward train-step --timeline step.svg
//! cargo run --example memory_profile -- --mode train-step --checkpoint none block sqrt
//! cargo run --features cuda --example memory_profile -- --device cuda:0 --size 2.7b --precision f32 bf16 --compile
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "memory_profile/answers.rs"]
mod answers;
mod common;
#[path = "memory_profile/tables.rs"]
mod tables;

use answers::Row;
use candle_core::Device;
use clap::Parser;
use common::models::{Model, ModelFlags, VariantFlags, describe};
use common::modes::{
    CompileFlag, ModeFlag, check_planned_flags, executed, is_any, modes, not_planned,
    optimizer_words,
};
use common::outputs::named;
use common::precision::PrecisionFlags;
use common::{Common, Effects, Output, Sweep, values, words};
use serde::Deserialize;
use std::path::PathBuf;
use std::process::ExitCode;
use tables::{Details, columns, line};
use tallow::Result;
use tallow::bench::{EndToEnd, Execution, MemoryProfile};
use tallow::memory::{MemoryKind, RecordConfig, Snapshot, planned_breakdown, timeline};
use tallow::report::{Answer, Fields, Report, format_mib};

const EXAMPLES: &str = "Examples:
  memory_profile --size 2.7b --mode forward train-step --timeline step.svg
  memory_profile --mode train-step --checkpoint none block sqrt
  memory_profile --size small --precision f32 bf16 --snapshot step.pickle";

/// Records where the memory of a step goes, by phase, kind and origin
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

    /// Tokens in a sequence; several [default: 128 256 512]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "sequence-length")]
    context_length: Vec<usize>,

    #[command(flatten, next_help_heading = "Run")]
    precision: PrecisionFlags,

    /// forward, forward-backward, train-step, all
    #[arg(long, value_enum, hide_possible_values = true, num_args = 1.., value_delimiter = ',', default_value = "forward,train-step", value_name = "NAME", help_heading = "Run")]
    mode: Vec<ModeFlag>,

    /// Planned steps too, or alone with =only
    #[arg(long, value_enum, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_missing_value = "beside", value_name = "HOW", help_heading = "Run")]
    compile: Option<CompileFlag>,

    /// Most memory of a planned step's arena
    #[arg(long, value_name = "GIB", requires = "compile", value_parser = values::gib, help_heading = "Run")]
    memory_budget_gib: Option<f64>,

    /// Planned steps update parameters in backward
    #[arg(long, requires = "compile", help_heading = "Run")]
    optimizer_in_backward: bool,

    /// Steps before the recorded one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::count_from_0(), help_heading = "Run")]
    warmup_steps: usize,

    /// Memory that may be used [default: what is available]
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    memory_limit_gib: Option<f64>,

    /// Largest allocations to list for each run
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Output")]
    largest: usize,

    /// Smallest block that is recorded
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = 4096,
        help_heading = "Output"
    )]
    threshold_bytes: usize,

    /// Draw memory over time (.svg, .png); one file a run
    #[arg(long, value_name = "FILE", value_parser = values::picture(), help_heading = "Output")]
    timeline: Option<PathBuf>,

    /// Write PyTorch's snapshot (.json, else pickle)
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    snapshot: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

fn main() -> ExitCode {
    let mut flags = Flags::effects().parse();
    flags
        .models
        .fill_context(&mut flags.context_length, &[128, 256, 512]);
    common::run(|| flags.common.around(|| flags.run()))
}

/// What a planned run measures.
#[derive(Deserialize)]
struct Planned {
    status: String,
    estimate_bytes: Option<u64>,
    available_bytes: Option<u64>,
    peak_bytes: Option<u64>,
    reserved_peak_bytes: Option<u64>,
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
        self.output.check_with([&self.timeline, &self.snapshot])?;
        let device = self.common.device()?;
        let longest = self.context_length.iter().copied().max();
        let models = self
            .models
            .models(longest.unwrap_or_default(), &self.variants.attention)?;
        let is_any_given = self.memory_budget_gib.is_some() || self.optimizer_in_backward;
        let precisions = self.precision.precisions()?;
        check_planned_flags(is_any_given, self.compile, &modes(&self.mode), &precisions)?;
        let mut runs = self.runs(&models)?;
        let all = runs.iter().map(|(_, run)| run);
        let available_bytes = common::memory::available_bytes(&device, self.memory_limit_gib, all)?;
        self.output.check_columns([columns(&device)])?;
        let (mut rows, mut details, mut notes) = (Vec::new(), Details::default(), Vec::new());
        let mut kept = Ok(()); // a file that fails does not cost the table
        let mut sweep = Sweep::new(runs.len())?;
        let several = runs.len();
        for (size, run) in &mut runs {
            let title = title(size, run);
            if !sweep.begins(&title) {
                break;
            }
            run.available_bytes = available_bytes;
            let index = rows.len();
            let mut row = labels(size, run);
            let written = match run.execution {
                Execution::Planned => {
                    self.run_planned(run, &device, &mut row, (index, &mut details), |path| {
                        named(path, &title, several)
                    })
                }
                Execution::Eager => {
                    let profile = self.run_eager(run, &device, &mut row)?;
                    match &profile {
                        Some(profile) => {
                            details.add(index, profile, self.largest)?;
                            let said = profile.recording.notes().into_iter();
                            notes.extend(said.map(|note| format!("{title}: {note}.")));
                            self.write(profile, &title, several)
                        }
                        None => {
                            let breakdown = run.estimate(&device)?.breakdown;
                            details.add_predicted(index, &breakdown)
                        }
                    }
                }
            };
            kept = kept.and(written);
            rows.push(row);
        }
        answers::compare_with_f32(&mut rows);
        let fields = rows.iter().map(Fields::of).collect::<Result<Vec<_>>>()?;
        let with_phase = fields.iter().zip(&rows).map(|(fields, row)| {
            let mut fields = fields.clone();
            fields.insert("phase", row.mode.as_str()); // names end in it
            fields.insert("status", "ok");
            fields
        });
        let names = words::names(&with_phase.collect::<Vec<_>>());
        let mut answers = answers::answers(&rows, &names);
        answers.push(self.residual_stream(&models));
        answers.extend(details.largest(&names));
        notes.extend(not_planned(self.compile, &precisions));
        notes.push(
            "Peak is measured in one step by counting allocations. Predicted follows from sizes alone. OOM needs more \
             memory than is available."
                .into(),
        );
        notes.extend(sweep.note());
        let mut configuration = describe(&models);
        let optimizer = optimizer_words("adamw", self.optimizer_in_backward);
        configuration.insert("optimizer", optimizer);
        let threshold = format!("{} bytes and more", self.threshold_bytes);
        configuration.insert("recorded blocks", threshold);
        let mut environment = self.common.environment(&device);
        environment.insert("reference ops", common::fallbacks());
        let published = self.output.publish(&Report {
            environment,
            configuration,
            columns: columns(&device),
            lines: fields.iter().map(line).collect(),
            rows: fields,
            answers,
            notes,
            details: details.into_tables(&names, &rows)?,
            ..Default::default()
        });
        kept.and(published)
    }

    /// Records a step; `None` where it does not fit.
    fn run_eager(
        &self,
        run: &EndToEnd,
        device: &Device,
        row: &mut Row,
    ) -> Result<Option<MemoryProfile>> {
        let estimate = run.estimate(device)?;
        row.status = "OOM".into();
        row.estimate_bytes = Some(estimate.peak_bytes);
        row.available_bytes = run.available_bytes;
        if run
            .available_bytes
            .is_some_and(|bytes| estimate.peak_bytes > bytes)
        {
            return Ok(None);
        }
        let record = RecordConfig {
            threshold_bytes: self.threshold_bytes,
            ..Default::default()
        };
        let profile = match run.profile_memory(device, record) {
            Err(error) if error.is_out_of_memory() => {
                row.available_bytes = tallow::hardware::available_bytes_on(device);
                return Ok(None);
            }
            profile => profile?,
        };
        row.status = "ok".into();
        row.peak_bytes = Some(profile.peak_bytes);
        row.reserved_peak_bytes = profile.reserved_peak_bytes;
        let error = estimate.peak_bytes as f64 / profile.peak_bytes as f64 - 1.0;
        row.estimate_error_percent = Some(100.0 * error);
        let recording = &profile.recording;
        let peak_at = recording.peak_at();
        for phase in recording.phases() {
            let bytes = Some(recording.peak_bytes_in(phase));
            match phase.name {
                "forward" => row.forward_peak_bytes = bytes,
                "backward" => row.backward_peak_bytes = bytes,
                _ => row.optimizer_peak_bytes = bytes,
            }
            if row.peak_phase.is_none() && (phase.begins_at..=phase.ends_at).contains(&peak_at) {
                row.peak_phase = Some(phase.name.into());
            }
        }
        let casts = recording
            .holdings_at(peak_at)
            .bytes_of(MemoryKind::WeightCasts);
        row.weight_cast_bytes = Some(casts);
        let saved = &profile.saved;
        row.saved_for_backward_bytes = (!saved.tensors.is_empty()).then(|| saved.residual_bytes());
        row.allocations = Some(profile.allocations);
        row.lost_events = Some(recording.lost_events);
        Ok(Some(profile))
    }

    /// Runs a planned step, whose timeline is the map of its arena.
    fn run_planned(
        &self,
        run: &EndToEnd,
        device: &Device,
        row: &mut Row,
        (index, details): (usize, &mut Details),
        path: impl Fn(&std::path::Path) -> PathBuf,
    ) -> Result<()> {
        let measured = run.run(device, |_, _| ())?;
        if let Some(measured) = measured.first().and_then(Fields::read::<Planned>) {
            row.status = measured.status;
            row.estimate_bytes = measured.estimate_bytes;
            row.available_bytes = measured.available_bytes;
            row.peak_bytes = measured.peak_bytes;
            row.reserved_peak_bytes = measured.reserved_peak_bytes;
            let both = measured.estimate_bytes.zip(measured.peak_bytes);
            row.estimate_error_percent =
                both.map(|(predicted, peak)| 100.0 * (predicted as f64 / peak as f64 - 1.0));
        }
        let plan = match run.plan(device) {
            Err(error) if error.is_out_of_memory() => return Ok(()),
            plan => plan?,
        };
        details.add_predicted(index, &planned_breakdown(&plan))?;
        match &self.timeline {
            Some(timeline) => plan.save_memory_map(path(timeline)),
            None => Ok(()),
        }
    }

    /// Writes the files of an eager run.
    fn write(&self, profile: &MemoryProfile, title: &str, runs: usize) -> Result<()> {
        if let Some(path) = &self.timeline {
            let path = named(path, title, runs);
            timeline(&profile.recording, title).save(&path)?;
            common::wrote(&path);
        }
        if let Some(path) = &self.snapshot {
            let snapshot = Snapshot::new(&profile.recording);
            let path = named(path, title, runs);
            match path.extension().is_some_and(|ending| ending == "json") {
                true => snapshot.save_json(&path)?,
                false => snapshot.save_pickle(&path)?,
            }
            common::wrote(&path);
        }
        Ok(())
    }

    /// The size of one tensor of the residual stream, with its derivation.
    fn residual_stream(&self, models: &[Model]) -> Answer {
        let mut sizes = Vec::new();
        for Model { name, config } in models {
            for &batch_size in &self.batch_size {
                for &length in &self.context_length {
                    let width = config.d_model;
                    let bytes = 4.0 * batch_size as f64 * length as f64 * width as f64;
                    let size = format_mib(bytes as u64);
                    sizes.push(format!(
                        "{name} {batch_size} x {length} x {width} x 4 = {size}"
                    ));
                }
            }
        }
        sizes.truncate(6);
        let text = format!("B x T x D elements of 4 bytes: {}.", sizes.join("; "));
        Answer::new("How large is a tensor of the residual stream in f32?", text)
    }

    /// Every combination of the flags' lists.
    fn runs(&self, models: &[Model]) -> Result<Vec<(String, EndToEnd)>> {
        let budget = self.memory_budget_gib.map(common::gib_bytes);
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
                                let is_step = execution.is_planned_step(mode);
                                let run = EndToEnd {
                                    config: config.clone(),
                                    batch_size,
                                    sequence_length,
                                    mode,
                                    precision,
                                    warmup_steps: self.warmup_steps,
                                    steps: 1,
                                    optimizer: Default::default(),
                                    execution,
                                    optimizer_in_backward: self.optimizer_in_backward && is_step,
                                    memory_budget_bytes: budget.filter(|_| is_step),
                                    seed: self.common.seed,
                                    peak_flops: None,
                                    available_bytes: None,
                                };
                                runs.push((name.clone(), run));
                            }
                        }
                    }
                }
            }
        }
        Ok(runs)
    }
}

/// A run's name in files and progress.
fn title(size: &str, run: &EndToEnd) -> String {
    format!(
        "{size} B{} T{}, {}, {}, checkpointing {}, {}, {}",
        run.batch_size,
        run.sequence_length,
        run.mode.name(),
        run.config.attention,
        run.config.checkpointing,
        run.precision,
        run.execution.name()
    )
}

/// A run's row before it is measured.
fn labels(size: &str, run: &EndToEnd) -> Row {
    Row {
        size: size.into(),
        batch_size: run.batch_size,
        context_length: run.sequence_length,
        attention: run.config.attention.name().into(),
        checkpointing: run.config.checkpointing.to_string(),
        precision: run.precision.name().into(),
        execution: run.execution.name().into(),
        optimizer_in_backward: run.optimizer_in_backward,
        mode: run.mode.name().into(),
        ..Default::default()
    }
}
