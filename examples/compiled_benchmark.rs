//! Compares models whose steps are planned (compiled for their shape before they run) with the same models run eagerly.
//! `attention_benchmark --compare naive planned flash` does so for attention alone. `--help` has commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "compiled_benchmark/compared.rs"]
mod compared;
#[path = "compiled_benchmark/configurations.rs"]
mod configurations;
#[path = "compiled_benchmark/model.rs"]
mod model;
#[path = "compiled_benchmark/why.rs"]
mod why;

use candle_core::DType;
use clap::Parser;
use common::{Common, Effects, Output, Sweep, values, words};
use configurations::{Configuration, PRESETS, SEED};
use std::process::ExitCode;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::compile::StepConfig;
use tallow::precision::Precision;

const EXAMPLES: &str = "Examples:
  compiled_benchmark --config 4-256-256-4-8 4-512-512-6-8 --vocab-size 10000
  compiled_benchmark --size small --context-length 256 512 --precision bf16
  compiled_benchmark --full --format json --output results.json";

/// Compares planned (compiled) with eager steps of models
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Models")]
struct Flags {
    /// Batch, tokens, width, layers, heads; several [default: 4-256-256-4-8]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "B-T-D-L-H")]
    config: Vec<Configuration>,

    /// Presets, tiny to 10b; several [default: none]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "NAME")]
    size: Vec<String>,

    /// Sequences in a preset's batch
    #[arg(long, default_value_t = 4, value_name = "N")]
    batch_size: usize,

    /// Tokens of a preset's sequence; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "256", value_name = "N")]
    context_length: Vec<usize>,

    /// Number of token ids [default: 10000]
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,

    /// Feed-forward width [default: 4 D; presets: their own]
    #[arg(long, value_name = "N")]
    d_ff: Option<usize>,

    /// naive or flash
    #[arg(long, default_value_t = Algorithm::Naive, value_name = "NAME", alias = "model-attention")]
    attention: Algorithm,

    /// f32, bf16 or f16 (autocast, f32 parameters)
    #[arg(long, default_value_t = Precision::F32, value_name = "NAME")]
    precision: Precision,

    /// The assignment's four models and all presets: hours on a CPU
    #[arg(long)]
    full: bool,

    #[command(flatten, next_help_heading = "Measurement")]
    measurement: Measurement,

    #[command(flatten, next_help_heading = "Measurement")]
    common: Common,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,
}

/// How models are measured.
#[derive(clap::Args)]
struct Measurement {
    /// Steps that are measured in each round
    #[arg(long, default_value_t = 5, value_parser = values::count(), value_name = "N", alias = "iterations")]
    steps: usize,

    /// Steps before them in each round
    #[arg(long, default_value_t = 1, value_parser = values::count_from_0(), value_name = "N")]
    warmup_steps: usize,

    /// Rounds in which eager and planned take turns
    #[arg(long, default_value_t = 2, value_parser = values::count(), value_name = "N")]
    rounds: usize,

    /// Memory for a run [default: what is available]
    #[arg(long, value_parser = values::gib, value_name = "GIB")]
    memory_limit_gib: Option<f64>,
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
                "on presets: with --size, or with --full",
                &["batch-size", "context-length"],
                |flags| !flags.size.is_empty() || flags.full,
            )
            .only("without --config and --size", &["full"], |flags| {
                flags.has_defaults()
            })
    }

    fn has_defaults(&self) -> bool {
        self.config.is_empty() && self.size.is_empty()
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        self.output.check_columns([model::columns()])?;
        let plan = StepConfig {
            precision: self.precision,
            ..Default::default()
        };
        plan.validate()?;
        let device = self.common.device()?;
        if device.is_cpu() {
            tallow::memory::system::reserve_scratch(self.precision)?;
        }
        let peak_flops = tallow::hardware::measure_peak_flops(&device, DType::F32);
        let models = self.models()?;
        let mut sweep = Sweep::new(models.len())?;
        let mut report = model::report(self, (&device, peak_flops), &models, &mut sweep)?;
        report.notes.extend(sweep.note());
        report.environment = self.common.environment(&device);
        let peak = peak_flops.map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9));
        report.environment.insert("peak", peak);
        report
            .environment
            .insert("reference ops", common::fallbacks());
        self.output.publish(&report)
    }

    /// The models by their sizes, then presets.
    fn models(&self) -> Result<Vec<Configuration>> {
        let mut models = self.config.clone();
        let mut presets: Vec<&str> = self.size.iter().map(String::as_str).collect();
        if self.has_defaults() {
            let named = if self.full { &SEED[..] } else { &SEED[..1] };
            models.extend(named.iter().filter_map(|name| name.parse().ok()));
            presets.extend(PRESETS.iter().filter(|_| self.full));
        }
        for name in presets {
            for length in &self.context_length {
                models.push(Configuration::preset(name, self.batch_size, *length)?);
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
