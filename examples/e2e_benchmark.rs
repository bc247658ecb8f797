//! Times a transformer's forward, backward and optimizer, by preset or by sizes, with throughput and memory.
//!
//! ```text
//! cargo run --example e2e_benchmark
//! cargo run --example e2e_benchmark -- --size small medium --context-length 128 256
//! cargo run --example e2e_benchmark -- --size small --mode train-step --warmup-steps 0,1,2,5 --isolate
//! cargo run --example e2e_benchmark -- --size small --context-length 512 1024 --attention naive flash
//! cargo run --example e2e_benchmark -- --size small --precision f32 bf16
//! cargo run --example e2e_benchmark -- --size small --compile
//! cargo run --example e2e_benchmark -- --size small --mode train-step --compile=only --memory-budget-gib 1.2
//! cargo run --example e2e_benchmark -- --size small --mode train-step --checkpoint none block every-3 sqrt
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "e2e_benchmark/answers.rs"]
mod answers;
mod common;
#[path = "e2e_benchmark/isolated.rs"]
mod isolated;
#[path = "e2e_benchmark/summary.rs"]
mod summary;
#[path = "e2e_benchmark/warmup.rs"]
mod warmup;

use candle_core::DType;
use clap::{Parser, ValueEnum};
use common::models::{Model, ModelFlags, VariantFlags, describe};
use common::modes::{
    CompileFlag, ModeFlag, check_planned_flags, executed, is_any, modes, not_planned,
    optimizer_words,
};
use common::precision::PrecisionFlags;
use common::{Common, Effects, Output, Sweep, phases, stdout, values, words};
use std::process::ExitCode;
use summary::Compared;
use tallow::bench::{EndToEnd, Step};
use tallow::memory::Mode;
use tallow::model::{TransformerConfig, flops};
use tallow::optim::{AdamWConfig, Moments};
use tallow::precision::Precision;
use tallow::report::{Answer, Fields, Format, Report, counted};
use tallow::{Result, hardware};

const EXAMPLES: &str = "Examples:
  e2e_benchmark --size small medium --context-length 128 256
  e2e_benchmark --size small --mode train-step --warmup-steps 0,1,2,5 --isolate
  e2e_benchmark --size small --compile";

/// Times a transformer's forward, backward and optimizer, with throughput and memory
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

    /// forward, forward-backward, train-step, all; several
    #[arg(long, value_enum, hide_possible_values = true, num_args = 1.., value_delimiter = ',', default_value = "all", value_name = "NAME", help_heading = "Run")]
    mode: Vec<ModeFlag>,

    /// Unmeasured steps before the measured ones; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "5", value_name = "N", value_parser = values::count_from_0(), help_heading = "Run")]
    warmup_steps: Vec<usize>,

    /// Measured steps
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = values::count(), alias = "iterations", help_heading = "Run")]
    steps: usize,

    /// Run each configuration in a new process
    #[arg(long, conflicts_with = "per_step", help_heading = "Run")]
    isolate: bool,

    /// The number of the run that such a process does
    #[arg(long, hide = true)]
    isolated_run: Option<usize>,

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

    /// Planned steps too, or alone with =only
    #[arg(long, value_enum, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_missing_value = "beside", value_name = "HOW", help_heading = "Run")]
    compile: Option<CompileFlag>,

    /// Most memory of a planned step's arena
    #[arg(long, requires = "compile", value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    memory_budget_gib: Option<f64>,

    /// Planned steps update parameters in backward
    #[arg(long, requires = "compile", help_heading = "Run")]
    optimizer_in_backward: bool,

    /// Memory that may be used [default: what is available]
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    memory_limit_gib: Option<f64>,

    /// summary, or phases: all statistics of each phase
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        default_value = "summary",
        value_name = "NAME",
        help_heading = "Output"
    )]
    view: View,

    /// Print the time of each step
    #[arg(long, help_heading = "Output")]
    per_step: bool,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum OptimizerFlag {
    Adamw,
    AdamwBf16,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum View {
    Summary,
    Phases,
}

fn main() -> ExitCode {
    let mut flags = Flags::effects().parse();
    flags.models.fill_context(&mut flags.context_length, &[256]);
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only("in a training step", &["optimizer"], |flags| {
                flags.modes().contains(&Mode::TrainStep)
            })
            .only(
                "where a step can be planned: in f32, or f32 parameters with kept copies",
                &["compile"],
                |flags| is_any(&flags.precision, flags.compile, &flags.modes(), true),
            )
    }

    fn run(&self) -> Result<()> {
        if self.compile == Some(CompileFlag::Only) {
            common::take_blocks_from_the_system();
        }
        self.output.check_with([])?;
        let device = self.common.device()?;
        let precisions = self.precision.precisions()?;
        let is_any_given = self.memory_budget_gib.is_some() || self.optimizer_in_backward;
        check_planned_flags(is_any_given, self.compile, &self.modes(), &precisions)?;
        let longest = self.context_length.iter().copied().max();
        let models = self
            .models
            .models(longest.unwrap_or_default(), &self.variants.attention)?;
        let mut runs: Vec<(&str, EndToEnd)> = Vec::new();
        for Model { name, config } in &models {
            let own = self.runs(config, &precisions).into_iter();
            runs.extend(own.map(|run| (name.as_str(), run)));
        }
        if let Some(index) = self.isolated_run {
            runs = runs.into_iter().skip(index).take(1).collect();
        }
        if !self.isolate {
            let all = runs.iter().map(|(_, run)| run);
            let available_bytes =
                common::memory::available_bytes(&device, self.memory_limit_gib, all)?;
            runs.iter_mut()
                .for_each(|(_, run)| run.available_bytes = available_bytes);
        }
        if self.isolated_run.is_some() {
            let rows = runs.iter().map(|(_, run)| run.run(&device, |_, _| ()));
            return isolated::answer(&rows.collect::<Result<Vec<_>>>()?.concat());
        }
        let compared = self.compared(&precisions);
        let columns = compared.columns(models.len() > 1, self.is_about_warmup());
        self.output.check_columns([columns.clone()])?;
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&models),
            columns,
            ..Default::default()
        };
        // New processes would find the machine warm from this measurement.
        let mut peak_flops = match self.isolate {
            true => None,
            false => hardware::measure_peak_flops(&device, DType::F32),
        };
        let mut sweep = Sweep::new(runs.len())?;
        for (i, (name, run)) in runs.iter_mut().enumerate() {
            let title = title(name, run);
            if !sweep.begins(&title) {
                break;
            }
            if self.per_step {
                self.per_step_line(&title);
            }
            run.peak_flops = peak_flops;
            let mut rows = match self.isolate {
                true => isolated::run(i)?,
                false => run.run(&device, |step, ms| self.on_step(step, ms))?,
            };
            if let Some(update) = phases::update(&rows) {
                rows.insert(rows.len() - 1, update);
            }
            report.rows.extend(rows.into_iter().map(|row| {
                let mut labelled = Fields::from_iter([("size", *name)]);
                labelled.merge(row);
                labelled.insert("device", self.common.device.as_str());
                labelled
            }));
            report.lines = compared.lines(&report.rows);
            self.output.save_so_far(&report)?;
        }
        if self.isolate {
            peak_flops = hardware::measure_peak_flops(&device, DType::F32);
            for row in &mut report.rows {
                let rate = row.get("flops_per_s").and_then(|rate| rate.as_f64());
                let mfu = rate.zip(peak_flops).map(|(rate, peak)| 100.0 * rate / peak);
                row.insert("mfu_percent", mfu);
            }
            report.lines = compared.lines(&report.rows);
        }
        let peak = peak_flops.map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9));
        report.configuration.insert("peak for MFU", peak);
        report
            .environment
            .insert("reference ops", common::fallbacks());
        report.notes = self.notes(&precisions);
        report.notes.extend(words::out_of_memory(&report.rows));
        report.notes.extend(sweep.note());
        report.answers = self.answers(&report.rows, &compared);
        self.output.publish(&report)
    }

    fn is_about_warmup(&self) -> bool {
        self.isolate || self.warmup_steps.len() > 1
    }

    /// Executions or precisions, next to each other.
    fn compared(&self, precisions: &[Precision]) -> Compared {
        let mut executions: Vec<String> = Vec::new();
        for precision in precisions {
            for (_, execution) in executed(self.compile, self.modes(), *precision) {
                let name = execution.name().to_string();
                if !executions.contains(&name) {
                    executions.push(name);
                }
            }
        }
        let precisions = precisions.iter().map(|p| p.name().to_string());
        Compared::new(executions, precisions.collect(), self.view == View::Phases)
    }

    /// How the table is read.
    fn notes(&self, precisions: &[Precision]) -> Vec<String> {
        let modes = self.modes();
        let mut notes = vec![format!(
            "Times are mean ± standard deviation of {}. Speed-ups and ratios are ratios of means; unclear: their two \
             standard errors exceed 20%.",
            counted(self.steps, "step")
        )];
        if modes.contains(&Mode::ForwardBackward) || modes.contains(&Mode::TrainStep) {
            notes.push(
                "Forward alone computes no loss and records no graph; in the other modes it does both. F+B is forward, loss and backward. B+O is backward and optimizer."
                    .into(),
            );
        }
        if modes.len() > 1 {
            notes.push(
                "Memory and tokens/s are of the longest mode in the line, for instance of the training step."
                    .into(),
            );
        }
        if precisions.iter().any(|p| *p != Precision::F32) {
            notes.push("MFU is relative to the peak in f32, whatever the precision.".into());
        }
        notes.extend(not_planned(self.compile, precisions));
        notes
    }

    /// What the rows say about the handout's questions.
    fn answers(&self, rows: &[Fields], compared: &Compared) -> Vec<Answer> {
        let question = match compared.field {
            "execution" => "How do planned steps compare with eager ones?",
            _ => "What does half precision change?",
        };
        let all = compared.measured(rows);
        let mut answers = answers::answers(&all, compared.is_any().then_some(question));
        if self.is_about_warmup() {
            answers.extend(warmup::answers(&all, self.isolate));
        }
        answers
    }

    /// Every combination of the flags' lists for one model.
    fn runs(&self, config: &TransformerConfig, precisions: &[Precision]) -> Vec<EndToEnd> {
        let budget = self.memory_budget_gib.map(common::gib_bytes);
        let mut runs = Vec::new();
        for &sequence_length in &self.context_length {
            for &batch_size in &self.batch_size {
                for config in self.variants.variants(config) {
                    for &precision in precisions {
                        for &warmup_steps in &self.warmup_steps {
                            for (mode, execution) in executed(self.compile, self.modes(), precision)
                            {
                                let is_planned = execution.is_planned_step(mode);
                                runs.push(EndToEnd {
                                    config: config.clone(),
                                    batch_size,
                                    sequence_length,
                                    mode,
                                    precision,
                                    warmup_steps,
                                    steps: self.steps,
                                    optimizer: self.optimizer(),
                                    execution,
                                    optimizer_in_backward: self.optimizer_in_backward && is_planned,
                                    memory_budget_bytes: budget.filter(|_| is_planned),
                                    seed: self.common.seed,
                                    ..Default::default()
                                });
                            }
                        }
                    }
                }
            }
        }
        runs
    }

    fn modes(&self) -> Vec<Mode> {
        modes(&self.mode)
    }

    fn optimizer(&self) -> AdamWConfig {
        let seed = self.common.seed;
        AdamWConfig {
            moments: match self.optimizer {
                OptimizerFlag::Adamw => Moments::Wide,
                OptimizerFlag::AdamwBf16 => Moments::Bf16 { seed },
            },
            ..Default::default()
        }
    }

    fn configuration(&self, models: &[Model]) -> Fields {
        let name = match self.optimizer {
            OptimizerFlag::Adamw => "adamw",
            OptimizerFlag::AdamwBf16 => "adamw-bf16",
        };
        let optimizer = optimizer_words(name, self.optimizer_in_backward);
        let mut fields = describe(models);
        fields
            .insert("optimizer", optimizer)
            .insert("steps", self.steps)
            .insert("FLOPs", flops::FORMULA);
        fields
    }

    fn on_step(&self, step: Step, ms: f64) {
        if self.per_step {
            self.per_step_line(&format!("    {step}: {ms:.2} ms"));
        }
    }

    /// Prints a line to stdout with the text report; in other formats stdout holds the document alone.
    fn per_step_line(&self, line: &str) {
        if self.output.format != Format::Text {
            return common::say_aside(line);
        }
        let written = stdout::or_files(stdout::line(line), self.output.output.is_some());
        if let Err(error) = written {
            common::end(&error);
        }
    }
}

/// A run's name in progress and above its steps.
fn title(name: &str, run: &EndToEnd) -> String {
    format!(
        "{name}, batch {}, context {}, {} attention, checkpointing {}, {}, {}, {}, warm-up {}",
        run.batch_size,
        run.sequence_length,
        run.config.attention,
        run.config.checkpointing,
        run.precision,
        run.execution.name(),
        run.mode.name(),
        run.warmup_steps
    )
}
