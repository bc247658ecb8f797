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
#[path = "profile/figures.rs"]
mod figures;

use candle_core::Device;
use clap::{CommandFactory, Parser};
use common::effects::{self, Effect, names_gpu, only};
use common::labels::{Labels, label_columns};
use common::models::describe;
use common::outputs::named;
use common::runs::{self, GridFlags, title};
use common::{Common, Output, Sweep, ops, values, words, wrote};
use figures::{Floors, Profiled};
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

/// Profiles a transformer's forward, backward and optimizer, op by op
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
#[command(mut_arg("mode", |arg| arg.default_value("all")))]
#[command(mut_arg("context_length", |arg| arg.help("Tokens in a sequence; several [default: 256]")))]
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
    #[arg(long, value_parser = grouping, value_name = "NAME", help_heading = "Output")]
    by: Option<Grouping>,

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
    let mut flags = effects::parse(Flags::command(), Flags::effects);
    let grid = &mut flags.grid;
    grid.models.fill_context(&mut grid.context_length, &[256]);
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
                self.by != Some(Grouping::Kernel),
                &["floor"],
            ),
            only("with a --mode that has this phase", has_phase, &["phase"]),
        ]);
        effects
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.trace, &self.flame_graph])?;
        let device = self.common.device()?;
        if self.by == Some(Grouping::Kernel) && (self.no_kernels || !device.is_cuda()) {
            return Err(Error::Config {
                config: common::PROGRAM,
                field: "--by",
                expected: "name, path or layer, where no kernels are recorded".into(),
                got: "kernel".into(),
                hint: "kernels are recorded with --device cuda, without --no-kernels".into(),
            });
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
            environment: self.common.environment(&device),
            configuration,
            columns: summary_columns(device.is_cuda(), self.floor),
            ..Default::default()
        };
        let mut kept = Ok(()); // a file that fails does not cost the table
        let mut answers = Vec::new();
        let mut sweep = Sweep::new(runs.len())?;
        for run in &runs {
            if !sweep.begins(title(run)) {
                break;
            }
            let stopwatch = run.run(&device, |_, _| ())?;
            if stopwatch[0].status == Status::Ok {
                let recording = self.record(run, &device)?;
                kept = kept.and(self.save_pictures(run, &recording, runs.len()));
                let profiled = Profiled {
                    recording,
                    stopwatch,
                };
                answers.push((run, self.add(&mut report, run, &profiled, &device)?));
            } else {
                let mut row = labelled(run, "OOM", Fields::new());
                row.insert("estimate_bytes", stopwatch[0].estimate_bytes)
                    .insert("available_bytes", stopwatch[0].available_bytes);
                report.shown_rows.push(row.clone());
                report.rows.push(row);
            }
        }
        let names = runs::names(answers.iter().map(|(run, _)| *run));
        let is_one = answers.len() == 1;
        for ((_, own), name) in answers.into_iter().zip(names) {
            report
                .answers
                .extend(own.into_iter().map(|own| match is_one {
                    true => own,
                    false => Answer::new(format!("{} ({name})", own.question), own.answer),
                }));
        }
        report.notes.extend(self.grid.not_planned(&precisions));
        report.notes.extend(general_notes(self.reference_ops));
        report.notes.extend(words::out_of_memory(&report.rows));
        report.notes.extend(sweep.note());
        let references = match self.reference_ops {
            true => "all, as asked for".into(),
            false => common::fallbacks(),
        };
        report.environment.insert("reference ops", references);
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
        profiled: &Profiled,
        device: &Device,
    ) -> Result<Vec<Answer>> {
        let recording = &profiled.recording;
        let selection = Selection {
            phase: self.phase.clone(),
            ..Default::default()
        };
        let rates = self
            .floor
            .then(|| DeviceRates::measure(device, &recording.matmul_dtypes()));
        let rates = rates.transpose()?;
        let grouping = self
            .by
            .unwrap_or(match (self.floor, recording.kernels.is_empty()) {
                (true, _) => Grouping::Layer,
                (false, true) => Grouping::Name,
                (false, false) => Grouping::Kernel,
            });
        let report_of = |selection: &Selection| match &rates {
            Some(rates) => ProfileReport::with_floors(recording, selection, grouping, rates),
            None => ProfileReport::new(recording, selection, grouping),
        };
        let summary = match report_of(&selection) {
            // One mode has no backward, another has.
            Err(Error::Data { .. }) => {
                let phase = self.phase.as_deref().unwrap_or("a step");
                let note = format!("{}: no op of {phase} was recorded.", title(run));
                report.notes.push(note);
                return Ok(Vec::new());
            }
            summary => summary?,
        };
        for row in summary.fields() {
            report.rows.push(labelled(run, "ok", row));
        }
        let figures = profiled.figures()?;
        let mut line = labelled(run, "ok", figures.line.clone());
        let mut shown = shortened(&summary);
        let mut own_answers = answers::answers(&figures);
        if let Some(rates) = &rates {
            let floors = Floors::new(&report_of(&Selection::default())?, rates);
            line.insert("floor_ms_per_step", floors.floor_ms);
            line.insert("floor_percent", floors.percent());
            own_answers.push(answers::floor(&floors));
            shown.rows.push(shown.sum("sum", |_| true));
        }
        report.shown_rows.push(line);
        let (lines, inside) = ops::lines(&shown);
        report.details.push(Report {
            title: title(run),
            columns: summary.table().columns,
            shown_rows: lines,
            notes: inside.into_iter().collect(),
            ..Default::default()
        });
        Ok(own_answers)
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

/// Parses the value of `--by`.
fn grouping(name: &str) -> std::result::Result<Grouping, &'static str> {
    match name {
        "name" => Ok(Grouping::Name),
        "path" => Ok(Grouping::Path),
        "layer" => Ok(Grouping::Layer),
        "kernel" => Ok(Grouping::Kernel),
        _ => Err("expected name, path, layer or kernel"),
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
        let mut sum = others.sum(&format!("{} others", others.rows.len()), |_| true);
        sum.kind = others.rows[0].kind;
        shown.rows.insert(SHOWN, sum);
    }
    shown
}

/// Returns a row of the run.
fn labelled(run: &EndToEnd, status: &str, rest: Fields) -> Fields {
    let mut row = Labels::of(run).fields();
    row.insert("status", status).merge(rest);
    row
}

/// The columns of the summary, which has a line for each run.
fn summary_columns(on_gpu: bool, with_floor: bool) -> Vec<Column> {
    let percent = |key, title, under| Column::number(key, title, "", 1).group(under);
    let of_step = |key, title| percent(key, title, "% of a step");
    let of_forward = |key, title| percent(key, title, "% of forward");
    let mut columns = label_columns();
    columns.extend([
        Column::text("status", "Status"),
        Column::ms("profiled_ms_per_step", "profiler").group("Step time"),
        Column::ms("stopwatch_mean_ms", "stopwatch").group("Step time"),
        Column::ms("floor_ms_per_step", "Floor"),
        of_step("floor_percent", "floor"),
        of_step("matmul_percent", "matmul"),
        of_step("softmax_percent", "softmax"),
        of_step("gpu_idle_percent", "GPU idle"),
        of_step("ops_percent", "ops"),
        of_step("candle_percent", "between"),
        of_step("unexplained_percent", "unexplained"),
        of_forward("matmul_percent_of_forward", "matmul"),
        of_forward("softmax_percent_of_forward", "softmax"),
        Column::text("longest", "Longest"),
    ]);
    columns.retain(|column| on_gpu || column.key != "gpu_idle_percent");
    columns.retain(|column| with_floor || !column.key.starts_with("floor_"));
    columns
}

fn general_notes(reference_ops: bool) -> Vec<String> {
    let mut notes = vec![
        "An op's time is its own, without ops inside of it; percentages are of the wall time. Mean, median, min, max and \
         std are of one call; the total is over all steps.",
        "FLOPs and bytes follow from the op's formula (profile::op_costs), which moves every tensor once.",
        "between: candle's own ops and its bookkeeping of the graph, between ops of this crate.",
    ];
    notes.extend(reference_ops.then_some(
        "References' backward is candle's own and has no ranges: it counts as between. Memory estimates are those of the \
         kernels.",
    ));
    notes.into_iter().map(String::from).collect()
}
