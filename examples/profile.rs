//! Where the time of a step goes: kernels on a GPU as nsys lists them, ops on the CPU, and the answers to the
//! handout's questions.
//!
//! On NVIDIA GPUs kernels are recorded by CUPTI, a library of the CUDA toolkit, and no op waits for the GPU. A planned
//! step is replayed as CUDA graphs, as without a profiler; each kernel is assigned to the call that launched it.
//!
//! ```text
//! cargo run --example profile
//! cargo run --example profile -- --size small --context-length 128 256 512 --mode forward train-step
//! cargo run --example profile -- --phase backward --by layer
//! cargo run --example profile -- --mode forward --within attn --reference-ops
//! cargo run --example profile -- --mode train-step --trace step.json --flame-graph step.svg
//! cargo run --features cuda --example profile -- --device cuda --precision bf16 --by kernel
//! ```
//!
//! Under Nsight Systems (untried here), where `--nvtx` names the ranges; `--by name --no-kernels` leaves CUPTI to it:
//!
//! ```text
//! nsys profile -t cuda,nvtx -o step target/debug/examples/profile --device cuda --nvtx --by name --no-kernels
//! nsys stats -r cuda_gpu_kern_sum,nvtx_gpu_proj_sum step.nsys-rep
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "profile/answers.rs"]
mod answers;
#[path = "profile/apart.rs"]
mod apart;
#[path = "profile/by_part.rs"]
mod by_part;
mod common;
#[path = "profile/figures.rs"]
mod figures;
#[path = "profile/runs.rs"]
mod runs;

use clap::{Parser, ValueEnum};
use common::effects::{is_for_people, names_gpu};
use common::models::{Model, ModelFlags, describe, with_attention};
use common::modes::{CompileFlag, ModeFlag, executed, is_any, modes, not_planned};
use common::outputs::named;
use common::precision::PrecisionFlags;
use common::{Common, Effects, Output, Sweep, ops, values, words, wrote};
use figures::Profiled;
use runs::{Run, add_oom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Step};
use tallow::model::TransformerConfig;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::precision::Precision;
use tallow::profile::{self, Grouping, Profiler, Recording, Selection};
use tallow::report::{Answer, Column, Fields, Report};
use tallow::{Error, Result};

const EXAMPLES: &str = "Examples:
  profile --size small --context-length 128 256 512 --mode forward train-step
  profile --phase backward --by layer
  profile --mode train-step --trace step.json --flame-graph step.svg";

/// Profiles a transformer's forward, backward and optimizer, op by op
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
struct Flags {
    #[command(flatten)]
    models: ModelFlags,

    /// Sequences in a batch; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4", value_name = "N")]
    batch_size: Vec<usize>,

    /// Tokens in a sequence; several [default: 256]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "sequence-length")]
    context_length: Vec<usize>,

    /// naive or flash; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "naive", value_name = "NAME")]
    attention: Vec<Algorithm>,

    #[command(flatten, next_help_heading = "Run")]
    precision: PrecisionFlags,

    /// forward, forward-backward, train-step or all; several
    #[arg(long, value_enum, hide_possible_values = true, num_args = 1.., value_delimiter = ',', default_value = "all", value_name = "NAME", help_heading = "Run")]
    mode: Vec<ModeFlag>,

    /// Unrecorded steps before the recorded ones
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = values::count_from_0(), help_heading = "Run")]
    warmup_steps: usize,

    /// Recorded steps, and as many without a profiler
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = values::count(), alias = "iterations", help_heading = "Run")]
    steps: usize,

    /// Planned steps too, or alone with =only
    #[arg(long, value_enum, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_missing_value = "beside", value_name = "HOW", help_heading = "Run", conflicts_with = "reference_ops")]
    compile: Option<CompileFlag>,

    /// Compose ops of candle's own: mask and softmax apart
    #[arg(long, conflicts_with = "strict", help_heading = "Run")]
    reference_ops: bool,

    /// Wait for the GPU at each op and record no kernels
    #[arg(long, help_heading = "Run")]
    no_kernels: bool,

    /// Memory that may be used [default: what is available]
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    memory_limit_gib: Option<f64>,

    /// Rows by name, path, layer or kernel
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        value_name = "NAME",
        help_heading = "Output"
    )]
    by: Option<ByFlag>,

    /// Only ops of forward, backward or optimizer
    #[arg(long, value_parser = ["forward", "backward", "optimizer"], hide_possible_values = true, value_name = "NAME", help_heading = "Output")]
    phase: Option<String>,

    /// Only ops in this part of the model: attn, ffn/w2
    #[arg(long, value_name = "PATH", help_heading = "Output")]
    within: Option<String>,

    /// Rows that a run's table shows; 0 shows all
    #[arg(long, default_value_t = 12, value_name = "N", help_heading = "Output")]
    top: usize,

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

#[derive(Clone, Copy, ValueEnum)]
enum ByFlag {
    Name,
    Path,
    Layer,
    Kernel,
}

fn main() -> ExitCode {
    let mut flags = Flags::effects().parse();
    flags.models.fill_context(&mut flags.context_length, &[256]);
    common::run(|| {
        flags.common.around(|| match flags.reference_ops {
            true => with_kernel_policy(KernelPolicy::Reference, || flags.run()),
            false => flags.run(),
        })
    })
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only("on a GPU", &["no-kernels"], |flags| {
                names_gpu(&flags.common)
            })
            .only(
                "on a table for people: with --format text, markdown or latex",
                &["top"],
                |flags| is_for_people(flags.output.format),
            )
            .only(
                "where a step can be planned: in f32, or f32 parameters with kept copies",
                &["compile"],
                |flags| is_any(&flags.precision, flags.compile, &modes(&flags.mode), true),
            )
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.trace, &self.flame_graph])?;
        self.output.check_columns([
            summary_columns(true),
            ops::columns(),
            ops::kernel_columns(),
        ])?;
        let device = self.common.device()?;
        self.check_grouping(&device)?;
        let precisions = self.precision.precisions()?;
        let longest = self.context_length.iter().copied().max();
        let models = self
            .models
            .models(longest.unwrap_or_default(), &self.attention)?;
        let mut runs = self.sweep(&models, &precisions);
        let available_bytes = common::memory::available_bytes(
            &device,
            self.memory_limit_gib,
            runs.iter().map(|run| &run.run),
        )?;
        for run in &mut runs {
            run.run.available_bytes = available_bytes;
        }
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&models),
            columns: summary_columns(device.is_cuda()),
            ..Default::default()
        };
        let mut kept = Ok(()); // a file that fails does not cost the table
        let mut answers = Vec::new();
        let mut sweep = Sweep::new(runs.len())?;
        for run in &runs {
            if !sweep.begins(run.title()) {
                break;
            }
            match self.profiled(run, &device)? {
                Ok(profiled) => {
                    let own = self.add(&mut report, run, &profiled)?;
                    answers.push((run, own));
                    kept = kept.and(self.save_pictures(run, &profiled.recording, runs.len()));
                }
                Err(refusal) => add_oom(&mut report, run, &refusal),
            }
        }
        report.answers = named_answers(answers);
        report.notes.extend(not_planned(self.compile, &precisions));
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

    /// Refuses kernels where none are recorded.
    fn check_grouping(&self, device: &candle_core::Device) -> Result<()> {
        let has_kernels = device.is_cuda() && !self.no_kernels;
        match self.by {
            Some(ByFlag::Kernel) if !has_kernels => Err(Error::Config {
                config: common::PROGRAM,
                field: "--by",
                expected: "name, path or layer, where no kernels are recorded".into(),
                got: "kernel".into(),
                hint: "kernels are recorded with --device cuda, without --no-kernels".into(),
            }),
            _ => Ok(()),
        }
    }

    fn start(&self, device: &candle_core::Device) -> Result<Profiler> {
        match self.no_kernels {
            true => Profiler::start_waiting_for(device),
            false => Profiler::start_on(device),
        }
    }

    fn grouping(&self, recording: &Recording) -> Grouping {
        match self.by {
            Some(ByFlag::Name) => Grouping::Name,
            Some(ByFlag::Path) => Grouping::Path,
            Some(ByFlag::Layer) => Grouping::Layer,
            Some(ByFlag::Kernel) => Grouping::Kernel,
            None if recording.kernels.is_empty() => Grouping::Name,
            None => Grouping::Kernel,
        }
    }

    /// Every combination of the flags' lists.
    fn sweep(&self, models: &[Model], precisions: &[Precision]) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut add = |name: &str, config: &TransformerConfig, sizes: (usize, usize), precision| {
            for (mode, execution) in executed(self.compile, modes(&self.mode), precision) {
                let run = EndToEnd {
                    config: config.clone(),
                    batch_size: sizes.0,
                    sequence_length: sizes.1,
                    mode,
                    precision,
                    warmup_steps: self.warmup_steps,
                    steps: self.steps,
                    optimizer: Default::default(),
                    execution,
                    optimizer_in_backward: false,
                    memory_budget_bytes: None,
                    seed: self.common.seed,
                    peak_flops: None,
                    available_bytes: None,
                };
                let size = name.to_string();
                runs.push(Run { size, run });
            }
        };
        for Model { name, config } in models {
            for &sequence_length in &self.context_length {
                for &batch_size in &self.batch_size {
                    for &attention in &self.attention {
                        for &precision in precisions {
                            let config = with_attention(config, attention);
                            add(name, &config, (batch_size, sequence_length), precision);
                        }
                    }
                }
            }
        }
        runs
    }

    /// Times the run without a profiler, then with one; the row that says so if memory does not hold it.
    fn profiled(
        &self,
        run: &Run,
        device: &candle_core::Device,
    ) -> Result<std::result::Result<Profiled, Fields>> {
        let stopwatch = run.run.run(device, |_, _| ())?;
        if stopwatch[0].get("status") != Some(&"ok".into()) {
            return Ok(Err(stopwatch[0].clone()));
        }
        // Started once the warm-up is over, in the middle of the run.
        let mut profiler = match self.warmup_steps {
            0 => Some(self.start(device)),
            _ => None,
        };
        run.run.run(device, |step: Step, _| {
            if step.warmup && step.index + 1 == step.count {
                profiler = Some(self.start(device));
            }
        })?;
        let Some(profiler) = profiler else {
            return Err(candle_core::Error::msg("profile: no warm-up step was reported").into());
        };
        Ok(Ok(Profiled {
            recording: profiler?.finish()?,
            stopwatch,
            apart: match self.no_kernels {
                true => None,
                false => apart::measure(&run.run, device)?,
            },
        }))
    }

    /// Adds the run's rows, and what follows from them.
    fn add(&self, report: &mut Report, run: &Run, profiled: &Profiled) -> Result<Vec<Answer>> {
        let selection = Selection {
            phase: self.phase.clone(),
            within: self.within.clone(),
            ..Default::default()
        };
        let grouping = self.grouping(&profiled.recording);
        let summary = match profile::ProfileReport::new(&profiled.recording, &selection, grouping) {
            Ok(summary) => summary,
            // One mode has no backward, another has.
            Err(error @ Error::Data { .. }) => {
                report.notes.push(format!("{}: {error}.", run.title()));
                return Ok(Vec::new());
            }
            Err(error) => return Err(error),
        };
        let rows = summary
            .fields()
            .into_iter()
            .map(|row| run.labelled("ok", row));
        report.rows.extend(rows);
        let figures = profiled.figures()?;
        let line = Fields::of(&figures.line)?;
        report.lines.push(run.labelled("ok", line));
        report.details.push(self.table(run, &summary));
        let by_part = by_part::table(&run.title(), &profiled.recording)?;
        if !by_part.rows.is_empty() {
            report.details.push(by_part);
        }
        Ok(answers::answers(&figures))
    }

    /// A run's ops for people, the longest first.
    fn table(&self, run: &Run, summary: &profile::ProfileReport) -> Report {
        let (lines, inside) = ops::lines(&self.shown(summary));
        Report {
            title: run.title(),
            columns: match summary.rows.iter().any(|row| row.launches.is_some()) {
                true => ops::kernel_columns(),
                false => ops::columns(),
            },
            lines,
            notes: inside.into_iter().collect(),
            ..Default::default()
        }
    }

    /// The longest rows and the lines without ops; the other rows in one.
    fn shown(&self, summary: &profile::ProfileReport) -> profile::ProfileReport {
        let ops = summary.rows.iter().filter(|row| !row.is_gap()).count();
        if self.top == 0 || ops <= self.top.saturating_add(1) {
            return summary.clone();
        }
        let mut shown = summary.clone();
        let others = shown.rows.drain(self.top..ops).collect();
        let others = profile::ProfileReport {
            rows: others,
            ..Default::default()
        };
        let name = format!("{} others", others.rows.len());
        let mut sum = others.sum(&name, |_| true);
        sum.kind = others.rows.first().and_then(|row| row.kind);
        shown.rows.insert(self.top, sum);
        shown
    }

    fn save_pictures(&self, run: &Run, recording: &Recording, runs: usize) -> Result<()> {
        let own = |path: &Path| named(path, &run.title(), runs);
        if let Some(path) = &self.trace {
            recording.save_trace(own(path))?;
            wrote(&own(path));
        }
        if let Some(path) = &self.flame_graph {
            recording.save_flame_graph(own(path))?;
            wrote(&own(path));
        }
        Ok(())
    }

    fn configuration(&self, models: &[Model]) -> Fields {
        let mut fields = describe(models);
        fields.insert("optimizer", "adamw");
        fields.insert("warm-up steps", self.warmup_steps);
        fields.insert("steps", self.steps);
        fields.insert("phase", self.phase.clone());
        fields.insert("within", self.within.clone());
        fields
    }
}

/// The answers of all runs, each with its run's name if there are several.
fn named_answers(all: Vec<(&Run, Vec<Answer>)>) -> Vec<Answer> {
    let labels = all.iter().map(|(run, _)| run.labelled("ok", Fields::new()));
    let names = words::names(&labels.collect::<Vec<_>>());
    let is_one = all.len() == 1;
    let named = all.into_iter().zip(names).flat_map(|((run, own), name)| {
        let name = format!("{} {}", name.trim_start_matches("all"), run.run.mode.name());
        own.into_iter().map(move |own| match is_one {
            true => own,
            false => Answer::new(format!("{} ({})", own.question, name.trim()), own.answer),
        })
    });
    named.collect()
}

/// A line for each run.
fn summary_columns(on_gpu: bool) -> Vec<Column> {
    let percent = |key, title| Column::number(key, title, "", 1);
    let of_step = |key, title| percent(key, title).under("% of a step");
    let mut columns = vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("precision", "Precision"),
        Column::text("execution", "Execution"),
        Column::text("mode", "Mode"),
        Column::text("status", "Status"),
        Column::ms("profiled_ms_per_step", "profiler").under("A step by"),
        Column::ms("stopwatch_mean_ms", "stopwatch").under("A step by"),
        of_step("matmul_percent", "matmul"),
        of_step("softmax_percent", "softmax"),
        of_step("gpu_idle_percent", "GPU idle"),
        of_step("ops_percent", "ops").minor(3),
        of_step("candle_percent", "between").minor(4),
        of_step("unexplained_percent", "unexplained").minor(5),
        percent("matmul_percent_of_forward", "matmul")
            .under("% of forward")
            .minor(1),
        percent("softmax_percent_of_forward", "softmax")
            .under("% of forward")
            .minor(1),
        Column::text("longest", "Longest").minor(2),
    ];
    columns.retain(|column| on_gpu || column.key != "gpu_idle_percent");
    columns
}

fn general_notes(reference_ops: bool) -> Vec<String> {
    let mut notes = vec![
        "An op's time is its own, without ops inside of it; percentages are of the wall time. Mean, median, min, max and \
         std are of one call; the total is over all steps."
            .to_string(),
        "FLOPs and bytes follow from the op's formula (profile::op_costs), which moves every tensor once.".into(),
        "between: candle's own ops and its bookkeeping of the graph, between ops of this crate.".into(),
    ];
    if reference_ops {
        notes.push(
            "References' backward is candle's own and has no ranges: it counts as between. Memory estimates are those of \
             the kernels."
                .into(),
        );
    }
    notes
}
