//! Compares what is planned beforehand with what is run eagerly: attention over a grid, with flash as a third, and
//! whole models; and says what makes the difference.
//!
//! ```text
//! cargo run --example compiled_benchmark
//! cargo run --example compiled_benchmark -- --part model --config 4-512-512-6-8 --size tiny small
//! cargo run --example compiled_benchmark -- --part attention --sequence-length 512 2048 --head-dim 64 --causal
//! cargo run --example compiled_benchmark -- --part model --config 4-256-256-4-8 --vocab-size 50257 --d-ff 704
//! cargo run --example compiled_benchmark -- --precision bf16
//! cargo run --example compiled_benchmark -- --full --json results.json
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "common/analysis/mod.rs"]
#[allow(dead_code, unused_imports)] // two examples use it, each its part
mod analysis;
#[path = "compiled_benchmark/attention.rs"]
mod attention;
mod common;
#[path = "compiled_benchmark/configurations.rs"]
mod configurations;
#[path = "compiled_benchmark/model.rs"]
mod model;
#[path = "compiled_benchmark/publish.rs"]
mod publish;
#[path = "compiled_benchmark/why.rs"]
mod why;

use attention::AttentionFlags;
use candle_core::DType;
use clap::{Parser, ValueEnum};
use common::{Common, Effects, Output, values};
use model::ModelFlags;
use std::path::PathBuf;
use std::process::ExitCode;
use tallow::Result;
use tallow::compile::StepConfig;
use tallow::precision::Precision;
use tallow::report::{Fields, Report};

/// Compares what is planned beforehand with what is run eagerly: attention, and whole models.
///
/// Without --full it takes about a minute.
#[derive(Parser)]
#[command(version)]
struct Flags {
    #[command(flatten)]
    common: Common, // first: headings hold for whatever comes after them

    /// attention, model; several allowed
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "attention,model")]
    part: Vec<Part>,

    /// What is computed in: f32, bf16 or f16. Models in half precision are autocast's, with f32 weights; attention
    /// alone has q, k and v in that dtype
    #[arg(long, default_value_t = Precision::F32, value_name = "NAME")]
    precision: Precision,

    /// Every configuration: the whole grid, the course report's models and all presets; on two cores some hours
    #[arg(long)]
    full: bool,

    /// Write the rows of all parts, every sample included, into this file too (JSON)
    #[arg(long)]
    json: Option<PathBuf>,

    /// The memory that may be used, in GiB, instead of what is available
    #[arg(long, value_parser = values::gib)]
    memory_limit_gib: Option<f64>,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    attention: AttentionFlags,

    #[command(flatten)]
    model: ModelFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Forward and backward of attention alone: naive, planned, flash
    Attention,
    /// Forward, forward and backward, and the training step of models: eager, planned
    Model,
}

/// What both parts are told.
struct Setting {
    device: candle_core::Device,
    full: bool,
    precision: Precision,
    seed: u64,
    peak_flops: Option<f64>,
    /// Bytes that may be used.
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
            .only("with --part attention", AttentionFlags::NAMES, |flags| {
                flags.part.contains(&Part::Attention)
            })
            .only("with --part model", ModelFlags::NAMES, |flags| {
                flags.part.contains(&Part::Model)
            })
            .only(
                "on presets: with --size, or with --full and without --config",
                &["batch-size", "context-length"],
                |flags| flags.model.has_presets(flags.full),
            )
            .only(
                "where a default is left that it changes: of shapes, models or the time budget",
                &["full"],
                |flags| {
                    let changes = |part| match part {
                        Part::Attention => flags.attention.has_defaults(),
                        Part::Model => flags.model.has_defaults(),
                    };
                    flags.part.iter().copied().any(changes)
                },
            )
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.json])?;
        let is_both = [Part::Attention, Part::Model]
            .iter()
            .all(|part| self.part.contains(part));
        publish::check(&self.output, is_both)?;
        self.output
            .check_columns([attention::columns(), model::columns()])?;
        let plan = StepConfig {
            precision: self.precision,
            ..Default::default()
        };
        plan.validate()?;
        let device = self.common.device()?;
        let limit = self.memory_limit_gib;
        if device.is_cpu() {
            tallow::memory::system::reserve_scratch(self.precision)?;
        }
        let setting = Setting {
            peak_flops: tallow::hardware::measure_peak_flops(&device, DType::F32),
            full: self.full,
            precision: self.precision,
            seed: self.common.seed,
            limit_bytes: limit.map(common::gib_bytes),
            device,
        };
        let mut parts: Vec<Report> = Vec::new();
        for part in [Part::Attention, Part::Model] {
            if self.part.contains(&part) {
                parts.push(match part {
                    Part::Attention => self.attention.report(&setting)?,
                    Part::Model => self.model.report(&setting)?,
                });
            }
        }
        let environment = self.environment(&setting);
        let saved = match &self.json {
            Some(path) => publish::save_json(path, &environment, &parts),
            None => Ok(()),
        };
        publish::publish(&self.output, &environment, parts).and(saved)
    }

    fn environment(&self, setting: &Setting) -> Fields {
        let mut fields = self.common.environment(&setting.device);
        let peak = setting.peak_flops;
        let peak = peak.map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9));
        fields.insert("peak", peak);
        fields.insert("reference ops", common::fallbacks());
        fields
    }
}

/// The geometric mean of ratios; `None` of none.
fn geometric_mean(ratios: impl IntoIterator<Item = f64>) -> Option<f64> {
    let logs: Vec<f64> = ratios.into_iter().map(f64::ln).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

/// A number of a row.
fn number(row: &Fields, key: &str) -> Option<f64> {
    row.get(key).and_then(|value| value.as_f64())
}

/// A text of a row.
fn text<'a>(row: &'a Fields, key: &str) -> Option<&'a str> {
    row.get(key).and_then(|value| value.as_str())
}
