//! Trains the same model in f32, bf16 and f16, on the same batches from the same weights, and compares the losses.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
#[path = "precision_curves/compared.rs"]
mod compared;
#[path = "train/setup.rs"]
mod setup;

use clap::{CommandFactory, Parser};
use common::effects;
use common::models::TrainedModelFlags;
use common::precision::PrecisionFlags;
use common::{Common, Output, Sweep, values};
use compared::{Run, STEPS_A_POINT};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
use tallow::Result;
use tallow::model::TransformerLM;
use tallow::optim::Schedule;
use tallow::precision::Precision;
use tallow::report::{Report, plot};
use tallow::train::{StepReport, TrainConfig, Trainer};

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

    #[command(flatten, next_help_heading = "Training")]
    precision: PrecisionFlags,

    /// A text or a folder; each byte is a token [default: this crate]
    #[arg(long, value_name = "PATH", default_value = env!("CARGO_MANIFEST_DIR"), hide_default_value = true)]
    data: PathBuf,

    /// Sequences in a batch
    #[arg(long, value_name = "N", default_value_t = 12)]
    batch_size: usize,

    /// Steps of each run
    #[arg(long, value_name = "N", default_value_t = 300, alias = "iterations", value_parser = values::count())]
    steps: usize,

    /// Highest learning rate; it falls to a tenth by a cosine
    #[arg(long, value_name = "X", default_value_t = 1e-3, value_parser = values::from_0)]
    lr: f64,

    #[command(flatten, next_help_heading = "Output")]
    output: Output,

    /// Draw the curves (.svg, .png)
    #[arg(long, value_name = "FILE", value_parser = values::picture())]
    plot: Option<PathBuf>,

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
        let device = self.common.device()?;
        let (train, validation) = setup::read(&self.data)?.split(VALIDATION_FRACTION)?;
        let model = self.model.config(train.vocab_size())?;
        let precisions = self.precision.precisions();
        for precision in &precisions {
            let config = self.config(*precision);
            setup::check_memory(&model, &config, config.step(), &device)?;
        }
        let mut runs = Vec::new();
        let mut sweep = Sweep::new(precisions.len())?;
        for precision in precisions {
            if !sweep.begins(precision) {
                break;
            }
            let weights = TransformerLM::new(&model, self.common.seed, &device)?;
            let (config, data) = (self.config(precision), train.clone());
            runs.push(run(Trainer::new(
                weights,
                config,
                data,
                validation.clone(),
            )?)?);
        }
        let mut notes = vec![
            format!("The last loss is the mean of the last {STEPS_A_POINT} steps."),
            "All runs start from the same weights and see the same batches.".into(),
        ];
        notes.extend(sweep.note());
        let data = setup::data(&train, &validation, &self.data);
        let exact = compared::exact(&runs);
        let published = self.output.publish(&Report {
            environment: self.common.environment(&device),
            configuration: setup::configuration(data, &model, &self.config(Precision::F32)),
            columns: compared::columns(),
            rows: runs.iter().map(|run| run.row(exact)).collect(),
            answers: compared::answer(&runs).into_iter().collect(),
            notes,
            ..Default::default()
        });
        if let Some(path) = self.plot.as_ref().filter(|_| !runs.is_empty()) {
            plot::save(&compared::figure(&runs), path)?;
            common::wrote(path);
        }
        published
    }

    /// Returns the settings of a run.
    fn config(&self, precision: Precision) -> TrainConfig {
        TrainConfig {
            precision,
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
            seed: self.common.seed,
            ..Default::default()
        }
    }
}

/// Trains and evaluates.
fn run(mut trainer: Trainer) -> Result<Run> {
    let (precision, steps) = (trainer.config().precision, trainer.config().steps);
    let mut curve = Vec::new();
    trainer.plan()?;
    let begun = Instant::now();
    while let Some(StepReport { step, .. }) = trainer.step()? {
        if step.is_multiple_of(STEPS_A_POINT) || step == steps {
            let loss = trainer.history().recent_loss(STEPS_A_POINT);
            let loss = loss.unwrap_or(f64::NAN); // left out by the chart
            common::progress(format!("{precision}: step {step}, loss {loss:.4}"));
            curve.push((step as f64, loss));
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    trainer.evaluate()?;
    Ok(Run {
        precision,
        history: trainer.history().clone(),
        curve,
        loss_scale: trainer.loss_scale(),
        tokens: steps * trainer.config().tokens_per_step(),
        seconds,
    })
}
