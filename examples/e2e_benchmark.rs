//! Times a transformer's forward, backward and optimizer, by preset or by sizes, with throughput and memory.
//!
//! ```text
//! cargo run --example e2e_benchmark
//! cargo run --example e2e_benchmark -- --size tiny small --context-length 128 256 --mode all
//! cargo run --example e2e_benchmark -- --size small --mode train-step --warmup-steps 0,1,2,5 --isolate
//! cargo run --example e2e_benchmark -- --size small --mode train-step --per-step
//! cargo run --example e2e_benchmark -- --size small --context-length 512 1024 --attention naive flash
//! cargo run --example e2e_benchmark -- --size small --precision f32 bf16
//! cargo run --example e2e_benchmark -- --size tiny small --compile
//! cargo run --example e2e_benchmark -- --size small --mode train-step --compile --optimizer-in-backward
//! cargo run --example e2e_benchmark -- --size small --mode train-step --compile=only --memory-budget-gib 1.2
//! cargo run --example e2e_benchmark -- --size small --mode train-step --checkpoint none block every-3 sqrt
//! cargo run --example e2e_benchmark -- --precision f32 bf16 f16 --full-half
//! cargo run --example e2e_benchmark -- --d-model 256 --d-ff 704 --num-layers 4 --num-heads 8 --format json
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "e2e_benchmark/isolated.rs"]
mod isolated;
#[path = "e2e_benchmark/summary.rs"]
mod summary;
#[path = "e2e_benchmark/warmup.rs"]
mod warmup;

use clap::{Parser, ValueEnum};
use common::models::{Model, ModelFlags, VariantFlags, describe};
use common::modes::{
    CompileFlag, ModeFlag, check_planned_flags, executed, execution_words, is_any, modes_with,
    not_planned, optimizer_words,
};
use common::precision::PrecisionFlags;
use common::{Common, Effects, Output, phases, stdout, values, words};
use std::process::ExitCode;
use summary::Compared;
use tallow::Result;
use tallow::bench::{EndToEnd, OptimizerChoice, Step};
use tallow::memory::Mode;
use tallow::model::{TransformerConfig, flops};
use tallow::optim::{AdamWConfig, Moments};
use tallow::precision::Precision;
use tallow::report::{Column, Fields, Format, Report, counted};

/// Times a transformer's forward, backward and optimizer, with throughput and memory.
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

    #[command(flatten)]
    variants: VariantFlags,

    #[command(flatten)]
    precision: PrecisionFlags,

    /// How much of a training step; several allowed
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "all")]
    mode: Vec<ModeFlag>,

    /// Steps that are run and not counted; several allowed, to see what they change
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "5", value_parser = values::count_from_0())]
    warmup_steps: Vec<usize>,

    /// Steps that are measured
    #[arg(long, default_value_t = 10, value_parser = values::count())]
    steps: usize,

    /// The optimizer of a training step
    #[arg(long, value_enum, default_value = "adamw")]
    optimizer: OptimizerFlag,

    /// Its learning rate
    #[arg(long, default_value_t = 1e-3, value_parser = values::from_0)]
    lr: f64,

    /// Run each as planned beforehand too, or with =only alone (on the CPU or a CUDA GPU)
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "beside")]
    compile: Option<CompileFlag>,

    /// The most that the arena of a planned train step may take, in GiB: backward runs again what does not fit, as
    /// little as will do
    #[arg(long, requires = "compile", value_parser = values::gib)]
    memory_budget_gib: Option<f64>,

    /// Update each parameter in backward, as soon as its gradient is there, in the train steps that are planned
    #[arg(long, requires = "compile")]
    optimizer_in_backward: bool,

    /// Keep the graph of a forward alone, as training would
    #[arg(long)]
    keep_graph: bool,

    /// What the table shows: a line for each configuration, or a row for each of its phases. CSV and JSON have the rows
    #[arg(long, value_enum, default_value = "summary")]
    view: View,

    /// Print each step's time
    #[arg(long)]
    per_step: bool,

    /// Run each configuration in a process of its own, so that its first step is cold
    #[arg(long, conflicts_with = "per_step")]
    isolate: bool,

    /// What such a process is told: the number of its run
    #[arg(long, hide = true)]
    isolated_run: Option<usize>,

    /// The memory that may be used, in GiB, instead of what is available
    #[arg(long, value_parser = values::gib)]
    memory_limit_gib: Option<f64>,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, ValueEnum)]
enum OptimizerFlag {
    /// This crate's, in place
    Adamw,
    /// This crate's, with running means in bf16: 4 bytes a parameter in place of 8
    AdamwBf16,
    /// candle_nn's, to compare
    CandleAdamw,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum View {
    /// Phases side by side: mean ± standard deviation, ratio, peak; what is compared with its speed-up
    Summary,
    /// Each phase with its statistics, rates and memory
    Phases,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            .of_output(|flags| &flags.output)
            .only("in a training step", &["optimizer", "lr"], |flags| {
                flags.modes().contains(&Mode::TrainStep)
            })
            .only("on a forward alone", &["keep-graph"], |flags| {
                flags.modes().contains(&Mode::ForwardKeepingGraph)
            })
            .only(
                "where a step can be planned: in f32, or f32 parameters with kept copies; not a kept graph",
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
        let sweep = |available_bytes, peak_flops| {
            let runs = models.iter().flat_map(|Model { name, config }| {
                let runs = self.sweep(config, &precisions, available_bytes, peak_flops);
                runs.into_iter().map(move |run| (name.as_str(), run))
            });
            runs.collect::<Vec<(&str, EndToEnd)>>()
        };
        let available_to = |runs: &[(&str, EndToEnd)]| {
            let runs = runs.iter().map(|(_, run)| run);
            common::memory::available_bytes(&device, self.memory_limit_gib, runs)
        };
        if let Some(index) = self.isolated_run {
            let Some((name, run)) = sweep(None, None).into_iter().nth(index) else {
                return Ok(());
            };
            let run = EndToEnd {
                available_bytes: available_to(&[(name, run.clone())])?,
                ..run
            };
            return isolated::answer(&run.run(&device, |_, _| ())?);
        }
        let available_bytes = match self.isolate {
            true => None, // each process asks for itself
            false => available_to(&sweep(None, None))?,
        };
        let compared = self.compared(&precisions);
        let is_about_warmup = self.isolate || self.warmup_steps.len() > 1;
        let columns = match self.view {
            View::Summary => compared.columns(models.len() > 1, is_about_warmup),
            View::Phases => columns(&device),
        };
        self.output.check_columns([columns.clone()])?;
        let measure_peak =
            || tallow::hardware::measure_peak_flops(&device, candle_core::DType::F32);
        // After runs in processes of their own, which would find the machine warm.
        let mut peak_flops = if self.isolate { None } else { measure_peak() };
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&models, &precisions, peak_flops),
            columns,
            notes: self.notes(&precisions),
            ..Default::default()
        };
        for (i, (name, run)) in sweep(available_bytes, peak_flops).into_iter().enumerate() {
            let title = format!(
                "{name}, batch {}, context {}, {} attention, checkpointing {}, {}, {}, {}, warm-up {}",
                run.batch_size,
                run.sequence_length,
                run.config.attention,
                run.config.checkpointing,
                run.precision,
                run.execution.name(),
                run.mode.name(),
                run.warmup_steps
            );
            common::progress(&title);
            self.announce(&title);
            let rows = match self.isolate {
                true => isolated::run(i)?,
                false => run.run(&device, |step, ms| self.on_step(step, ms))?,
            };
            let reason = rows.first().and_then(|row| row.get("reason")?.as_str());
            let reason = reason.map(|reason| format!("{title}: out of memory: {reason}."));
            report.notes.extend(reason);
            report.rows.extend(rows.into_iter().map(|row| {
                let mut labelled = Fields::from_iter([("size", name)]);
                labelled.merge(row);
                labelled.insert("device", self.common.device.as_str());
                labelled
            }));
            if self.view == View::Summary {
                report.lines = compared.lines(&report.rows);
                report.details = compared.details(&report.rows, phases::table);
            }
            self.output.save_so_far(&report)?;
        }
        if self.isolate {
            peak_flops = measure_peak();
            for row in &mut report.rows {
                let rate = row.get("flops_per_s").and_then(|rate| rate.as_f64());
                let mfu = rate.zip(peak_flops).map(|(rate, peak)| 100.0 * rate / peak);
                row.insert("mfu_percent", mfu);
            }
            if self.view == View::Summary {
                report.lines = compared.lines(&report.rows);
            }
            report.configuration = self.configuration(&models, &precisions, peak_flops);
        }
        if peak_flops.is_some() && precisions.iter().any(|p| *p != Precision::F32) {
            let note = "MFU is against the peak in f32, whatever the precision.";
            report.notes.push(note.into());
        }
        if is_about_warmup {
            let names = words::names(&report.rows);
            report.notes.extend(warmup::notes(&report.rows, &names));
        }
        report
            .environment
            .insert("reference ops", common::fallbacks());
        report.notes.extend(words::out_of_memory(&report.rows));
        report.notes.extend(words::noisy(&report.rows));
        self.output.publish(&report)
    }

    /// Executions or precisions, side by side.
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
        Compared::new(executions, precisions.collect())
    }

    /// How the table is read.
    fn notes(&self, precisions: &[Precision]) -> Vec<String> {
        let modes = self.modes();
        let steps = counted(self.steps, "step");
        let mut notes = vec![match self.view {
            View::Summary => format!(
                "Times are mean ± standard deviation of {steps}, speed-ups and ratios those of means."
            ),
            View::Phases => format!("Each phase is timed itself, over {steps}."),
        }];
        let has_both = modes.contains(&Mode::ForwardBackward);
        if self.view == View::Summary && has_both {
            let ratio = match modes.first() {
                Some(Mode::Forward) => {
                    "; the ratio is F+B over Forward, which is without a graph and loss"
                }
                _ => "",
            };
            notes.push(format!("F+B is forward, loss and backward{ratio}."));
        }
        let has_forward = modes
            .iter()
            .any(|mode| matches!(mode, Mode::Forward | Mode::ForwardKeepingGraph));
        if self.view == View::Summary && !has_forward {
            notes.push("Forward is that of F+B or of the step, with its loss.".into());
        }
        if modes
            .iter()
            .any(|mode| matches!(mode, Mode::ForwardBackward | Mode::TrainStep))
        {
            notes.push(match self.view {
                View::Summary => "Memory and tokens/s are those of the longest of the modes, backward too.".into(),
                View::Phases => {
                    "In forward-backward and train-step, forward includes the loss; peaks and estimates are the \
                     whole mode's."
                        .into()
                }
            });
        }
        notes.extend(not_planned(self.compile, precisions));
        notes
    }

    /// Every combination of the flags' lists for one model.
    fn sweep(
        &self,
        config: &TransformerConfig,
        precisions: &[Precision],
        available_bytes: Option<u64>,
        peak_flops: Option<f64>,
    ) -> Vec<EndToEnd> {
        let budget = self.memory_budget_gib.map(common::gib_bytes);
        let mut runs = Vec::new();
        for &sequence_length in &self.context_length {
            for &batch_size in &self.batch_size {
                for config in self.variants.variants(config) {
                    for &precision in precisions {
                        for &warmup_steps in &self.warmup_steps {
                            for (mode, execution) in executed(self.compile, self.modes(), precision)
                            {
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
                                    optimizer_in_backward: self.optimizer_in_backward
                                        && execution.is_planned_step(mode),
                                    memory_budget_bytes: budget
                                        .filter(|_| execution.is_planned_step(mode)),
                                    seed: self.common.seed,
                                    peak_flops,
                                    available_bytes,
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
        let forward = match self.keep_graph {
            true => Mode::ForwardKeepingGraph,
            false => Mode::Forward,
        };
        modes_with(forward, &self.mode)
    }

    fn optimizer(&self) -> OptimizerChoice {
        let config = AdamWConfig {
            lr: self.lr,
            ..Default::default()
        };
        match self.optimizer {
            OptimizerFlag::Adamw => OptimizerChoice::AdamW(config),
            OptimizerFlag::AdamwBf16 => OptimizerChoice::AdamW(AdamWConfig {
                moments: Moments::Bf16 {
                    seed: self.common.seed,
                },
                ..config
            }),
            OptimizerFlag::CandleAdamw => OptimizerChoice::CandleAdamW(config),
        }
    }

    fn configuration(
        &self,
        models: &[Model],
        precisions: &[Precision],
        peak_flops: Option<f64>,
    ) -> Fields {
        let mut fields = describe(models);
        let mut parameters: Vec<&str> = Vec::new();
        for precision in precisions {
            let dtype = precision.parameter_dtype().as_str();
            if !parameters.contains(&dtype) {
                parameters.push(dtype);
            }
        }
        fields.insert("parameters", parameters.join(", "));
        let precisions: Vec<&str> = precisions.iter().map(|p| p.name()).collect();
        fields.insert("precision", precisions.join(", "));
        let attention: Vec<&str> = self.variants.attention.iter().map(|a| a.name()).collect();
        fields.insert("attention", attention.join(", "));
        let checkpointing: Vec<String> = self
            .variants
            .checkpoint
            .iter()
            .map(|c| c.to_string())
            .collect();
        fields.insert("checkpointing", checkpointing.join(", "));
        fields.insert("execution", execution_words(self.compile));
        fields.insert(
            "optimizer",
            optimizer_words(self.optimizer().name(), self.optimizer_in_backward),
        );
        fields.insert("steps", self.steps);
        fields.insert("FLOPs", flops::FORMULA);
        fields.insert(
            "peak for MFU",
            peak_flops.map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9)),
        );
        fields
    }

    fn announce(&self, title: &str) {
        if self.per_step {
            self.per_step_line(title);
        }
    }

    fn on_step(&self, step: Step, ms: f64) {
        if self.per_step {
            self.per_step_line(&format!("    {step}: {ms:.2} ms"));
        }
    }

    /// To stdout with the text report; elsewhere stdout is the document's alone.
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

fn columns(device: &candle_core::Device) -> Vec<Column> {
    // What the process holds beside tensors; on a GPU, what its pool does.
    let held = match device.is_cpu() {
        true => Column::mib("resident_peak_bytes", "Resident peak").minor(6),
        false => Column::mib("reserved_peak_bytes", "Reserved peak").minor(2),
    };
    vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("checkpointing", "Checkpointing"),
        Column::text("execution", "Execution"),
        Column::text("precision", "Precision"),
        Column::text("warmup_steps", "Warm-up"),
        Column::text("mode", "Mode"),
        Column::text("phase", "Phase"),
        Column::text("graph", "Graph").minor(6),
        Column::text("status", "Status"),
        Column::ms("mean_ms", "Mean"),
        Column::ms("std_ms", "Std"),
        Column::ms("first_step_ms", "First step").minor(4),
        Column::ms("min_ms", "Min").minor(4),
        Column::ms("max_ms", "Max").minor(4),
        Column::ms("median_ms", "Median").minor(3),
        Column::number("cv_percent", "CV", "%", 1).minor(3),
        Column::count("tokens_per_s", "Tokens/s").minor(2),
        Column::number("flops_per_s", "Rate", "GFLOP/s", 1)
            .scaled(1e9)
            .minor(5),
        Column::number("mfu_percent", "MFU", "%", 1).minor(5),
        Column::mib("peak_bytes", "Peak").minor(2),
        Column::mib("allocated_bytes", "After the step").minor(6),
        held,
        Column::mib("estimate_bytes", "Estimate").minor(7),
        Column::mib("available_bytes", "Available").minor(8),
    ]
}
