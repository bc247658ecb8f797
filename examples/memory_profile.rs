//! Where the memory of a step goes: predicted, measured, by phase and by origin, with a timeline and PyTorch's
//! snapshot. `--help` has commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "memory_profile/answers.rs"]
mod answers;
mod common;
#[path = "memory_profile/tables.rs"]
mod tables;

use answers::Row;
use candle_core::Device;
use clap::Parser;
use common::models::{Model, describe};
use common::modes::{CompileFlag, is_any, not_planned};
use common::outputs::named;
use common::runs::{self, GridFlags, Run};
use common::{Common, Effects, Output, Sweep, values, words};
use std::path::PathBuf;
use std::process::ExitCode;
use tables::{Details, columns, line};
use tallow::Result;
use tallow::bench::{EndToEnd, MemoryProfile};
use tallow::memory::{MemoryKind, Snapshot, planned_breakdown, timeline};
use tallow::report::{Answer, Fields, Report, format_mib};

const EXAMPLES: &str = "Examples:
  memory_profile --size 2.7b --mode forward train-step --timeline step.svg
  memory_profile --mode train-step --checkpoint none block sqrt
  memory_profile --size small --precision f32 bf16 --snapshot step.pickle";

/// Records where the memory of a step goes, by phase, kind and origin
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
#[command(mut_arg("mode", |arg| arg.default_values(["forward", "train-step"])))]
#[command(mut_arg("context_length", |arg| arg.help("Tokens in a sequence; several [default: 128 256 512]")))]
struct Flags {
    #[command(flatten)]
    grid: GridFlags,

    /// Planned steps too, or alone with =only
    #[arg(long, value_enum, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_missing_value = "beside", value_name = "HOW", help_heading = "Run")]
    compile: Option<CompileFlag>,

    /// Steps before the recorded one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::count_from_0(), help_heading = "Run")]
    warmup_steps: usize,

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
    let grid = &mut flags.grid;
    grid.models
        .fill_context(&mut grid.context_length, &[128, 256, 512]);
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only(
                "where a step can be planned: in f32, or f32 parameters with kept copies",
                &["compile"],
                |flags| flags.is_any(true),
            )
            .only(
                "where steps run eagerly: without --compile=only",
                &["snapshot"],
                |flags| flags.is_any(false),
            )
    }

    /// Whether any run is planned, or any is not.
    fn is_any(&self, planned: bool) -> bool {
        let grid = &self.grid;
        is_any(&grid.precision, self.compile, &grid.modes(), planned)
    }

    fn run(&self) -> Result<()> {
        if self.compile == Some(CompileFlag::Only) {
            common::take_blocks_from_the_system();
        }
        self.output.check_with([&self.timeline, &self.snapshot])?;
        let device = self.common.device()?;
        let models = self.grid.models()?;
        let precisions = self.grid.precision.precisions()?;
        let mut runs = self.grid.runs(&models, &precisions, self.compile);
        for Run { run, .. } in &mut runs {
            run.warmup_steps = self.warmup_steps;
            run.seed = self.common.seed;
        }
        let all = runs.iter_mut().map(|run| &mut run.run);
        self.grid.give_memory(all, &device)?;
        self.output.check_columns([columns(&device)])?;
        let (mut rows, mut details, mut notes) = (Vec::new(), Details::default(), Vec::new());
        let mut kept = Ok(()); // a file that fails does not cost the table
        let mut sweep = Sweep::new(runs.len())?;
        let several = runs.len();
        for run in &runs {
            let title = run.title();
            if !sweep.begins(&title) {
                break;
            }
            let index = rows.len();
            let mut row = Row::of(run);
            let written = match run.is_planned() {
                true => {
                    self.run_planned(&run.run, &device, &mut row, (index, &mut details), |path| {
                        named(path, &title, several)
                    })
                }
                false => match self.run_eager(&run.run, &device, &mut row)? {
                    Some(profile) => {
                        details.add(index, &profile);
                        let said = profile.recording.notes().into_iter();
                        notes.extend(said.map(|note| format!("{title}: {note}.")));
                        self.write(&profile, &title, several)
                    }
                    None => {
                        let breakdown = run.run.estimate(&device)?.breakdown;
                        details.add_predicted(index, &breakdown);
                        Ok(())
                    }
                },
            };
            kept = kept.and(written);
            rows.push(row);
        }
        answers::compare_with_f32(&mut rows);
        let fields = rows.iter().map(Fields::of).collect::<Result<Vec<_>>>()?;
        let runs = &runs[..rows.len()]; // those before Ctrl-C
        let names = runs::names(runs);
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
        configuration.insert("optimizer", "adamw");
        configuration.insert("recorded blocks", "4096 bytes and more");
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
            details: details.into_tables(&names, runs),
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
        let profile = match run.profile_memory(device, Default::default()) {
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
        let peak_event = recording.peak_event();
        for phase in recording.phases() {
            let bytes = Some(recording.peak_bytes_in(phase));
            match phase.name {
                "forward" => row.forward_peak_bytes = bytes,
                "backward" => row.backward_peak_bytes = bytes,
                _ => row.optimizer_peak_bytes = bytes,
            }
            if row.peak_phase.is_none() && (phase.begins_at..=phase.ends_at).contains(&peak_event) {
                row.peak_phase = Some(phase.name.into());
            }
        }
        let casts = recording
            .bytes_by_kind_at(peak_event)
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
        if let Some(measured) = measured[0].fields()?.read::<Row>() {
            let both = measured.estimate_bytes.zip(measured.peak_bytes);
            let error = both.map(|(predicted, peak)| predicted as f64 / peak as f64 - 1.0);
            *row = Row {
                size: row.size.clone(),
                estimate_error_percent: error.map(|error| 100.0 * error),
                ..measured
            };
        }
        let plan = match run.plan(device) {
            Err(error) if error.is_out_of_memory() => return Ok(()),
            plan => plan?,
        };
        details.add_predicted(index, &planned_breakdown(&plan));
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
            for &batch_size in &self.grid.batch_size {
                for &length in &self.grid.context_length {
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
}

impl Row {
    /// A run's row before it is measured.
    fn of(Run { size, run }: &Run) -> Self {
        Self {
            size: size.clone(),
            batch_size: run.batch_size,
            context_length: run.sequence_length,
            attention: run.config.attention.name().into(),
            checkpointing: run.config.checkpointing.to_string(),
            precision: run.precision.name().into(),
            execution: run.execution.name().into(),
            mode: run.mode.name().into(),
            ..Default::default()
        }
    }
}
