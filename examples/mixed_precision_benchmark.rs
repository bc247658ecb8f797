//! Half precision beside f32: time, throughput and memory of forward and of forward and backward, for each size of
//! model.
//!
//! ```text
//! cargo run --example mixed_precision_benchmark
//! cargo run --example mixed_precision_benchmark -- --size small medium --batch-size 64 32 --context-length 256
//! cargo run --example mixed_precision_benchmark -- --drop-casts --context-length 32 128 512 --plot precision.svg
//! cargo run --example mixed_precision_benchmark -- --precision bf16 f16 --mode all --format markdown
//! cargo run --example mixed_precision_benchmark -- --d-model 256 --d-ff 704 --num-heads 8 --full-half
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

#[path = "mixed_precision_benchmark/analysis/mod.rs"]
mod analysis;
mod common;
#[path = "mixed_precision_benchmark/figure.rs"]
mod figure;
#[path = "mixed_precision_benchmark/table.rs"]
mod table;

use analysis::PrecisionAnalysis;
use candle_core::DType;
use clap::Parser;
use common::models::{Model, ModelFlags, describe, with_attention};
use common::modes::{ModeFlag, modes};
use common::precision::PrecisionFlags;
use common::{Common, Effects, Output, values, words};
use std::path::PathBuf;
use std::process::ExitCode;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, OptimizerChoice, alternate};
use tallow::model::flops;
use tallow::precision::Precision;
use tallow::report::{Fields, Report, list_in_note};

/// Times half precision beside f32, in turns, with memory measured and predicted.
///
/// f32 is always among the precisions, and so is, beside one that drops its casts, the one that keeps them.
#[derive(Parser)]
#[command(version)]
struct Flags {
    #[command(flatten)]
    models: ModelFlags,

    /// Sequences in a batch; several allowed: one for each size where there are as many, else each with every size
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4")]
    batch_size: Vec<usize>,

    /// Tokens in a sequence; several allowed
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "64,256")]
    context_length: Vec<usize>,

    /// What computes attention, naive or flash; several allowed
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "naive")]
    attention: Vec<Algorithm>,

    #[command(flatten)]
    precision: PrecisionFlags,

    /// How much of a training step; several allowed
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "forward,forward-backward")]
    mode: Vec<ModeFlag>,

    /// How often the precisions take turns
    #[arg(long, default_value_t = 2, value_parser = values::count())]
    rounds: usize,

    /// Steps that are run and not counted, each turn
    #[arg(long, default_value_t = 1, value_parser = values::count_from_0())]
    warmup_steps: usize,

    /// Steps that are measured, each turn
    #[arg(long, default_value_t = 4, value_parser = values::count())]
    steps: usize,

    /// Draw time and memory, over the context length or, with several sizes, over parameters, into this file: .svg or
    /// .png
    #[arg(long, value_parser = values::picture())]
    plot: Option<PathBuf>,

    /// The memory that may be used, in GiB, instead of what is available
    #[arg(long, value_parser = values::gib)]
    memory_limit_gib: Option<f64>,

    #[command(flatten)]
    output: Output,

    #[command(flatten)]
    common: Common,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new().of_output(|flags| &flags.output)
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.plot])?;
        let device = self.common.device()?;
        let precisions = self.precisions()?;
        self.output.check_columns([table::columns(&precisions)])?;
        let longest = self.context_length.iter().copied().max();
        let models = self
            .models
            .models(longest.unwrap_or_default(), &self.attention)?;
        let peak_flops = tallow::hardware::measure_peak_flops(&device, DType::F32);
        let mut rows = Vec::new();
        let runs = self.sweep(&models, peak_flops);
        let kinds = runs.iter().flat_map(|(_, run)| {
            let precisions = precisions.iter().copied();
            precisions.map(|precision| EndToEnd {
                precision,
                ..run.clone()
            })
        });
        let kinds: Vec<EndToEnd> = kinds.collect();
        let available_bytes =
            common::memory::available_bytes(&device, self.memory_limit_gib, &kinds)?;
        for (model, run) in runs {
            let run = EndToEnd {
                available_bytes,
                ..run
            };
            common::progress(format!(
                "{}, batch {}, context {}, {} attention, {}",
                model.name,
                run.batch_size,
                run.sequence_length,
                run.config.attention,
                run.mode.name()
            ));
            let runs: Vec<EndToEnd> = precisions
                .iter()
                .map(|&precision| EndToEnd {
                    precision,
                    ..run.clone()
                })
                .collect();
            for measured in alternate(&runs, self.rounds, &device, |_, _, _| ())? {
                rows.extend(measured.into_iter().map(|row| labelled(&model.name, row)));
            }
        }

        let analysis = PrecisionAnalysis::of(&rows);
        let mut report = Report {
            environment: self.common.environment(&device),
            configuration: self.configuration(&models, &precisions, peak_flops),
            columns: table::columns(&precisions),
            lines: table::lines(&analysis),
            notes: notes(&rows, &analysis),
            details: analysis.copies().into_iter().collect(),
            ..Default::default()
        };
        report
            .environment
            .insert("reference ops", common::fallbacks());
        let value = serde_json::to_value(&analysis.configurations).unwrap_or_default();
        report.analysis.insert("configurations", value);
        report.rows = rows;
        let published = self.output.publish(&report);
        if let Some(path) = &self.plot {
            figure::figure(&analysis).save(path)?;
        }
        published
    }

    /// f32 first, and nothing that drops casts without the one that keeps them.
    fn precisions(&self) -> Result<Vec<Precision>> {
        let named = self
            .precision
            .precisions_or(&[Precision::F32, Precision::BF16])?;
        let mut all = vec![Precision::F32];
        for precision in named {
            for one in [precision.with_dropped_casts(false), precision] {
                if !all.contains(&one) {
                    all.push(one);
                }
            }
        }
        Ok(all)
    }

    /// Every configuration, in f32.
    fn sweep<'m>(
        &self,
        models: &'m [Model],
        peak_flops: Option<f64>,
    ) -> Vec<(&'m Model, EndToEnd)> {
        let paired = models.len() == self.batch_size.len();
        let mut runs = Vec::new();
        for (i, model) in models.iter().enumerate() {
            let batch_sizes = match paired {
                true => &self.batch_size[i..=i],
                false => &self.batch_size[..],
            };
            for &batch_size in batch_sizes {
                for &sequence_length in &self.context_length {
                    for &attention in &self.attention {
                        for mode in modes(&self.mode) {
                            let run = EndToEnd {
                                config: with_attention(&model.config, attention),
                                batch_size,
                                sequence_length,
                                mode,
                                precision: Precision::F32,
                                warmup_steps: self.warmup_steps,
                                steps: self.steps,
                                optimizer: OptimizerChoice::AdamW(Default::default()),
                                execution: tallow::bench::Execution::Eager,
                                optimizer_in_backward: false,
                                memory_budget_bytes: None,
                                seed: self.common.seed,
                                peak_flops,
                                available_bytes: None,
                            };
                            runs.push((model, run));
                        }
                    }
                }
            }
        }
        runs
    }

    fn configuration(
        &self,
        models: &[Model],
        precisions: &[Precision],
        peak_flops: Option<f64>,
    ) -> Fields {
        let mut fields = describe(models);
        let names: Vec<&str> = precisions.iter().map(|p| p.name()).collect();
        fields.insert("precision", names.join(", "));
        let attention: Vec<&str> = self.attention.iter().map(|a| a.name()).collect();
        fields.insert("attention", attention.join(", "));
        fields.insert("execution", "eager");
        fields.insert("rounds", self.rounds);
        fields.insert("warm-up", self.warmup_steps);
        fields.insert("steps", self.steps);
        fields.insert("memory limit GiB", self.memory_limit_gib);
        fields.insert("FLOPs", flops::FORMULA);
        fields.insert(
            "peak for MFU",
            peak_flops.map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9)),
        );
        fields
    }
}

/// A row with its model's name in front.
fn labelled(name: &str, row: Fields) -> Fields {
    let mut labelled = Fields::from_iter([("size", name)]);
    labelled.merge(row);
    labelled
}

/// What a reader needs beside the table.
fn notes(rows: &[Fields], analysis: &PrecisionAnalysis) -> Vec<String> {
    let mut notes = vec![
        "Times are mean ± standard deviation, speed-ups those of medians; forward is without a graph, \
         forward-backward has \
         the loss."
            .to_string(),
        "Peak is that of model and step, measured by counting allocations; saved is of f32's.".into(),
    ];
    notes.extend(analysis.notes());
    let skipped = rows.iter().zip(words::names(rows)).filter(|(row, _)| {
        let skipped = row.get("skipped_steps").and_then(|n| n.as_u64());
        skipped.is_some_and(|n| n > 0)
    });
    let skipped: Vec<String> = skipped.map(|(_, name)| name).collect();
    if !skipped.is_empty() {
        let start = "Some f16 steps overflowed and made no update, as loss scaling has it";
        notes.push(list_in_note(start, &skipped));
    }
    notes.extend(words::noisy(rows));
    notes
}
