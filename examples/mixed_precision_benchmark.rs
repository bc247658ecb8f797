//! Half precision compared with f32: time and memory of forward and of forward and backward, for each size of model.
//! `--help` has commands.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "mixed_precision_benchmark/compared.rs"]
mod compared;

use candle_core::DType;
use clap::Parser;
use common::models::{Model, describe};
use common::runs::{GridFlags, Run};
use common::{Common, Effects, Output, Sweep, values, words};
use compared::{Configuration, configurations, key};
use std::process::ExitCode;
use tallow::Result;
use tallow::bench::{EndToEnd, alternate};
use tallow::model::flops;
use tallow::precision::Precision;
use tallow::report::{Column, Fields, Report, list_in_note};

const EXAMPLES: &str = "Examples:
  mixed_precision_benchmark --size small medium large --context-length 256
  mixed_precision_benchmark --drop-casts --context-length 32 128 512
  mixed_precision_benchmark --precision bf16 f16 --mode all --format markdown";

/// Times half precision and f32 in turns, with their memory
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
#[command(mut_arg("mode", |arg| arg.default_values(["forward", "forward-backward"])))]
#[command(mut_arg("context_length", |arg| arg.help("Tokens in a sequence; several [default: 64 256]")))]
#[command(mut_arg("batch_size", |arg| arg.help("Sequences in a batch; one per size, or each with every size")))]
struct Flags {
    #[command(flatten)]
    grid: GridFlags,

    /// How often the precisions take turns
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = values::count(), help_heading = "Run")]
    rounds: usize,

    /// Steps of each turn that are not measured
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = values::count_from_0(), help_heading = "Run")]
    warmup_steps: usize,

    /// Steps of each turn that are measured
    #[arg(long, default_value_t = 4, value_name = "N", alias = "iterations", value_parser = values::count(), help_heading = "Run")]
    steps: usize,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

fn main() -> ExitCode {
    let flags = Effects::<Flags>::new().of_output(|flags| &flags.output);
    let mut flags = flags.parse();
    let grid = &mut flags.grid;
    grid.models
        .fill_context(&mut grid.context_length, &[64, 256]);
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check_with([])?;
        let device = self.common.device()?;
        let precisions = self.precisions()?;
        self.output.check_columns([columns(&precisions)])?;
        let models = self.grid.models()?;
        let peak_flops = tallow::hardware::measure_peak_flops(&device, DType::F32);
        let mut runs = self.runs(&models, &precisions, peak_flops);
        let all = runs.iter_mut().flat_map(|(_, runs)| runs);
        self.grid.give_memory(all, &device)?;
        let mut rows = Vec::new();
        let mut sweep = Sweep::new(runs.len())?;
        for (Run { size: name, run }, runs) in &runs {
            let (b, t, mode) = (run.batch_size, run.sequence_length, run.mode.name());
            if !sweep.begins(format!("{name} B{b} T{t} {} {mode}", run.config.attention)) {
                break;
            }
            for measured in alternate(runs, self.rounds, &device, |_, _, _| ())? {
                rows.extend(measured.into_iter().map(|row| {
                    let mut named = Fields::from_iter([("size", name.as_str())]);
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
            lines: all.iter().map(Configuration::line).collect(),
            answers: compared::answers(&all),
            notes: notes(&rows, &sweep),
            rows,
            ..Default::default()
        };
        self.output.publish(&report)
    }

    /// f32 first, and nothing that drops casts without the precision that keeps them.
    fn precisions(&self) -> Result<Vec<Precision>> {
        let default = [Precision::F32, Precision::BF16];
        let mut all = vec![Precision::F32];
        for precision in self.grid.precision.precisions_or(&default)? {
            for one in [precision.with_dropped_casts(false), precision] {
                if !all.contains(&one) {
                    all.push(one);
                }
            }
        }
        Ok(all)
    }

    /// Every configuration, with its run in every precision.
    fn runs(
        &self,
        models: &[Model],
        precisions: &[Precision],
        peak_flops: Option<f64>,
    ) -> Vec<(Run, Vec<EndToEnd>)> {
        let is_paired = models.len() == self.grid.batch_size.len();
        let configurations = models.iter().enumerate().flat_map(|(i, model)| {
            let mut grid = self.grid.clone();
            if is_paired {
                grid.batch_size = vec![self.grid.batch_size[i]];
            }
            grid.runs(std::slice::from_ref(model), &[Precision::F32], None)
        });
        let runs = configurations.map(|configuration| {
            let run = |&precision| EndToEnd {
                precision,
                warmup_steps: self.warmup_steps,
                steps: self.steps,
                seed: self.common.seed,
                peak_flops,
                ..configuration.run.clone()
            };
            let runs = precisions.iter().map(run).collect();
            (configuration, runs)
        });
        runs.collect()
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
        let attention = &self.grid.variants.attention;
        let attention: Vec<&str> = attention.iter().map(|a| a.name()).collect();
        fields.insert("attention", attention.join(", "));
        fields.insert("execution", "eager");
        fields.insert("rounds", self.rounds);
        fields.insert("warm-up", self.warmup_steps);
        fields.insert("steps", self.steps);
        fields.insert("memory limit GiB", self.grid.memory_limit_gib);
        fields.insert("FLOPs", flops::FORMULA);
        let peak = peak_flops.map(|peak| format!("{:.0} GFLOP/s in f32, measured", peak / 1e9));
        fields.insert("peak for MFU", peak);
        fields
    }
}

fn columns(precisions: &[Precision]) -> Vec<Column> {
    let mut columns = vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("checkpointing", "Checkpointing"),
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
