//! Compares models whose steps are planned (compiled for their shape before they run) with the same models run eagerly.
//! `attention_benchmark --compare naive planned flash` does so for attention alone. `--help` has commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "compiled_benchmark/compared.rs"]
mod compared;
#[path = "compiled_benchmark/configurations.rs"]
mod configurations;
#[path = "compiled_benchmark/why.rs"]
mod why;

use clap::Parser;
use common::{Common, Effects, Output, Sweep, phases, values, words};
use compared::{Compared, answers, columns, parts};
use configurations::Configuration;
use std::process::ExitCode;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Execution, alternate};
use tallow::compile::StepConfig;
use tallow::memory::Mode;
use tallow::precision::Precision;
use tallow::report::{Fields, Report, group_digits};
use tallow::{Result, hardware};
use why::Counted;

const EXAMPLES: &str = "Examples:
  compiled_benchmark --config 4-256-256-4-8 4-512-512-6-8 8-256-768-6-12 8-512-768-12-12
  compiled_benchmark --size small --context-length 256 512 --precision bf16
  compiled_benchmark --size small medium large --format json --output results.json";

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
    #[arg(long, default_value_t = 4, requires = "size", value_name = "N")]
    batch_size: usize,

    /// Tokens of a preset's sequence; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "256", requires = "size", value_name = "N")]
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

    /// Steps that are measured in each round
    #[arg(long, default_value_t = 5, value_parser = values::count(), value_name = "N", alias = "iterations", help_heading = "Measurement")]
    steps: usize,

    /// Steps before them in each round
    #[arg(long, default_value_t = 1, value_parser = values::count_from_0(), value_name = "N", help_heading = "Measurement")]
    warmup_steps: usize,

    /// Rounds in which eager and planned take turns
    #[arg(long, default_value_t = 2, value_parser = values::count(), value_name = "N", help_heading = "Measurement")]
    rounds: usize,

    /// Memory for a run [default: what is available]
    #[arg(long, value_parser = values::gib, value_name = "GIB", help_heading = "Measurement")]
    memory_limit_gib: Option<f64>,

    #[command(flatten, next_help_heading = "Measurement")]
    common: Common,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,
}

fn main() -> ExitCode {
    let flags = Effects::<Flags>::new()
        .of_output(|flags| &flags.output)
        .parse();
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        self.output.check_columns([columns()])?;
        let plan = StepConfig {
            precision: self.precision,
            ..Default::default()
        };
        plan.validate()?;
        let device = self.common.device()?;
        if device.is_cpu() {
            tallow::memory::system::reserve_scratch(self.precision)?;
        }
        let peak_flops = hardware::measure_peak_flops(&device, candle_core::DType::F32);
        let models = self.models()?;
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&models),
            columns: columns(),
            notes: vec![
                "Forward alone has no graph; forward+backward and the full step include the loss. Times are mean ± \
                 standard deviation; speed-up is eager's mean over planned's."
                    .into(),
            ],
            ..Default::default()
        };
        let mut sweep = Sweep::new(models.len())?;
        let (mut compared, mut counted): (Vec<Compared>, Vec<Counted>) = Default::default();
        for model in &models {
            if !sweep.begins(&model.name) {
                break;
            }
            let limit_bytes = self.memory_limit_gib.map(common::gib_bytes);
            let available_bytes = limit_bytes.or_else(|| hardware::available_bytes_on(&device));
            let runs = self.runs(model, available_bytes, peak_flops);
            let measured = alternate(&runs, self.rounds, &device, |_, _, _| ())?;
            let mut rows = Vec::new();
            for (run, mut own) in runs.iter().zip(measured) {
                own.extend(phases::update(&own));
                let is_step = |row: &&Fields| {
                    row.get("phase") == Some(&"train step".into()) && row.get("mean_ms").is_some()
                };
                if let Some(step) = own.iter().find(is_step) {
                    counted.push(Counted {
                        configuration: model.name.clone(),
                        memory: step.read().unwrap_or_default(),
                        ..why::count(run, &device)?
                    });
                }
                rows.extend(own.into_iter().map(|row| {
                    let mut named = Fields::from_iter([("configuration", model.name.as_str())]);
                    named.merge(row);
                    named
                }));
            }
            let (lines, own) = parts(&model.name, &rows);
            report.lines.extend(lines);
            report.rows.extend(rows);
            compared.extend(own);
        }
        let is_out = |row: &Fields| row.get("status") == Some(&"OOM".into());
        if report.rows.iter().any(is_out) {
            report.notes.extend(words::out_of_memory(&report.rows));
        }
        report.notes.extend(words::noisy(&report.rows));
        report.notes.extend(sweep.note());
        report.answers = answers(&compared, &counted);
        if !counted.is_empty() {
            report.details.push(why::table(&device, &counted)?);
        }
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
        if models.is_empty() && self.size.is_empty() {
            models.extend("4-256-256-4-8".parse());
        }
        for name in &self.size {
            for length in &self.context_length {
                models.push(Configuration::preset(name, self.batch_size, *length)?);
            }
        }
        for Configuration { model, .. } in &mut models {
            model.attention = self.attention;
            model.vocab_size = self.vocab_size.unwrap_or(model.vocab_size);
            model.d_ff = self.d_ff.unwrap_or(model.d_ff);
            model.validate()?;
        }
        Ok(models)
    }

    /// Each execution of each mode of a model.
    fn runs(
        &self,
        model: &Configuration,
        available_bytes: Option<u64>,
        peak_flops: Option<f64>,
    ) -> Vec<EndToEnd> {
        let modes = [Mode::Forward, Mode::ForwardBackward, Mode::TrainStep];
        let executions = [Execution::Eager, Execution::Planned].into_iter();
        let all = executions.flat_map(|execution| modes.map(|mode| (execution, mode)));
        let runs = all.map(|(execution, mode)| EndToEnd {
            config: model.model.clone(),
            batch_size: model.batch_size,
            sequence_length: model.sequence_length,
            mode,
            precision: self.precision,
            warmup_steps: self.warmup_steps,
            steps: self.steps,
            execution,
            seed: self.common.seed,
            peak_flops,
            available_bytes,
            ..Default::default()
        });
        runs.collect()
    }

    fn configuration(&self, models: &[Configuration]) -> Fields {
        let distinct = |of: fn(&Configuration) -> usize| {
            let sizes = models.iter().map(|model| group_digits(of(model) as u64));
            let mut sizes: Vec<String> = sizes.collect();
            sizes.dedup();
            sizes.join("; ")
        };
        let mut fields = Fields::new();
        let measured = "models: batch B, tokens T, width d, layers L, heads H";
        fields.insert("measured", measured);
        fields.insert("vocabulary", distinct(|m| m.model.vocab_size));
        fields.insert("d_ff", distinct(|m| m.model.d_ff));
        fields.insert("precision", self.precision.name());
        fields.insert("attention", self.attention.name());
        fields.insert("optimizer", "adamw");
        fields.insert("warm-up steps", self.warmup_steps);
        fields.insert("steps", self.steps);
        fields.insert("rounds", self.rounds);
        fields
    }
}
