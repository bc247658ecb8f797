//! Half precision compared with f32: time and memory of forward and of forward and backward, for each size of model.
//!
//! ```text
//! cargo run --example mixed_precision_benchmark
//! cargo run --example mixed_precision_benchmark -- --size small medium --batch-size 64 32 --context-length 256
//! cargo run --example mixed_precision_benchmark -- --drop-casts --context-length 32 128 512 --plot precision.svg
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "mixed_precision_benchmark/compared.rs"]
mod compared;
#[path = "mixed_precision_benchmark/figure.rs"]
mod figure;

use candle_core::DType;
use clap::Parser;
use common::models::{Model, ModelFlags, describe, with_attention};
use common::modes::{ModeFlag, modes};
use common::precision::PrecisionFlags;
use common::{Common, Effects, Output, Sweep, values, words};
use compared::{Configuration, configurations, key};
use std::path::PathBuf;
use std::process::ExitCode;
use tallow::Result;
use tallow::attention::Algorithm;
use tallow::bench::{EndToEnd, Execution, alternate};
use tallow::model::flops;
use tallow::precision::Precision;
use tallow::report::{Column, Fields, Report, list_in_note};

const EXAMPLES: &str = "Examples:
  mixed_precision_benchmark --size small medium large --context-length 256
  mixed_precision_benchmark --drop-casts --context-length 32 128 512 --plot precision.svg
  mixed_precision_benchmark --precision bf16 f16 --mode all --format markdown";

/// Times half precision and f32 in turns, with their memory
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
struct Flags {
    #[command(flatten)]
    models: ModelFlags,

    /// naive or flash; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "naive", value_name = "NAME")]
    attention: Vec<Algorithm>,

    /// Sequences in a batch; one per size, or each with every size
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "4", value_name = "N")]
    batch_size: Vec<usize>,

    /// Tokens in a sequence; several [default: 64 256]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "N", alias = "sequence-length")]
    context_length: Vec<usize>,

    #[command(flatten, next_help_heading = "Run")]
    precision: PrecisionFlags,

    /// forward, forward-backward, train-step or all; several
    #[arg(long, value_enum, hide_possible_values = true, num_args = 1.., value_delimiter = ',', default_value = "forward,forward-backward", value_name = "NAME", help_heading = "Run")]
    mode: Vec<ModeFlag>,

    /// How often the precisions take turns
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = values::count(), help_heading = "Run")]
    rounds: usize,

    /// Steps of each turn that are not measured
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = values::count_from_0(), help_heading = "Run")]
    warmup_steps: usize,

    /// Steps of each turn that are measured
    #[arg(long, default_value_t = 4, value_name = "N", alias = "iterations", value_parser = values::count(), help_heading = "Run")]
    steps: usize,

    /// Memory that may be used [default: what is available]
    #[arg(long, value_name = "GIB", value_parser = values::gib, help_heading = "Run")]
    memory_limit_gib: Option<f64>,

    /// Draw time and memory (.svg, .png)
    #[arg(long, value_name = "FILE", value_parser = values::picture(), help_heading = "Output")]
    plot: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

fn main() -> ExitCode {
    let flags = Effects::<Flags>::new().of_output(|flags| &flags.output);
    let mut flags = flags.parse();
    flags
        .models
        .fill_context(&mut flags.context_length, &[64, 256]);
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check_with([&self.plot])?;
        let device = self.common.device()?;
        let precisions = self.precisions()?;
        self.output.check_columns([columns(&precisions)])?;
        let longest = self.context_length.iter().copied().max();
        let models = self
            .models
            .models(longest.unwrap_or_default(), &self.attention)?;
        let peak_flops = tallow::hardware::measure_peak_flops(&device, DType::F32);
        let runs = self.runs(&models, &precisions, peak_flops);
        let all = runs.iter().flat_map(|(_, runs)| runs);
        let available_bytes = common::memory::available_bytes(&device, self.memory_limit_gib, all)?;
        let mut rows = Vec::new();
        let mut sweep = Sweep::new(runs.len())?;
        for (name, mut runs) in runs {
            let run = &runs[0];
            let (b, t, mode) = (run.batch_size, run.sequence_length, run.mode.name());
            if !sweep.begins(format!("{name} B{b} T{t} {} {mode}", run.config.attention)) {
                break;
            }
            for run in &mut runs {
                run.available_bytes = available_bytes;
            }
            for measured in alternate(&runs, self.rounds, &device, |_, _, _| ())? {
                rows.extend(measured.into_iter().map(|row| {
                    let mut named = Fields::from_iter([("size", name)]);
                    named.merge(row);
                    named
                }));
            }
        }
        let all = configurations(&rows);
        let mut environment = self.common.environment(&device);
        environment.insert("reference ops", common::fallbacks());
        let report = Report {
            environment,
            configuration: self.configuration(&models, &precisions, peak_flops),
            columns: columns(&precisions),
            lines: all.iter().map(line).collect(),
            answers: compared::answers(&all),
            notes: notes(&rows, &sweep),
            rows,
            ..Default::default()
        };
        let published = self.output.publish(&report);
        if let Some(path) = self.plot.as_ref().filter(|_| !all.is_empty()) {
            figure::figure(&all).save(path)?;
            common::wrote(path);
        }
        published
    }

    /// f32 first, and nothing that drops casts without the precision that keeps them.
    fn precisions(&self) -> Result<Vec<Precision>> {
        let default = [Precision::F32, Precision::BF16];
        let mut all = vec![Precision::F32];
        for precision in self.precision.precisions_or(&default)? {
            for one in [precision.with_dropped_casts(false), precision] {
                if !all.contains(&one) {
                    all.push(one);
                }
            }
        }
        Ok(all)
    }

    /// Every configuration, in every precision.
    fn runs<'m>(
        &self,
        models: &'m [Model],
        precisions: &[Precision],
        peak_flops: Option<f64>,
    ) -> Vec<(&'m str, Vec<EndToEnd>)> {
        let is_paired = models.len() == self.batch_size.len();
        let mut runs = Vec::new();
        for (i, model) in models.iter().enumerate() {
            let batch_sizes = match is_paired {
                true => &self.batch_size[i..=i],
                false => &self.batch_size[..],
            };
            for &batch_size in batch_sizes {
                for &sequence_length in &self.context_length {
                    for &attention in &self.attention {
                        for mode in modes(&self.mode) {
                            let run = |&precision| EndToEnd {
                                config: with_attention(&model.config, attention),
                                batch_size,
                                sequence_length,
                                mode,
                                precision,
                                warmup_steps: self.warmup_steps,
                                steps: self.steps,
                                optimizer: Default::default(),
                                execution: Execution::Eager,
                                optimizer_in_backward: false,
                                memory_budget_bytes: None,
                                seed: self.common.seed,
                                peak_flops,
                                available_bytes: None,
                            };
                            runs.push((model.name.as_str(), precisions.iter().map(run).collect()));
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
        let peak = peak_flops.map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9));
        fields.insert("peak for MFU", peak);
        fields
    }
}

/// A configuration's line, with speed-ups as cells.
fn line(configuration: &Configuration) -> Fields {
    let mut line = configuration.line();
    for side in configuration.sides().filter(|side| side.precision != "f32") {
        let speedup = configuration.speedup("f32", &side.precision);
        line.insert(
            key("speed-up", &side.precision),
            words::speedup_cell(speedup),
        );
    }
    line
}

fn columns(precisions: &[Precision]) -> Vec<Column> {
    let mut columns = vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("mode", "Mode"),
    ];
    // A quantity, its heading, how minor it is, and the quantity that compares it with f32.
    let quantities = [
        ("time", "Time", 0, Some(("speed-up", "speed-up"))),
        ("peak", "Peak", 1, Some(("change", "than f32"))),
        ("copies", "Copies of the weights", 3, None),
        ("reserved", "Reserved", 4, None),
        ("tokens", "Tokens/s", 5, None),
        ("predicted", "Predicted peak", 6, None),
    ];
    for (quantity, heading, minor, compared) in quantities {
        for precision in precisions {
            let (name, is_f32) = (precision.name(), *precision == Precision::F32);
            let own = key(quantity, name);
            let column = match quantity {
                "time" => Column::ms(own, name),
                "tokens" => Column::count(own, name),
                _ => Column::mib(own, name),
            };
            columns.push(column.under(heading).minor(minor));
            if let Some((quantity, title)) = compared.filter(|_| !is_f32) {
                let own = key(quantity, name);
                let column = match quantity {
                    "change" => Column::text(own, title),
                    _ => Column::number(own, title, "", 2),
                };
                columns.push(column.under(heading).minor(minor));
            }
        }
    }
    columns.push(Column::text("outcome", "Status").minor(2));
    columns.push(Column::count("parameters", "Parameters").minor(3));
    columns
}

fn notes(rows: &[Fields], sweep: &Sweep) -> Vec<String> {
    let mut notes = vec![
        "Times are mean ± standard deviation, speed-ups are ratios of means. Forward keeps no graph; forward-backward \
         includes the loss."
            .into(),
        "Peak is the memory of model and step, measured by counting allocations.".into(),
    ];
    let skipped = rows.iter().zip(words::names(rows)).filter(|(row, _)| {
        let skipped = row.get("skipped_steps").and_then(|n| n.as_u64());
        skipped.is_some_and(|n| n > 0)
    });
    let skipped: Vec<String> = skipped.map(|(_, name)| name).collect();
    if !skipped.is_empty() {
        let start =
            "f16 gradients overflowed at the loss scale, so these made steps without an update";
        notes.push(list_in_note(start, &skipped));
    }
    notes.extend(words::noisy(rows));
    notes.extend(sweep.note());
    notes
}
