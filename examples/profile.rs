//! Profiles a step: kernels on a GPU as nsys lists them, ops on the CPU, and the answers to the handout's questions.
//!
//! On NVIDIA GPUs kernels are recorded by CUPTI, a library of the CUDA toolkit, and no op waits for the GPU. A planned
//! step is replayed as CUDA graphs, as without a profiler; each kernel is assigned to the call that launched it.
//!
//! `--help` has commands; `examples/README.md` says how to run it under Nsight Systems.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

#[path = "profile/answers.rs"]
mod answers;
mod common;

use answers::Profiled;
use candle_core::Device;
use clap::{CommandFactory, Parser};
use common::effects::{self, Effect, names_gpu, only};
use common::labels::Labels;
use common::models::describe;
use common::outputs::named;
use common::runs::{self, GridFlags, title};
use common::{Common, Output, Sweep, ops, values, words, wrote};
use std::path::PathBuf;
use std::process::ExitCode;
use tallow::bench::{EndToEnd, Status, Step};
use tallow::memory::Mode;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::profile::{DeviceRates, Grouping, ProfileReport, Profiler, Recording, Selection};
use tallow::report::{Answer, Column, Fields, Report};
use tallow::{Error, Result};

const EXAMPLES: &str = "Examples:
  profile --size small --context-length 128 256 512 --mode forward train-step
  profile --phase backward --by layer
  profile --mode train-step --compile=only --floor
  profile --mode train-step --trace step.json --flame-graph step.svg";

const NOTES: [&str; 3] = [
    "An op's time is its own, without ops inside of it; percentages are of the wall time. Mean, median, min, max and std \
     are of one call; the total is over all steps.",
    "FLOPs and bytes follow from the op's formula (profile::op_costs), which moves every tensor once.",
    "between: candle's own ops and its bookkeeping of the graph, between ops of this crate. between calls: the time \
     between a plan's calls.",
];

const REFERENCE_NOTE: &str = "References' backward is candle's own and has no ranges: it counts as between. Memory \
                              estimates are those of the kernels.";

/// Profiles a transformer's forward, backward and optimizer, op by op
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
#[command(mut_arg("mode", |arg| arg.default_value("all")))]
struct Flags {
    #[command(flatten)]
    grid: GridFlags,

    /// Unrecorded steps before the recorded ones
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = values::count_from_0(), help_heading = "Run")]
    warmup_steps: usize,

    /// Recorded steps, and as many without a profiler
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = values::count(), alias = "iterations", help_heading = "Run")]
    steps: usize,

    /// Compose ops of candle's own: mask and softmax apart
    #[arg(long, conflicts_with_all = ["compile", "strict"], help_heading = "Run")]
    reference_ops: bool,

    /// Wait for the GPU at each op and record no kernels
    #[arg(long, help_heading = "Run")]
    no_kernels: bool,

    /// Rows by name, path, layer or kernel
    #[arg(long, value_parser = ["name", "path", "layer", "kernel"], value_name = "NAME", help_heading = "Output")]
    by: Option<String>,

    /// Compare each op with its FLOPs and bytes at measured rates
    #[arg(long, help_heading = "Output")]
    floor: bool,

    /// Only ops of forward, backward or optimizer
    #[arg(long, value_parser = ["forward", "backward", "optimizer"], value_name = "NAME", help_heading = "Output")]
    phase: Option<String>,

    /// Write a trace for ui.perfetto.dev; one file a run
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,

    /// Draw a flame graph (.svg, .png); one file a run
    #[arg(long, value_name = "FILE", value_parser = values::picture(), help_heading = "Output")]
    flame_graph: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

fn main() -> ExitCode {
    let flags = effects::parse(Flags::command(), Flags::effects);
    common::run(|| {
        flags.common.around(|| match flags.reference_ops {
            true => with_kernel_policy(KernelPolicy::Reference, || flags.run()),
            false => flags.run(),
        })
    })
}

impl Flags {
    /// Declares what the flags' effects depend on.
    fn effects(&self) -> Vec<Effect> {
        let has_phase = match self.phase.as_deref() {
            Some("backward") => self.grid.has_backward(),
            Some("optimizer") => self.grid.modes().contains(&Mode::TrainStep),
            _ => true,
        };
        let mut effects = self.grid.effects();
        effects.extend([
            only("on a GPU", names_gpu(&self.common), &["no-kernels"]),
            only(
                "on ops, which have FLOPs and bytes: without --by kernel",
                self.by.as_deref() != Some("kernel"),
                &["floor"],
            ),
            only("with a --mode that has this phase", has_phase, &["phase"]),
        ]);
        effects
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.trace, &self.flame_graph])?;
        let device = self.common.device()?;
        if self.by.as_deref() == Some("kernel") && (self.no_kernels || !device.is_cuda()) {
            return Err(common::refusal(
                "--by",
                "name, path or layer, where no kernels are recorded",
                "kernel",
                "kernels are recorded with --device cuda, without --no-kernels",
            ));
        }
        let precisions = self.grid.precision.precisions();
        let models = self.grid.models()?;
        let base = EndToEnd {
            warmup_steps: self.warmup_steps,
            steps: self.steps,
            seed: self.common.seed,
            ..Default::default()
        };
        let mut runs = self.grid.runs(&models, &precisions, &base);
        self.grid.set_available_memory(&mut runs, &device)?;
        let mut configuration = describe(&models);
        configuration.insert("optimizer", self.grid.optimizer.name());
        configuration.insert("warm-up steps", self.warmup_steps);
        configuration.insert("steps", self.steps);
        configuration.insert("phase", self.phase.clone());
        let mut report = Report {
            configuration,
            columns: columns(Vec::new()),
            ..Default::default()
        };
        let names = runs::names(&runs);
        let mut kept = Ok(()); // a file that fails does not cost the table
        let mut sweep = Sweep::new(runs.len())?;
        for (run, name) in runs.iter().zip(&names) {
            if !sweep.begins(title(run)) {
                break;
            }
            let stopwatch = run.run(&device, |_, _| ())?;
            if stopwatch[0].status == Status::Ok {
                let profiled = Profiled::new(self.record(run, &device)?, stopwatch)?;
                kept = kept.and(self.save_pictures(run, &profiled.recording, runs.len()));
                for mut answer in self.add(&mut report, run, profiled, &device)? {
                    if runs.len() > 1 {
                        answer.question += &format!(" ({name})");
                    }
                    report.answers.push(answer);
                }
            } else {
                let mut row = labelled(run, "OOM", Fields::new());
                row.insert("estimate_bytes", stopwatch[0].estimate_bytes)
                    .insert("available_bytes", stopwatch[0].available_bytes);
                report.shown_rows.push(row.clone());
                report.rows.push(row);
            }
        }
        report.notes.extend(self.grid.not_planned(&precisions));
        report.notes.extend(NOTES.map(String::from));
        report.environment = self.common.environment(&device);
        if self.reference_ops {
            report.notes.push(REFERENCE_NOTE.into());
            report
                .environment
                .insert("reference ops", "all, as asked for");
        }
        report.notes.extend(words::out_of_memory(&report.rows));
        report.notes.extend(sweep.note());
        let published = self.output.publish(&report);
        kept.and(published)
    }

    /// Runs with a profiler, which starts once the warm-up is over.
    fn record(&self, run: &EndToEnd, device: &Device) -> Result<Recording> {
        let start = || match self.no_kernels {
            true => Profiler::start_waiting_for(device),
            false => Profiler::start_on(device),
        };
        let mut profiler = (self.warmup_steps == 0).then(start);
        run.run(device, |step: Step, _| {
            if step.warmup && step.index + 1 == step.count {
                profiler = Some(start());
            }
        })?;
        profiler.unwrap_or_else(start)?.finish()
    }

    /// Adds the run's rows, and returns what they answer.
    fn add(
        &self,
        report: &mut Report,
        run: &EndToEnd,
        mut profiled: Profiled,
        device: &Device,
    ) -> Result<Vec<Answer>> {
        let recording = &profiled.recording;
        let grouping = match self.by.as_deref() {
            Some("path") => Grouping::Path,
            Some("layer") => Grouping::Layer,
            Some("kernel") => Grouping::Kernel,
            None if self.floor => Grouping::Layer,
            None if !recording.kernels.is_empty() => Grouping::Kernel,
            _ => Grouping::Name,
        };
        let rates = match self.floor {
            true => Some(DeviceRates::measure(device, &recording.matmul_dtypes())?),
            false => None,
        };
        let report_of = |selection: &Selection| match &rates {
            Some(rates) => ProfileReport::with_floors(recording, selection, grouping, rates),
            None => ProfileReport::new(recording, selection, grouping),
        };
        let selection = Selection {
            phase: self.phase.clone(),
            ..Default::default()
        };
        let rows = match report_of(&selection) {
            // One mode has no backward, another has.
            Err(Error::Data { .. }) => {
                let phase = self.phase.as_deref().unwrap_or("a step");
                let note = format!("{}: no op of {phase} was recorded.", title(run));
                report.notes.push(note);
                return Ok(Vec::new());
            }
            rows => rows?,
        };
        for row in rows.fields() {
            report.rows.push(labelled(run, "ok", row));
        }
        let mut shown = shortened(&rows);
        if self.floor {
            shown.rows.push(shown.sum("sum", |_| true));
            let whole = report_of(&Selection::default())?;
            profiled.floors = rates.map(|rates| (whole, rates));
        }
        let (own, line) = profiled.summary();
        report.shown_rows.push(labelled(run, "ok", line));
        report.columns = columns(own);
        let (lines, inside) = ops::lines(&shown);
        report.details.push(Report {
            title: title(run),
            columns: rows.table().columns,
            shown_rows: lines,
            notes: inside.into_iter().collect(),
            ..Default::default()
        });
        Ok(answers::answers(&profiled))
    }

    fn save_pictures(&self, run: &EndToEnd, recording: &Recording, runs: usize) -> Result<()> {
        let own = |path: &PathBuf| named(path, &title(run), runs);
        if let Some(path) = self.trace.as_ref().map(own) {
            recording.save_trace(&path)?;
            wrote(&path);
        }
        if let Some(path) = self.flame_graph.as_ref().map(own) {
            recording.save_flame_graph(&path)?;
            wrote(&path);
        }
        Ok(())
    }
}

/// Returns the longest ops, the other ops in one row, and the lines without ops.
fn shortened(summary: &ProfileReport) -> ProfileReport {
    const SHOWN: usize = 12;
    let ops = summary.rows.iter().filter(|row| !row.is_gap()).count();
    let mut shown = summary.clone();
    if ops > SHOWN + 1 {
        let others = ProfileReport {
            rows: shown.rows.drain(SHOWN..ops).collect(),
            ..Default::default()
        };
        let name = format!("{} others", others.rows.len());
        shown.rows.insert(SHOWN, others.sum(&name, |_| true));
    }
    shown
}

/// Returns a row of the run.
fn labelled(run: &EndToEnd, status: &str, rest: Fields) -> Fields {
    let mut row = Labels::of(run).fields();
    row.insert("status", status).merge(rest);
    row
}

/// The columns of the table of runs: labels, status, and those of a run's summary.
fn columns(own: Vec<Column>) -> Vec<Column> {
    let status = Column::text("status", "Status");
    [words::label_columns(), vec![status], own].concat()
}
