//! Trains the same model in f32, bf16 and f16, on the same batches from the same weights, and compares the losses.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
#[path = "precision_curves/compared.rs"]
mod compared;

use clap::{CommandFactory, Parser};
use common::effects;
use common::models::TrainedModelFlags;
use common::precision::PrecisionFlags;
use common::{Common, Output, Sweep, values};
use compared::{Run, STEPS_A_POINT, percent};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
use tallow::Result;
use tallow::bench::EndToEnd;
use tallow::data::Tokens;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::Schedule;
use tallow::precision::Precision;
use tallow::report::plot::{self, Chart, Series};
use tallow::report::{Column, Fields, Report, group_digits};
use tallow::train::{StepReport, TrainConfig, Trainer};

/// The files of a folder that are read.
const EXTENSIONS: [&str; 4] = ["rs", "md", "toml", "py"];

/// The part of the data at its end that is evaluated and not trained on.
const VALIDATION_FRACTION: f64 = 0.1;

const EXAMPLES: &str = "Examples:
  precision_curves --plot curves.svg
  precision_curves --data my.txt --precision f32 bf16 bf16-cpu
  precision_curves --d-model 256 --num-layers 6 --steps 1000 --format markdown";

/// Trains one model in f32, bf16 and f16, and compares the losses
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, next_help_heading = "Model")]
#[command(mut_arg("precision", |arg| arg.default_values(["f32", "bf16", "f16"])))]
struct Flags {
    #[command(flatten)]
    model: TrainedModelFlags,

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

    #[command(flatten, next_help_heading = "Training")]
    precision: PrecisionFlags,

    /// Draw the curves (.svg, .png)
    #[arg(long, value_name = "FILE", value_parser = values::picture(), help_heading = "Output")]
    plot: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    #[command(flatten, next_help_heading = "Environment")]
    common: Common,
}

fn main() -> ExitCode {
    let flags: Flags = effects::parse(Flags::command(), |_| Vec::new());
    common::run(|| flags.common.around(|| flags.run()))
}

impl Flags {
    fn run(&self) -> Result<()> {
        self.output.check_with([&self.plot])?;
        let precisions = self.precision.precisions();
        let tokens = match self.data.is_dir() {
            true => Tokens::source_tree(&self.data, &EXTENSIONS)?,
            false => Tokens::bytes(&self.data)?,
        };
        let (train, validation) = tokens.split(VALIDATION_FRACTION)?;
        let config = self.model.config(train.vocab_size())?;
        for precision in &precisions {
            self.benchmark(&config, *precision)?
                .plan(&self.common.device()?)?; // refuses before any run
        }
        let mut runs = Vec::new();
        let mut sweep = Sweep::new(precisions.len())?;
        for precision in precisions {
            if !sweep.begins(precision) {
                break;
            }
            runs.push(self.train(&config, precision, [&train, &validation])?);
        }
        let exact = runs.iter().find(|run| run.precision == "f32");
        let mut notes = vec![
            format!("The last loss is the mean of the last {STEPS_A_POINT} steps."),
            "All runs start from the same weights and see the same batches.".into(),
        ];
        notes.extend(sweep.note());
        let published = self.output.publish(&Report {
            environment: self.common.environment(&self.common.device()?),
            configuration: self.configuration(&config, [&train, &validation]),
            columns: columns(),
            rows: runs.iter().map(|run| run.row(exact)).collect(),
            answers: compared::answer(&runs).into_iter().collect(),
            notes,
            ..Default::default()
        });
        if let Some(path) = self.plot.as_ref().filter(|_| !runs.is_empty()) {
            plot::save(&figure(&runs), path)?;
            common::wrote(path);
        }
        published
    }

    /// Returns the step of a run, whose plan refuses what does not fit.
    fn benchmark(&self, config: &TransformerConfig, precision: Precision) -> Result<EndToEnd> {
        let device = self.common.device()?;
        Ok(EndToEnd {
            config: config.clone(),
            batch_size: self.batch_size,
            sequence_length: self.model.context_length,
            attention: self.model.attention,
            step: precision.into(),
            available_bytes: tallow::hardware::available_bytes_on(&device),
            ..Default::default()
        })
    }

    /// Trains and evaluates.
    fn train(
        &self,
        config: &TransformerConfig,
        precision: Precision,
        [train, validation]: [&Tokens; 2],
    ) -> Result<Run> {
        let (device, seed) = (self.common.device()?, self.common.seed);
        let settings = TrainConfig {
            batch_size: self.batch_size,
            sequence_length: self.model.context_length,
            steps: self.steps,
            schedule: Schedule::WarmupCosine {
                max_lr: self.lr,
                min_lr: self.lr / 10.0,
                warmup_steps: self.steps / 20,
                total_steps: self.steps,
            },
            attention: Some(self.model.attention),
            precision,
            seed,
            ..Default::default()
        };
        let tokens = self.steps * settings.tokens_per_step();
        let model = TransformerLM::new(config, seed, &device)?;
        let mut trainer = Trainer::new(model, settings, train.clone(), validation.clone())?;
        trainer.plan()?;
        let begun = Instant::now();
        while let Some(StepReport { step, loss, .. }) = trainer.step()? {
            if step.is_multiple_of(STEPS_A_POINT) {
                common::progress(format!("{precision}: step {step}, loss {loss:.4}"));
            }
        }
        Ok(Run {
            precision: precision.name().into(),
            seconds: begun.elapsed().as_secs_f64(),
            tokens,
            validation_loss: trainer.evaluate()?,
            losses: trainer.history().losses.clone(),
            skipped_steps: trainer.history().skipped.len(),
            loss_scale: trainer.loss_scale(),
        })
    }

    fn configuration(
        &self,
        config: &TransformerConfig,
        [train, validation]: [&Tokens; 2],
    ) -> Fields {
        let [train, validation] = [train, validation].map(|all| group_digits(all.len() as u64));
        let path = self.data.display();
        let data = format!("{train} to train, {validation} to evaluate (bytes of {path})");
        Fields::from_iter([
            ("data", data),
            ("model", common::models::sizes(config)),
            ("context length", config.context_length.to_string()),
            ("attention", self.model.attention.name().into()),
            ("batch size", self.batch_size.to_string()),
            ("steps", self.steps.to_string()),
        ])
    }
}

/// Draws the curves, and their distance from f32's.
fn figure(runs: &[Run]) -> Vec<Chart> {
    let chart = |title: String, y_label: &str, of: &dyn Fn(&Run) -> Vec<(f64, f64)>| Chart {
        title,
        x_label: "step".into(),
        y_label: y_label.into(),
        series: runs
            .iter()
            .map(|run| Series::new(run.precision.as_str(), of(run)))
            .collect(),
        ..Default::default()
    };
    let title = format!("Loss (mean of {STEPS_A_POINT} steps)");
    let mut charts = vec![chart(title, "loss (nats a token)", &Run::points)];
    if let Some(exact) = runs.iter().find(|run| run.precision == "f32") {
        let exact = exact.points();
        let distance = |run: &Run| {
            let mut points = run.points();
            for (own, exact) in points.iter_mut().zip(&exact) {
                own.1 = percent(own.1, exact.1);
            }
            points
        };
        let title = "Distance from f32".into();
        charts.push(chart(title, "loss over f32's (%)", &distance));
    }
    charts
}

fn columns() -> Vec<Column> {
    vec![
        Column::text("precision", "Precision"),
        Column::number("last_loss", "Last loss", "nats", 4),
        Column::number("from_f32_percent", "From f32", "%", 3),
        Column::number("validation_loss", "Validation", "nats", 4),
        Column::number("validation_from_f32_percent", "Validation from f32", "%", 3),
        Column::number("first_loss", "First loss", "nats", 4),
        Column::count("skipped_steps", "Skipped steps"),
        Column::number("loss_scale", "Loss scale", "", 0),
        Column::ms("step_ms", "Step"),
        Column::count("tokens_per_s", "Tokens/s"),
    ]
}
