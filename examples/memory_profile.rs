//! Profiles the memory of a step: predicted and measured, by phase and by origin, with a timeline and PyTorch's memory
//! snapshot. `--help` lists example commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

#[path = "memory_profile/answers.rs"]
mod answers;
mod common;
#[path = "memory_profile/tables.rs"]
mod tables;

use answers::Row;
use candle_core::Device;
use clap::{CommandFactory, Parser};
use common::effects::{self, Effect, only};
use common::models::describe;
use common::modes::CompileFlag;
use common::runs::{self, GridFlags};
use common::{Common, Output, Sweep, outputs, values, words};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tables::{Details, columns};
use tallow::Result;
use tallow::bench::{EndToEnd, Execution, MemoryProfile};
use tallow::memory::{Snapshot, planned_breakdown, timeline};
use tallow::report::{Answer, Fields, Report, plot};

const EXAMPLES: &str = "Examples:
  memory_profile --size 2.7b --mode forward train-step --timeline step.svg
  memory_profile --mode train-step --checkpoint none block sqrt
  memory_profile --size small --precision f32 bf16 --snapshot step.pickle";

/// Records where the memory of a step goes, by phase, kind and origin
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
#[command(mut_arg("mode", |arg| arg.default_values(["forward", "train-step"])))]
#[command(mut_arg("context_length", |arg| arg.default_values(["128", "256", "512"])))]
struct Flags {
    #[command(flatten)]
    grid: GridFlags,

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
    let flags = effects::parse(Flags::command(), Flags::effects);
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn effects(&self) -> Vec<Effect> {
        let is_eager = self.grid.has_execution(Execution::Eager);
        let mut effects = self.grid.effects();
        effects.push(only(
            "where steps run eagerly: without --compile=only",
            is_eager,
            &["snapshot"],
        ));
        effects
    }

    fn run(&self) -> Result<()> {
        if self.grid.compile == Some(CompileFlag::Only) {
            common::take_blocks_from_the_system();
        }
        self.output.check_with([&self.timeline, &self.snapshot])?;
        let device = self.common.device()?;
        let models = self.grid.models()?;
        let precisions = self.grid.precision.precisions();
        let base = EndToEnd {
            warmup_steps: self.warmup_steps,
            steps: 1,
            seed: self.common.seed,
            ..Default::default()
        };
        let mut runs = self.grid.runs(&models, &precisions, &base);
        self.grid.set_available_memory(&mut runs, &device)?;
        let names = runs::names(&runs);
        let (mut rows, mut details, mut notes) = (Vec::new(), Details::default(), Vec::new());
        let mut kept = Ok(()); // the table is printed even if a file cannot be written
        let mut sweep = Sweep::new(runs.len())?;
        for (run, name) in runs.iter().zip(&names) {
            let title = runs::title(run);
            if !sweep.begins(&title) {
                break;
            }
            let path = |path: &Path| outputs::named(path, &title, runs.len());
            let (row, written) = match run.execution {
                Execution::Planned => self.run_planned(run, name, &device, &mut details, path)?,
                Execution::Eager => {
                    let (row, profile) = run.profile_memory(&device, Default::default())?;
                    let mut written = Ok(());
                    if let Some(profile) = &profile {
                        let peak_bytes = row.peak_bytes().unwrap_or_default();
                        details.add(name, run, profile, peak_bytes);
                        let own = profile.recording.notes().into_iter();
                        notes.extend(own.map(|note| format!("{title}: {note}.")));
                        written = self.write(profile, &title, path);
                    } else {
                        let estimate = run.estimate(&device)?;
                        details.add_predicted(name, run, &estimate.breakdown);
                    }
                    (Row::new(row, profile.as_ref()), written)
                }
            };
            kept = kept.and(written);
            rows.push(row);
        }
        let mut answers = answers::answers(&rows, &names);
        let rows = rows.iter().map(Fields::of).collect::<Result<_>>()?;
        let tensors = runs.iter().map(|run| {
            let sides = [run.batch_size, run.sequence_length, run.config.d_model];
            (format!("{} ", run.size), sides)
        });
        let mut tensors: Vec<_> = tensors.collect();
        tensors.dedup();
        answers.push(words::residual_stream(4, &tensors)); // in f32
        let question = "How large are the largest allocations, and where do they come from?";
        let largest = words::listed(&details.largest_words, 6) + ".";
        if !details.largest_words.is_empty() {
            answers.push(Answer::new(question, largest));
        }
        notes.extend(self.grid.not_planned(&precisions));
        notes.push(
            "Peak is measured in one step by counting allocations. Predicted follows from sizes alone. OOM needs more \
             memory than is available."
                .into(),
        );
        notes.extend(sweep.note());
        let mut configuration = describe(&models);
        configuration.insert("optimizer", self.grid.optimizer.name());
        configuration.insert("recorded blocks", "4096 bytes and more");
        let published = self.output.publish(&Report {
            environment: self.common.environment(&device),
            configuration,
            columns: columns(),
            rows,
            answers,
            notes,
            details: details.into_tables(),
            ..Default::default()
        });
        kept.and(published)
    }

    /// Runs a planned step. Its timeline is the map of its arena.
    fn run_planned(
        &self,
        run: &EndToEnd,
        name: &str,
        device: &Device,
        details: &mut Details,
        path: impl Fn(&Path) -> PathBuf,
    ) -> Result<(Row, Result<()>)> {
        let row = Row::new(run.run(device, |_, _| ())?.swap_remove(0), None);
        let (plan, _) = match run.plan(device) {
            Err(error) if error.is_out_of_memory() => return Ok((row, Ok(()))),
            plan => plan?,
        };
        details.add_predicted(name, run, &planned_breakdown(&plan));
        let timeline = self.timeline.as_deref();
        let written = timeline.map_or(Ok(()), |timeline| plan.save_memory_map(path(timeline)));
        Ok((row, written))
    }

    /// Writes the timeline and the snapshot of an eager run.
    fn write(
        &self,
        profile: &MemoryProfile,
        title: &str,
        named: impl Fn(&Path) -> PathBuf,
    ) -> Result<()> {
        if let Some(path) = &self.timeline {
            let path = named(path);
            let mut chart = timeline(&profile.recording, title);
            let device = self.common.device()?;
            let machine = tallow::hardware::description(&device);
            chart.caption = vec![format!("{}: {machine}", self.common.device)];
            plot::save(&[chart], &path)?;
            common::wrote(&path);
        }
        if let Some(path) = &self.snapshot {
            let snapshot = Snapshot::new(&profile.recording);
            let path = named(path);
            match path.extension().is_some_and(|ending| ending == "json") {
                true => snapshot.save_json(&path)?,
                false => snapshot.save_pickle(&path)?,
            }
            common::wrote(&path);
        }
        Ok(())
    }
}
