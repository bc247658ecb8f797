//! Trains the same model in f32, bf16 and f16, on the same batches from the same weights, and compares the losses.
//!
//! Half precision is autocast's, with f32 parameters, and the loss of f16 is scaled. Without flags it is `train`'s
//! model and data, for 300 steps.
//!
//! ```text
//! cargo run --example precision_curves -- --plot curves.svg
//! cargo run --example precision_curves -- --data my.txt --precision f32 bf16 --full-half --format markdown
//! ```

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[allow(dead_code)] // files and samples are train's alone
#[path = "train/flags.rs"]
mod flags;

use clap::Parser;
use common::{Common, Effects, Output, values};
use flags::{DataFlags, ModelFlags, TrainingFlags, check_room, new_model};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tallow::candle::{DType, Device, Tensor};
use tallow::data::{Batch, RandomBatches, SequentialBatches, Tokens};
use tallow::memory::{self, Kernels, Mode, Workload};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::ForwardContext;
use tallow::ops::DropoutKey;
use tallow::optim::{
    AdamW, GradScaler, GradScalerConfig, GradientAccumulator, clip_grad_norm,
    clip_grad_norm_checked, clip_grad_value, decay_matrices_only,
};
use tallow::precision::Precision;
use tallow::report::plot::{Figure, LineChart, Series};
use tallow::report::{Column, Fields, Report, group_digits};
use tallow::train::{Evaluation, History, TrainConfig};
use tallow::{Error, Result, backward, no_grad};

/// Steps whose mean loss is a run's last, and a point of the curves: one batch's loss says little.
const STEPS_A_POINT: usize = 10;

/// A loss scale at which gradients that overflow are no longer the scale's fault: f16's smallest normal number, 2^-14.
const SMALLEST_SCALE: f64 = 1.0 / 16384.0;

/// `train` evaluates more often: with the default data and sizes that takes as long as a hundred steps each time.
const EVALUATE_HELP: &str = "Steps from one evaluation to the next, besides the one at the end";

/// Trains the same model in f32, bf16 and f16, on the same batches from the same weights, and compares the losses.
#[derive(Parser)]
#[command(version)]
#[command(mut_arg("steps", |arg| arg.default_value("300").help("Steps of each run")))]
#[command(mut_arg("evaluate_every", |arg| arg.default_value("300").help(EVALUATE_HELP)))]
#[command(mut_arg("precision", |arg| arg.default_values(["f32", "bf16", "f16"])))]
struct Flags {
    #[command(flatten)]
    common: Common, // first: headings hold for whatever comes after them
    #[command(flatten)]
    output: Output,

    /// Draw the curves, and how far they are from f32's, into this file: .svg or .png
    #[arg(long, value_parser = values::picture())]
    plot: Option<PathBuf>,

    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    training: TrainingFlags,
}

/// A run at its end.
struct Run {
    precision: Precision,
    history: History,
    loss_scale: Option<f64>,
    tokens_per_step: usize,
    /// Spent in steps, evaluations left out.
    time: Duration,
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
            .of_data(|flags| &flags.data)
            .of_training(|flags| &flags.training)
    }

    fn run(&self) -> Result<()> {
        self.output.check_with([&self.plot])?;
        self.output.check_columns([columns()])?;
        let precisions = self.training.precision.precisions()?;
        let (train, validation) = self.data.open()?.split(self.data.validation_fraction)?;
        let runs = precisions
            .iter()
            .map(|precision| self.train(*precision, &train, &validation))
            .collect::<Result<Vec<_>>>()?;
        let report = self.report(&runs, &train, &validation)?;
        let published = self.output.publish(&report);
        if let Some(path) = &self.plot {
            figure(&runs).save(path)?;
        }
        published
    }

    /// A run in a loop of its own, op by op: a planned step keeps parameters in f32, which not every precision does.
    fn train(&self, precision: Precision, train: &Tokens, validation: &Tokens) -> Result<Run> {
        let (device, seed) = (self.common.device()?, self.common.seed);
        let sizes = self.model.config(train.vocab_size())?;
        let config = self
            .training
            .config(sizes.context_length, seed, Precision::F32)?;
        let config = TrainConfig {
            precision,
            ..config
        };
        if let Some(id) = config
            .separator
            .filter(|id| *id as usize >= sizes.vocab_size)
        {
            return Err(Error::Config {
                config: common::PROGRAM,
                field: "--separator",
                expected: format!("under the vocabulary of {}", sizes.vocab_size),
                got: id.to_string(),
                hint: "it is the id of the token that documents end with".into(),
            });
        }
        let wanted_bytes = eager_bytes(&sizes, &config, &device)?;
        check_room(wanted_bytes, &sizes, &config, false, &device)?;
        let model = new_model(&sizes, seed, precision, &device)?;
        let parameters = model.parameters();
        let groups = decay_matrices_only(parameters.clone(), config.optimizer);
        let mut optimizer = AdamW::with_groups(groups)?;
        let is_scaled = precision.dtype() == DType::F16;
        let mut scaler = GradScaler::new(GradScalerConfig {
            enabled: is_scaled,
            ..config.loss_scaling
        })?;
        let (batch_size, length) = (config.batch_size, config.sequence_length);
        let batches = RandomBatches::new(train, batch_size, length, seed)?;
        let held_out = SequentialBatches::new(validation, batch_size, length)?;
        let max_norm = config.max_grad_norm.unwrap_or(f64::INFINITY);
        let (mut history, mut time) = (History::default(), Duration::ZERO);
        for step in 0..config.steps {
            let begun = Instant::now();
            let mut accumulator = GradientAccumulator::new(parameters.clone());
            let mut sum = 0.0;
            for part in 0..config.accumulation {
                let index = (step * config.accumulation + part) as u64;
                let dropout = match sizes.dropout.is_any() {
                    true => {
                        let key = DropoutKey::of_micro_batch(seed, optimizer.steps(), part)?;
                        Some(key.to_device(&device)?)
                    }
                    false => None,
                };
                let batch = batches.batch(index, &device)?;
                let targets = num_targets(&config, &batch)?;
                if targets > 0 {
                    let loss = loss_of(&config, &model, &batch, dropout)?;
                    sum += value(&loss)? * targets as f64;
                    let scaled = scaler.scale(&loss)?;
                    drop(loss); // who holds it keeps the graph
                    let gradients = backward(scaled)?;
                    accumulator.add_weighted(gradients, targets as f64)?;
                }
            }
            let targets = accumulator.total_weight();
            let loss = sum / targets;
            history
                .losses
                .push(if loss.is_finite() { loss } else { f64::NAN });
            if targets == 0.0 {
                history.skipped.push(step + 1);
            } else {
                let mut gradients = accumulator.mean()?;
                if is_scaled {
                    scaler.unscale(&mut gradients, &parameters)?;
                    clip_grad_norm(&mut gradients, &parameters, max_norm)?; // what has overflowed is skipped below
                } else {
                    clip_grad_norm_checked(&mut gradients, &parameters, max_norm)?;
                }
                if let Some(value) = config.max_grad_value {
                    clip_grad_value(&mut gradients, &parameters, value)?;
                }
                optimizer.set_learning_rate(config.schedule.learning_rate(step));
                let stepped = scaler.step(&mut optimizer, &mut gradients)?;
                if !stepped && scaler.loss_scale() <= SMALLEST_SCALE {
                    return Err(not_finite("gradients at every loss scale", step + 1));
                }
                scaler.update()?;
                if !stepped {
                    history.skipped.push(step + 1);
                }
            }
            time += begun.elapsed();
            let taken = step + 1;
            if taken.is_multiple_of(STEPS_A_POINT) {
                let loss = history.losses[step];
                common::progress(format!("{precision}: step {taken}, loss {loss:.4}"));
            }
            if taken == config.steps || taken.is_multiple_of(config.evaluate_every) {
                let loss = evaluate(&config, &model, &held_out, &device)?;
                if !loss.is_finite() {
                    return Err(not_finite("the validation loss", taken));
                }
                history.evaluations.push(Evaluation { step: taken, loss });
            }
        }
        Ok(Run {
            precision,
            history,
            loss_scale: is_scaled.then(|| scaler.loss_scale()),
            tokens_per_step: config.tokens_per_step(),
            time,
        })
    }

    fn report(&self, runs: &[Run], train: &Tokens, validation: &Tokens) -> Result<Report> {
        let exact = exact(runs);
        let rows: Vec<Fields> = runs.iter().map(|run| run.row(exact)).collect();
        let device = self.common.device()?;
        let mut environment = self.common.environment(&device);
        environment.insert("reference ops", common::fallbacks());
        Ok(Report {
            environment,
            configuration: self.configuration(train, validation)?,
            columns: columns(),
            rows,
            notes: vec![
                format!("The last loss is the mean of the last {STEPS_A_POINT} steps."),
                "All runs start from the same weights, rounded where parameters are in half precision, and see the \
                 same \
                 batches."
                    .into(),
            ],
            ..Default::default()
        })
    }

    fn configuration(&self, train: &Tokens, validation: &Tokens) -> Result<Fields> {
        let count = |n: usize| group_digits(n as u64);
        let model = self.model.config(train.vocab_size())?;
        let mut fields = Fields::new();
        let (training, held_out) = (count(train.len()), count(validation.len()));
        let data = format!(
            "{training} to train, {held_out} to evaluate ({})",
            self.data.name(self.data.unit())
        );
        fields.insert("data", data);
        let sizes = format!(
            "d_model {}, d_ff {}, layers {}, heads {}, context {}",
            model.d_model, model.d_ff, model.num_layers, model.num_heads, model.context_length
        );
        fields.insert("model", sizes);
        fields.insert("attention", model.attention.name());
        fields.insert("batch size", self.training.batch_size);
        fields.insert("steps", self.training.steps);
        Ok(fields)
    }
}

impl Run {
    fn row(&self, exact: Option<&Run>) -> Fields {
        let mut row = Fields::new();
        row.insert("precision", self.precision.name());
        row.insert("first_loss", self.history.losses.first().copied());
        row.insert("last_loss", self.last_loss());
        row.insert("validation_loss", self.validation_loss());
        let percent = |of: fn(&Run) -> Option<f64>| Some((of(self)? / of(exact?)? - 1.0) * 100.0);
        row.insert("from_f32_percent", percent(Run::last_loss));
        row.insert("validation_from_f32_percent", percent(Run::validation_loss));
        row.insert("skipped_steps", self.history.skipped.len());
        row.insert("loss_scale", self.loss_scale);
        let steps = self.history.losses.len();
        let seconds = self.time.as_secs_f64();
        row.insert("step_ms", seconds * 1e3 / steps as f64);
        row.insert(
            "tokens_per_s",
            (self.tokens_per_step * steps) as f64 / seconds,
        );
        row
    }

    fn last_loss(&self) -> Option<f64> {
        self.history.recent_loss(STEPS_A_POINT)
    }

    fn validation_loss(&self) -> Option<f64> {
        self.history.evaluations.last().map(|last| last.loss)
    }

    /// (step, mean loss of the steps up to it).
    fn points(&self) -> Vec<(f64, f64)> {
        let chunks = self.history.losses.chunks(STEPS_A_POINT).enumerate();
        let points = chunks.map(|(i, losses)| {
            let finite: Vec<f64> = losses.iter().copied().filter(|l| l.is_finite()).collect();
            let mean = finite.iter().sum::<f64>() / finite.len() as f64; // NaN is left out of charts
            ((i * STEPS_A_POINT + losses.len()) as f64, mean)
        });
        points.collect()
    }
}

/// What an eager step takes, by its account.
fn eager_bytes(model: &TransformerConfig, config: &TrainConfig, device: &Device) -> Result<u64> {
    let workload = Workload {
        batch_size: config.batch_size,
        sequence_length: config.sequence_length,
        mode: Mode::TrainStep,
        attention: model.attention,
        precision: config.precision,
        checkpointing: model.checkpointing,
        kernels: Kernels::of(device),
        moments: config.optimizer.moments,
    };
    Ok(memory::estimate(model, &workload)?.peak_bytes)
}

/// How many targets of a batch count: what follows the end of a document does not.
fn num_targets(config: &TrainConfig, batch: &Batch) -> Result<usize> {
    let Some(separator) = config.separator else {
        return Ok(batch.num_targets());
    };
    let tokens = batch.inputs.flatten_all()?.to_vec1::<u32>()?;
    Ok(tokens.iter().filter(|token| **token != separator).count())
}

/// The mean loss over the targets that count.
fn loss_of(
    config: &TrainConfig,
    model: &TransformerLM,
    batch: &Batch,
    dropout: Option<DropoutKey>,
) -> Result<Tensor> {
    let (tokens, targets) = (&batch.inputs, &batch.targets);
    config.precision.run(|| match config.separator {
        Some(separator) => model.loss_of_documents(tokens, targets, separator, dropout.as_ref()),
        None => {
            let context = ForwardContext {
                dropout,
                ..Default::default()
            };
            model.loss_with(tokens, targets, &context, None)
        }
    })
}

/// The mean loss over all targets of the held-out text that count.
fn evaluate(
    config: &TrainConfig,
    model: &TransformerLM,
    held_out: &SequentialBatches,
    device: &Device,
) -> Result<f64> {
    let (mut sum, mut all) = (0.0, 0);
    for batch in held_out.iter(device) {
        let batch = batch?;
        let targets = num_targets(config, &batch)?;
        if targets > 0 {
            let loss = no_grad(|| loss_of(config, model, &batch, None))?;
            sum += value(&loss)? * targets as f64;
            all += targets;
        }
    }
    Ok(sum / all as f64)
}

/// The error of a run that has diverged.
fn not_finite(what: &str, step: usize) -> Error {
    Error::Data {
        what: format!("{what} in step {step}"),
        expected: "finite numbers".into(),
        got: "infinity or NaN".into(),
        hint: "lower the learning rate".into(),
    }
}

/// A loss as a number.
fn value(loss: &Tensor) -> Result<f64> {
    let loss = loss.detach().to_device(&Device::Cpu)?;
    Ok(loss.to_dtype(DType::F64)?.to_scalar()?)
}

/// The run that the others are compared with.
fn exact(runs: &[Run]) -> Option<&Run> {
    runs.iter().find(|run| run.precision == Precision::F32)
}

/// The curves, and below them their distance from f32's, which shows what they do not.
fn figure(runs: &[Run]) -> Figure {
    let line = |run: &Run| Series::new(run.precision.name(), run.points());
    let mut charts = vec![LineChart {
        title: format!("Loss (mean of {STEPS_A_POINT} steps)"),
        x_label: "step".into(),
        y_label: "loss (nats a token)".into(),
        series: runs.iter().map(line).collect(),
        ..Default::default()
    }];
    if let Some(exact) = exact(runs) {
        let exact = exact.points();
        let distance = |run: &Run| {
            let both = run.points().into_iter().zip(&exact);
            let points =
                both.map(|((step, loss), (_, exact))| (step, (loss / exact - 1.0) * 100.0));
            Series::new(run.precision.name(), points.collect())
        };
        charts.push(LineChart {
            title: "Distance from f32".into(),
            x_label: "step".into(),
            y_label: "loss over f32's (%)".into(),
            series: runs.iter().map(distance).collect(),
            ..Default::default()
        });
    }
    Figure { charts }
}

fn columns() -> Vec<Column> {
    vec![
        Column::text("precision", "Precision"),
        Column::number("first_loss", "First loss", "nats", 4).minor(2),
        Column::number("last_loss", "Last loss", "nats", 4),
        Column::number("from_f32_percent", "From f32", "%", 3),
        Column::number("validation_loss", "Validation", "nats", 4).minor(1),
        Column::number("validation_from_f32_percent", "Validation from f32", "%", 3).minor(2),
        Column::count("skipped_steps", "Skipped steps").minor(2),
        Column::number("loss_scale", "Loss scale", "", 0).minor(3),
        Column::ms("step_ms", "Step"),
        Column::count("tokens_per_s", "Tokens/s"),
    ]
}
