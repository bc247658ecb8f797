//! Trains the same model in f32, bf16 and f16, on the same batches from the same weights, and compares the losses.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "precision_curves/compared.rs"]
mod compared;

use candle_core::Device;
use clap::Parser;
use common::models::{Model, describe};
use common::{Common, Effects, Output, Sweep, values};
use compared::{Run, STEPS_A_POINT};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
use tallow::attention::Algorithm;
use tallow::data::Tokens;
use tallow::memory::{self, Kernels, Workload};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::Schedule;
use tallow::precision::Precision;
use tallow::report::plot::{Figure, LineChart, Series};
use tallow::report::{Column, Fields, Report, group_digits};
use tallow::train::{TrainConfig, Trainer};
use tallow::{Error, Result};

/// The files of a folder that are read.
const EXTENSIONS: [&str; 4] = ["rs", "md", "toml", "py"];

/// The part of the data at its end that is evaluated and not trained on.
const VALIDATION_FRACTION: f64 = 0.1;

const EXAMPLES: &str = "Examples:
  precision_curves --plot curves.svg
  precision_curves --data my.txt --precision f32 bf16
  precision_curves --d-model 256 --num-layers 6 --steps 1000 --format markdown";

/// Trains one model in f32, bf16 and f16, and compares the losses
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
struct Flags {
    /// Width of the residual stream
    #[arg(long, value_name = "N", default_value_t = 128)]
    d_model: usize,

    /// Width of the feed-forward network
    #[arg(long, value_name = "N", default_value_t = 320)]
    d_ff: usize,

    /// Number of blocks
    #[arg(long, value_name = "N", default_value_t = 4)]
    num_layers: usize,

    /// Number of attention heads
    #[arg(long, value_name = "N", default_value_t = 4, alias = "heads")]
    num_heads: usize,

    /// naive or flash
    #[arg(long, value_name = "NAME", default_value_t = Algorithm::Naive)]
    attention: Algorithm,

    /// Tokens in a sequence
    #[arg(
        long,
        value_name = "N",
        default_value_t = 64,
        alias = "sequence-length"
    )]
    context_length: usize,

    /// A text or a folder; each byte is a token [default: this crate]
    #[arg(long, value_name = "PATH", default_value = env!("CARGO_MANIFEST_DIR"), hide_default_value = true, help_heading = "Training")]
    data: PathBuf,

    /// Sequences in a batch
    #[arg(
        long,
        value_name = "N",
        default_value_t = 12,
        help_heading = "Training"
    )]
    batch_size: usize,

    /// Steps of each run
    #[arg(long, value_name = "N", default_value_t = 300, alias = "iterations", value_parser = values::count(), help_heading = "Training")]
    steps: usize,

    /// Highest learning rate; it falls to a tenth by a cosine
    #[arg(long, value_name = "X", default_value_t = 1e-3, value_parser = values::from_0, help_heading = "Training")]
    lr: f64,

    /// f32, bf16, f16: autocast with f32 parameters; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_value = "f32,bf16,f16", value_name = "NAME", help_heading = "Training")]
    precision: Vec<Precision>,

    /// Draw the curves (.svg, .png)
    #[arg(long, value_name = "FILE", value_parser = values::picture(), help_heading = "Output")]
    plot: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

fn main() -> ExitCode {
    let flags = Effects::<Flags>::new().of_output(|flags| &flags.output);
    let flags = flags.parse();
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check_with([&self.plot])?;
        self.output.check_columns([columns()])?;
        let configs = self.precision.iter().map(|precision| {
            let config = self.training(*precision);
            config.validate().map(|()| config)
        });
        let configs = configs.collect::<Result<Vec<_>>>()?;
        let tokens = match self.data.is_dir() {
            true => Tokens::source_tree(&self.data, &EXTENSIONS)?,
            false => Tokens::bytes(&self.data)?,
        };
        let (train, validation) = tokens.split(VALIDATION_FRACTION)?;
        let device = self.common.device()?;
        let config = TransformerConfig {
            vocab_size: train.vocab_size(),
            context_length: self.context_length,
            d_model: self.d_model,
            d_ff: self.d_ff,
            num_layers: self.num_layers,
            num_heads: self.num_heads,
            attention: self.attention,
            ..Default::default()
        };
        let name = "custom".to_string();
        let model = Model { name, config };
        let mut runs = Vec::new();
        let mut sweep = Sweep::new(configs.len())?;
        for config in configs {
            if !sweep.begins(config.precision) {
                break;
            }
            check_memory(&model.config, &config, &device)?;
            let untrained = TransformerLM::new(&model.config, self.common.seed, &device)?;
            let trainer = Trainer::new(untrained, config, train.clone(), validation.clone())?;
            runs.push(train_in(trainer)?);
        }
        let mut environment = self.common.environment(&device);
        environment.insert("reference ops", common::fallbacks());
        let exact = runs.iter().find(|run| run.precision == "f32");
        let rows = runs.iter().map(|run| Fields::of(&run.row(exact)));
        let mut notes = vec![
            format!("The last loss is the mean of the last {STEPS_A_POINT} steps."),
            "All runs start from the same weights and see the same batches.".into(),
        ];
        notes.extend(sweep.note());
        let published = self.output.publish(&Report {
            environment,
            configuration: self.configuration(&model, [&train, &validation]),
            columns: columns(),
            rows: rows.collect::<Result<_>>()?,
            answers: compared::answer(&runs).into_iter().collect(),
            notes,
            ..Default::default()
        });
        if let Some(path) = self.plot.as_ref().filter(|_| !runs.is_empty()) {
            figure(&runs).save(path)?;
            common::wrote(path);
        }
        published
    }

    fn training(&self, precision: Precision) -> TrainConfig {
        TrainConfig {
            batch_size: self.batch_size,
            sequence_length: self.context_length,
            steps: self.steps,
            schedule: Schedule::WarmupCosine {
                max_lr: self.lr,
                min_lr: self.lr / 10.0,
                warmup_steps: self.steps / 20,
                total_steps: self.steps,
            },
            precision,
            seed: self.common.seed,
            ..Default::default()
        }
    }

    fn configuration(&self, model: &Model, [train, validation]: [&Tokens; 2]) -> Fields {
        let count = |n: usize| group_digits(n as u64);
        let data = format!(
            "{} to train, {} to evaluate (bytes of {})",
            count(train.len()),
            count(validation.len()),
            self.data.display()
        );
        let mut fields = Fields::from_iter([("data", data)]);
        fields.merge(describe(std::slice::from_ref(model)));
        fields
            .insert("context", self.context_length)
            .insert("attention", self.attention.name())
            .insert("batch size", self.batch_size)
            .insert("steps", self.steps);
        fields
    }
}

/// Refuses a training step that does not fit, by the memory of an eager one, instead of being killed for it.
fn check_memory(model: &TransformerConfig, config: &TrainConfig, device: &Device) -> Result<()> {
    let step = Workload {
        batch_size: config.batch_size,
        sequence_length: config.sequence_length,
        attention: model.attention,
        precision: config.precision,
        kernels: Kernels::of(device),
        ..Default::default()
    };
    let wanted_bytes = memory::estimate(model, &step)?.peak_bytes;
    match tallow::hardware::available_bytes_on(device) {
        Some(available_bytes) if wanted_bytes > available_bytes => Err(Error::OutOfMemory {
            what: "the training step".into(),
            wanted_bytes,
            available_bytes,
        }),
        _ => Ok(()),
    }
}

/// Runs a training to its end.
fn train_in(mut trainer: Trainer) -> Result<Run> {
    let precision = trainer.config().precision;
    let begun = Instant::now();
    while let Some(step) = trainer.step()? {
        if step.step.is_multiple_of(STEPS_A_POINT) {
            let (step, loss) = (step.step, step.loss);
            common::progress(format!("{precision}: step {step}, loss {loss:.4}"));
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let validation_loss = trainer.evaluate()?;
    let history = trainer.history();
    Ok(Run {
        precision: precision.name().into(),
        losses: history.losses.clone(),
        validation_loss,
        skipped_steps: history.skipped.len(),
        loss_scale: trainer.loss_scale(),
        tokens: trainer.config().tokens_per_step() * trainer.steps_taken(),
        seconds,
    })
}

/// The curves, and their distance from f32's.
fn figure(runs: &[Run]) -> Figure {
    let chart = |title: String, y_label: &str, series: Vec<Series>| LineChart {
        title,
        x_label: "step".into(),
        y_label: y_label.into(),
        series,
        ..Default::default()
    };
    let curve = |run: &Run| Series::new(run.precision.as_str(), run.points());
    let curves = runs.iter().map(curve).collect();
    let title = format!("Loss (mean of {STEPS_A_POINT} steps)");
    let mut charts = vec![chart(title, "loss (nats a token)", curves)];
    if let Some(exact) = runs.iter().find(|run| run.precision == "f32") {
        let exact = exact.points();
        let distance = |run: &Run| {
            let both = run.points().into_iter().zip(&exact);
            let points =
                both.map(|((step, loss), (_, exact))| (step, (loss / exact - 1.0) * 100.0));
            Series::new(run.precision.as_str(), points.collect())
        };
        let distances = runs.iter().map(distance).collect();
        charts.push(chart(
            "Distance from f32".into(),
            "loss over f32's (%)",
            distances,
        ));
    }
    Figure { charts }
}

fn columns() -> Vec<Column> {
    vec![
        Column::text("precision", "Precision"),
        Column::number("last_loss", "Last loss", "nats", 4),
        Column::number("from_f32_percent", "From f32", "%", 3),
        Column::number("validation_loss", "Validation", "nats", 4).minor(1),
        Column::number("validation_from_f32_percent", "Validation from f32", "%", 3).minor(1),
        Column::number("first_loss", "First loss", "nats", 4).minor(3),
        Column::count("skipped_steps", "Skipped steps").minor(2),
        Column::number("loss_scale", "Loss scale", "", 0).minor(3),
        Column::ms("step_ms", "Step"),
        Column::count("tokens_per_s", "Tokens/s"),
    ]
}
