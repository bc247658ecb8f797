//! Compares what is planned (compiled for its shape before it runs) with what is run eagerly: attention over a grid,
//! and whole models. `--help` has commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "attention_benchmark/answers.rs"]
#[allow(dead_code)] // of attention_benchmark
mod answers;
mod common;
#[path = "compiled_benchmark/compared.rs"]
mod compared;
#[path = "compiled_benchmark/configurations.rs"]
mod configurations;
#[path = "attention_benchmark/implementation.rs"]
#[allow(dead_code)]
mod implementation;
#[path = "attention_benchmark/measured.rs"]
#[allow(dead_code)]
mod measured;
#[path = "compiled_benchmark/model.rs"]
mod model;
#[path = "compiled_benchmark/why.rs"]
mod why;

use candle_core::{DType, Device};
use clap::{Parser, ValueEnum};
use common::values::TimeBudget;
use common::{Common, Effects, Output, Sweep, values, words};
use configurations::{Configuration, PRESETS, SEED};
use implementation::Implementation;
use measured::Measured;
use std::process::ExitCode;
use tallow::attention::{Algorithm, Mask};
use tallow::bench::{AttentionRun, Sampling};
use tallow::compile::StepConfig;
use tallow::memory::AttentionWorkload;
use tallow::precision::Precision;
use tallow::report::{Fields, Format, Report};
use tallow::{Error, Result};

const EXAMPLES: &str = "Examples:
  compiled_benchmark --part attention --context-length 512 2048 --head-dim 64
  compiled_benchmark --part model --config 4-256-256-4-8 4-512-512-6-8 --vocab-size 10000
  compiled_benchmark --part model --size small --precision bf16 --format json --output small.json";

/// Compares planned (compiled) with eager: attention, and whole models
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Measurement")]
struct Flags {
    /// attention, model; several
    #[arg(
        long,
        value_enum,
        num_args = 1..,
        value_delimiter = ',',
        default_value = "attention,model",
        hide_possible_values = true,
        value_name = "NAME"
    )]
    part: Vec<Part>,

    /// f32, bf16 or f16; models autocast with f32 weights
    #[arg(long, default_value_t = Precision::F32, value_name = "NAME")]
    precision: Precision,

    /// Sequences in a batch [default: attention 8, presets 4]
    #[arg(long, value_name = "N", alias = "attention-batch-size")]
    batch_size: Option<usize>,

    /// Tokens; several [default: attention 256 1024, presets 256]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "sequence-length")]
    context_length: Vec<usize>,

    /// Steps that are measured [default: attention 100, models 5]
    #[arg(long, value_parser = values::count(), value_name = "N", alias = "iterations")]
    steps: Option<usize>,

    /// Steps before them [default: attention 3, models 1]
    #[arg(long, value_parser = values::count_from_0(), value_name = "N")]
    warmup_steps: Option<usize>,

    /// Memory for a run [default: what is available]
    #[arg(long, value_parser = values::gib, value_name = "GIB")]
    memory_limit_gib: Option<f64>,

    /// The whole grid, four models and all presets: hours on a CPU
    #[arg(long)]
    full: bool,

    #[command(flatten)]
    common: Common,

    /// Width of a head; several [default: 16 64]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", help_heading = "Attention")]
    head_dim: Vec<usize>,

    /// Number of attention heads
    #[arg(
        long,
        default_value_t = 1,
        value_name = "N",
        alias = "heads",
        help_heading = "Attention"
    )]
    num_heads: usize,

    /// Let queries see keys up to their position only
    #[arg(long, help_heading = "Attention")]
    causal: bool,

    /// Time for each run, or none [default: 1500; full: 60000]
    #[arg(long, value_parser = values::time_budget, value_name = "MS", help_heading = "Attention")]
    time_budget_ms: Option<TimeBudget>,

    /// Batch, tokens, width, layers, heads; several [default: 4-256-256-4-8]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "B-T-D-L-H", help_heading = "Models")]
    config: Vec<Configuration>,

    /// Presets, tiny to 10b; several [default: none]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "NAME", help_heading = "Models")]
    size: Vec<String>,

    /// Number of token ids [default: 10000]
    #[arg(long, value_name = "N", help_heading = "Models")]
    vocab_size: Option<usize>,

    /// Feed-forward width [default: 4 D; presets: their own]
    #[arg(long, value_name = "N", help_heading = "Models")]
    d_ff: Option<usize>,

    /// naive or flash
    #[arg(
        long,
        default_value_t = Algorithm::Naive,
        value_name = "NAME",
        alias = "model-attention",
        help_heading = "Models"
    )]
    attention: Algorithm,

    /// Rounds in which eager and planned take turns
    #[arg(long, default_value_t = 2, value_parser = values::count(), value_name = "N", help_heading = "Models")]
    rounds: usize,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Forward and backward of attention alone: naive, planned, flash
    Attention,
    /// Forward, forward and backward, and the training step of models: eager, planned
    Model,
}

/// What both parts need to know about the machine.
struct Setting {
    device: Device,
    peak_flops: Option<f64>,
    limit_bytes: Option<u64>,
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
            .only(
                "with --part attention",
                &["head-dim", "num-heads", "causal", "time-budget-ms"],
                |flags| flags.has(Part::Attention),
            )
            .only(
                "with --part model",
                &[
                    "config",
                    "size",
                    "vocab-size",
                    "d-ff",
                    "attention",
                    "rounds",
                ],
                |flags| flags.has(Part::Model),
            )
            .only(
                "on attention and presets: --config has its own",
                &["batch-size", "context-length"],
                |flags| {
                    let has_presets =
                        !flags.size.is_empty() || flags.full && flags.has_default_models();
                    flags.has(Part::Attention) || has_presets
                },
            )
            .only(
                "where shapes, models or the time budget are left at their default",
                &["full"],
                |flags| {
                    let is_default = flags.head_dim.is_empty()
                        || flags.context_length.is_empty()
                        || flags.time_budget_ms.is_none();
                    flags.has(Part::Attention) && is_default
                        || flags.has(Part::Model) && flags.has_default_models()
                },
            )
    }

    fn has(&self, part: Part) -> bool {
        self.part.contains(&part)
    }

    fn has_default_models(&self) -> bool {
        self.config.is_empty() && self.size.is_empty()
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        let is_both = self.has(Part::Attention) && self.has(Part::Model);
        if is_both && self.output.format == Format::Csv && self.output.output.is_none() {
            return Err(Error::Config {
                config: common::PROGRAM,
                field: "--part",
                expected: "attention or model, because one CSV is one table".into(),
                got: "both".into(),
                hint: "name the part, or use --output FILE.csv for a file for each".into(),
            });
        }
        let tables = [measured::columns(false), model::columns()];
        self.output.check_columns(tables)?;
        let plan = StepConfig {
            precision: self.precision,
            ..Default::default()
        };
        plan.validate()?;
        let device = self.common.device()?;
        if device.is_cpu() {
            tallow::memory::system::reserve_scratch(self.precision)?;
        }
        let setting = Setting {
            peak_flops: tallow::hardware::measure_peak_flops(&device, DType::F32),
            limit_bytes: self.memory_limit_gib.map(common::gib_bytes),
            device,
        };
        let (mut attention, mut models) = (Vec::new(), Vec::new());
        if self.has(Part::Attention) {
            attention = self.attention_runs(&setting);
        }
        if self.has(Part::Model) {
            models = self.models()?;
        }
        let mut sweep = Sweep::new(attention.len() + models.len())?;
        let mut parts = Vec::new();
        if self.has(Part::Attention) {
            parts.push(self.attention(&setting, &attention, &mut sweep)?);
        }
        if self.has(Part::Model) {
            parts.push(model::report(self, &setting, &models, &mut sweep)?);
        }
        let mut report = match parts.len() {
            1 => parts.remove(0),
            _ => self.joined(parts),
        };
        report.notes.extend(sweep.note());
        report.environment = self.environment(&setting);
        self.output.publish(&report)
    }

    /// The parts as one report. JSON has answers and configuration in the report alone, not in its details.
    fn joined(&self, mut parts: Vec<Report>) -> Report {
        let mut joined = Report::default();
        for mut part in parts.drain(..) {
            if self.output.format == Format::Json {
                joined.answers.append(&mut part.answers);
                let configuration = serde_json::to_value(&part.configuration);
                let name = part.title.to_lowercase();
                joined
                    .configuration
                    .insert(name, configuration.unwrap_or_default());
            }
            let details = std::mem::take(&mut part.details);
            joined.details.push(part);
            joined.details.extend(details);
        }
        joined
    }

    fn environment(&self, setting: &Setting) -> Fields {
        let mut fields = self.common.environment(&setting.device);
        let peak = setting.peak_flops;
        let peak = peak.map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9));
        fields.insert("peak", peak);
        fields.insert("reference ops", common::fallbacks());
        fields
    }

    /// Every shape of the grid, with the three implementations one after the other.
    fn attention_runs(&self, setting: &Setting) -> Vec<AttentionRun> {
        use Implementation::{Flash, Naive, Planned};
        let given = |list: &[usize], quick: &[usize], all: &[usize]| match (list, self.full) {
            ([], false) => quick.to_vec(),
            ([], true) => all.to_vec(),
            (list, _) => list.to_vec(),
        };
        let lengths = [256, 1024, 4096, 8192, 16_384];
        let lengths = given(&self.context_length, &lengths[..2], &lengths);
        let time_budget_ms = match (self.time_budget_ms, self.full) {
            (Some(TimeBudget(ms)), _) => ms,
            (None, true) => Some(60_000.0),
            (None, false) => Some(1_500.0),
        };
        let available = || implementation::usable_bytes(&setting.device);
        let sampling = Sampling {
            warmup_steps: self.warmup_steps.unwrap_or(3),
            iterations: self.steps.unwrap_or(100),
            time_budget_ms,
            seed: self.common.seed,
            peak_flops: setting.peak_flops,
            available_bytes: setting.limit_bytes.or_else(available),
        };
        let mut runs = Vec::new();
        for head_dim in given(&self.head_dim, &[16, 64], &[16, 32, 64, 128]) {
            for &sequence_length in &lengths {
                let workload = AttentionWorkload {
                    batch_size: self.batch_size.unwrap_or(8),
                    heads: self.num_heads,
                    sequence_length,
                    head_dim,
                    mask: if self.causal {
                        Mask::Causal
                    } else {
                        Mask::Full
                    },
                    dtype: self.precision.dtype(),
                    ..Default::default()
                };
                let three = [Naive, Planned, Flash];
                runs.extend(three.map(|one| one.attention(workload, &sampling)));
            }
        }
        runs
    }

    fn attention(
        &self,
        setting: &Setting,
        runs: &[AttentionRun],
        sweep: &mut Sweep,
    ) -> Result<Report> {
        let (mut rows, mut measured) = (Vec::new(), Vec::new());
        for run in runs {
            let w = &run.workload;
            let (name, by) = (run.execution.name(), w.algorithm);
            let (length, head_dim) = (w.sequence_length, w.head_dim);
            if !sweep.begins(format_args!("{name} {by}, T {length}, d {head_dim}")) {
                break;
            }
            let of_run = run.run(&setting.device, |_, _| ())?;
            measured.extend(Measured::of(&of_run, String::new()));
            rows.push(of_run);
        }
        let mut configuration = Fields::new();
        configuration.insert("measured", "attention on q, k, v (B, H, T, d)");
        configuration.insert("precision", self.precision.name());
        if let Some(run) = runs.first() {
            let budget = run.sampling.time_budget_ms;
            configuration.insert("batch size", run.workload.batch_size);
            configuration.insert("mask", run.workload.mask.to_string());
            configuration.insert("warm-up steps", run.sampling.warmup_steps);
            configuration.insert("steps", run.sampling.iterations);
            configuration.insert("time budget", budget.map(|ms| format!("{ms} ms")));
        }
        let lines = measured::lines(&rows, &measured);
        let rows = rows.concat();
        let mut notes = measured::notes(true);
        notes.extend(words::noisy(&rows));
        Ok(Report {
            title: "Attention".into(),
            configuration,
            columns: measured::columns(false),
            answers: answers::answers(&measured, &[], &[], "d"),
            rows,
            lines,
            notes,
            ..Default::default()
        })
    }

    /// The models by their sizes, then presets.
    fn models(&self) -> Result<Vec<Configuration>> {
        let mut models = self.config.clone();
        let mut presets: Vec<&str> = self.size.iter().map(String::as_str).collect();
        if self.has_default_models() {
            let named = if self.full { &SEED[..] } else { &SEED[..1] };
            for name in named {
                models.push(name.parse()?);
            }
            presets.extend(PRESETS.iter().filter(|_| self.full));
        }
        for name in presets {
            let lengths = match self.context_length.is_empty() {
                true => &[256][..],
                false => &self.context_length,
            };
            for length in lengths {
                models.push(Configuration::preset(
                    name,
                    self.batch_size.unwrap_or(4),
                    *length,
                )?);
            }
        }
        for Configuration { model, .. } in &mut models {
            model.vocab_size = self.vocab_size.unwrap_or(model.vocab_size);
            model.d_ff = self.d_ff.unwrap_or(model.d_ff);
            model.validate()?;
        }
        Ok(models)
    }
}
