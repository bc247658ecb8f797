//! Times attention forward and backward, naive, flash and planned, with its memory, over a grid of sequence lengths and
//! head widths; or the layer around it, with `--module`. `--help` has commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

#[path = "attention_benchmark/answers.rs"]
mod answers;
mod common;
#[path = "attention_benchmark/figure.rs"]
mod figure;
#[path = "attention_benchmark/grid.rs"]
mod grid;
#[path = "attention_benchmark/measured.rs"]
mod measured;

use candle_core::Device;
use clap::{Args, CommandFactory, Parser};
use common::effects::{self, Effect, only};
use common::precision::PrecisionFlags;
use common::values::TimeBudget;
use common::{Common, Output, Sweep, rates, values, words};
use measured::Measured;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use tallow::Result;
use tallow::attention::{Algorithm, Mask};
use tallow::bench::{AttentionRun, Execution};
use tallow::hardware;
use tallow::precision::Precision;
use tallow::report::{Fields, Report, format_mib, plot};

const EXAMPLES: &str = "Examples:
  attention_benchmark --full --plot attention.svg
  attention_benchmark --compare naive planned flash --context-length 512 2048 --head-dim 64
  attention_benchmark --module --compare naive planned --precision f32 bf16 --num-heads 1";

/// Times attention, or the layer around it, and its memory over a grid of sizes
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Workload")]
struct Flags {
    /// naive, flash, planned, planned-flash; several
    #[arg(
        long,
        value_parser = grid::implementation(),
        num_args = 1..,
        value_delimiter = ',',
        default_value = "naive,flash",
        value_name = "NAME"
    )]
    compare: Vec<(Algorithm, Execution)>,

    /// Sequences in a batch
    #[arg(long, default_value_t = 8, value_name = "N")]
    batch_size: usize,

    /// Tokens; several [default: 256 1024 4096; module: 16-128]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "sequence-length")]
    context_length: Vec<usize>,

    /// Width of a head; several [default: 16 64]
    #[arg(long, num_args = 1.., value_delimiter = ',', conflicts_with = "module", value_name = "N")]
    head_dim: Vec<usize>,

    /// Number of heads; several [default: 1; module: heads of 64]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "heads")]
    num_heads: Vec<usize>,

    /// Let queries see keys up to their position only
    #[arg(long, conflicts_with = "module")]
    causal: bool,

    /// Let queries see N keys up to their position
    #[arg(long, conflicts_with_all = ["causal", "module"], value_name = "N")]
    window: Option<NonZeroUsize>,

    /// Documents of equal length packed into a sequence
    #[arg(long, default_value_t = 1, value_parser = values::count(), conflicts_with = "module", value_name = "N")]
    documents: usize,

    /// Measure causal self-attention with its projections
    #[arg(long)]
    module: bool,

    /// Width of the layer; several [default: 256 1024 4096]
    #[arg(long, num_args = 1.., value_delimiter = ',', requires = "module", value_name = "N")]
    d_model: Vec<usize>,

    #[command(flatten)]
    precision: PrecisionFlags,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten, next_help_heading = "Measurement")]
    common: Common,

    /// Draw time and memory over T: .svg or .png
    #[arg(long, value_parser = values::picture(), value_name = "FILE", help_heading = "Output")]
    plot: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,
}

#[derive(Args)]
#[command(next_help_heading = "Measurement")]
struct SamplingFlags {
    /// Steps that are measured
    #[arg(long, default_value_t = 100, value_parser = values::count(), value_name = "N", alias = "iterations")]
    steps: usize,

    /// Steps before the measured ones
    #[arg(long, default_value_t = 5, value_parser = values::count_from_0(), value_name = "N")]
    warmup_steps: usize,

    /// Time for each run, or none [default: 5000; full: 60000]
    #[arg(long, value_parser = values::time_budget, value_name = "MS")]
    time_budget_ms: Option<TimeBudget>,

    /// Memory for a run [default: 5/6 of what is available]
    #[arg(long, value_parser = values::gib, value_name = "GIB")]
    memory_limit_gib: Option<f64>,

    /// The assignment's whole grid: hours on a CPU
    #[arg(long)]
    full: bool,
}

fn main() -> ExitCode {
    let flags = effects::parse(Flags::command(), Flags::effects);
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    /// Declares what the flags' effects depend on.
    fn effects(&self) -> Vec<Effect> {
        let widths = match self.module {
            true => &self.d_model,
            false => &self.head_dim,
        };
        let has_default = self.context_length.is_empty()
            || widths.is_empty()
            || self.sampling.time_budget_ms.is_none();
        let precisions = self.precision.precisions();
        let are_dtypes = precisions.iter().all(|one| Precision::ALL.contains(one));
        vec![
            only(
                "by its dtype without --module: f32, bf16 or f16",
                self.module || are_dtypes,
                &["precision"],
            ),
            only(
                "where lengths, widths or the time budget are left at their default",
                has_default,
                &["full"],
            ),
        ]
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.plot])?;
        let device = self.common.device()?;
        let precisions = self.precision.precisions();
        let base = self.base(&device);
        let rates = rates::of_precisions(&device, &precisions)?;
        let runs = self.runs(&base, &precisions, rates.as_ref());
        let mut sweep = Sweep::new(runs.len())?;
        let mut all = Vec::new();
        for run in &runs {
            if !sweep.begins(&run.title) {
                break;
            }
            all.push(Measured {
                result: run.run.run(&device, |_, _| ())?,
                variant: run.variant.clone(),
            });
        }

        let limits = grid::limits(&runs[..all.len()], &device);
        let mut rows = Vec::new();
        for m in &all {
            rows.extend(m.rows()?);
        }
        let mut notes = measured::notes(&all);
        notes.extend(words::out_of_memory(&rows));
        notes.extend(sweep.note());
        let mut configuration = self.configuration(&base, &precisions);
        let rates = rates.as_ref().map(|rates| rates.to_string());
        configuration.insert("measured rates", rates);
        let report = Report {
            environment: self.common.environment(&device),
            configuration,
            answers: answers::answers(&all, &limits),
            rows,
            notes,
            ..measured::table(&all)?
        };
        let published = self.output.publish(&report);
        if let Some(path) = &self.plot {
            let charts = figure::figure(&all, self.caption(&device, &precisions));
            plot::save(&charts, path)?;
            common::wrote(path);
        }
        published
    }

    /// Returns a run with the steps and limits of the flags.
    fn base(&self, device: &Device) -> AttentionRun {
        let flags = &self.sampling;
        let default_ms = if flags.full { 60_000.0 } else { 5_000.0 };
        let time_budget = flags.time_budget_ms;
        // On the CPU a sixth is left: the allocator keeps some of the pages that earlier runs freed.
        let usable_bytes = || {
            let bytes = hardware::available_bytes_on(device)?;
            Some(bytes - if device.is_cpu() { bytes / 6 } else { 0 })
        };
        let limit_bytes = flags.memory_limit_gib.map(common::gib_bytes);
        AttentionRun {
            warmup_steps: flags.warmup_steps,
            iterations: flags.steps,
            time_budget_ms: time_budget.map_or(Some(default_ms), |TimeBudget(ms)| ms),
            seed: self.common.seed,
            available_bytes: limit_bytes.or_else(usable_bytes),
            ..Default::default()
        }
    }

    fn mask(&self) -> Mask {
        match self.window {
            Some(keys) => Mask::Window(keys),
            None if self.causal || self.module => Mask::Causal,
            None => Mask::Full,
        }
    }

    /// Returns what is measured, in words.
    fn subject(&self) -> &'static str {
        match self.module {
            true => "causal self-attention with q, k, v and output projections, no positions",
            false => "attention on q, k, v (B, H, T, d), inputs of standard deviation 1",
        }
    }

    fn configuration(&self, base: &AttentionRun, precisions: &[Precision]) -> Fields {
        let budget = base.time_budget_ms.map(|ms| format!("{ms} ms"));
        let mut fields = Fields::new();
        fields
            .insert("measured", self.subject())
            .insert("mask", self.mask().to_string())
            .insert("documents", (self.documents > 1).then_some(self.documents))
            .insert("precision", names(precisions))
            .insert("warm-up steps", base.warmup_steps)
            .insert("steps", base.iterations)
            .insert("time budget", budget)
            .insert("memory limit", base.available_bytes.map(format_mib));
        fields
    }

    /// Returns the lines below the picture: what was measured, and where.
    fn caption(&self, device: &Device, precisions: &[Precision]) -> Vec<String> {
        let heads = match (&self.num_heads[..], self.module) {
            ([], true) => "of width 64 at most".into(),
            ([], false) => "1".into(),
            (heads, _) => format!("{heads:?}").replace(['[', ']'], ""),
        };
        let (batch, mask, precision) = (self.batch_size, self.mask(), names(precisions));
        let (name, hardware) = (hardware::device_name(device), hardware::description(device));
        vec![
            self.subject().into(),
            format!("B {batch}, heads {heads}, mask {mask}, {precision}; {name}: {hardware}"),
        ]
    }
}

fn names(precisions: &[Precision]) -> String {
    let names: Vec<&str> = precisions.iter().map(|one| one.name()).collect();
    names.join(", ")
}
