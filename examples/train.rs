//! Trains a transformer language model on a text, by bytes or a tokenizer, and lets it write.
//!
//! Without flags it is nanoGPT's recipe for characters on a CPU (4 layers, 4 heads, width 128, windows of 64, batches
//! of 12, 2000 steps), on this crate's own sources. Its feed-forward network has three matrices of width 320 in place
//! of two of width 512, which makes the models equal in size: 0.82 M parameters here, 0.80 M there.
//!
//! ```text
//! cargo run --example train
//! cargo run --example train -- --data my.txt --out out --checkpoint out/run.safetensors
//! cargo run --example train -- --data my.txt --out out --checkpoint out/run.safetensors --resume
//! cargo run --example train -- --data my.txt --checkpoint out/run.safetensors --keep 2
//! cargo run --example train -- --data my.txt --precision f16
//! cargo run --example train -- --data my.txt --precision bf16
//! cargo run --example train -- --data my.txt --clip 0 --optimizer-in-backward
//! cargo run --example train -- --data my.txt --family HuggingFaceTB/SmolLM2-135M --lr 5e-5 --save-family tuned
//! cargo run --example train --features cuda -- --data my.txt --size small --precision bf16 --gpus 2
//! cargo run --example train -- --tokens train.bin --vocab-size 50257 --size small --context-length 512 --batch-size 4
//! ```
//!
//! With `--family` it goes on from a model of Hugging Face's and takes its tokenizer; `--save-family` writes the
//! trained one as `transformers` reads it.
//!
//! With `--gpus` it starts a rank for each GPU, which train the same model together; torchrun and mpirun start them
//! too.
//!
//! Ctrl-C, SIGTERM and SIGHUP (a closed terminal; under `nohup` it is ignored) end it after the step it is in, with a
//! checkpoint if there is `--checkpoint`, and with exit status 130, 143 or 129; a second one ends it at once.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::say_aside do not panic

mod common;
#[path = "train/family.rs"]
mod family;
#[path = "train/flags.rs"]
mod flags;
#[path = "train/signals.rs"]
mod signals;

use clap::Parser;
use common::ranks::{ExchangeFlags, RankFlags, Strategy};
use common::{Common, Effects, stdout};
use family::{Family, FamilyFlags};
use flags::{
    DataFlags, FileFlags, ModelFlags, SampleFlags, ScheduleFlag, TrainingFlags, new_model,
};
use indicatif::{ProgressBar, ProgressStyle};
use signals::{Signal, Signals};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tallow::bench::{EndToEnd, Execution};
use tallow::compile::{Batch, Step, StepConfig};
use tallow::data::Tokens;
use tallow::distributed::{Communicator, FullyShard};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::report::{Fields, Format, Report, group_digits};
use tallow::train::{StepReport, TrainConfig, Trainer};
use tallow::{Error, Result, nn};

const EXAMPLES: &str = "\
Examples:
  train --data input.txt --steps 2000 --checkpoint run.safetensors --out curves
  train --data input.txt --checkpoint run.safetensors --resume --steps 4000
  train --family HuggingFaceTB/SmolLM2-135M --data input.txt --save-family tuned";

/// Trains a transformer language model on a text, by bytes or a tokenizer, and lets it write.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
#[command(mut_arg("full_half", |arg| arg.hide(true)))] // a planned step keeps f32 parameters, and copies of weights
#[command(mut_arg("drop_casts", |arg| arg.hide(true)))]
struct Flags {
    #[command(flatten)]
    common: Common, // first: headings hold for whatever comes after them
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    family: FamilyFlags,
    #[command(flatten)]
    training: TrainingFlags,
    #[command(flatten)]
    ranks: RankFlags,
    #[command(flatten)]
    exchange: ExchangeFlags,
    /// Accepted; steps are always planned
    #[arg(long, hide_short_help = true, help_heading = "Training")]
    compile: bool,
    /// Update each parameter in backward; needs --clip 0
    #[arg(long, hide_short_help = true, help_heading = "Training")]
    optimizer_in_backward: bool,
    #[command(flatten)]
    files: FileFlags,
    #[command(flatten)]
    sample: SampleFlags,
}

fn main() -> ExitCode {
    let flags = Flags::effects().parse();
    if let Some(code) = flags.ranks.launched() {
        return code;
    }
    let mut stopped = None;
    let code = common::run(|| {
        stopped = flags.common.around(|| flags.run())?;
        Ok(())
    });
    stopped.map_or(code, |signal: Signal| ExitCode::from(signal.exit_status()))
}

impl Flags {
    /// What the flags' effects depend on.
    fn effects() -> Effects<Self> {
        Effects::<Self>::new()
            // clap lets `requires` pass where what is required conflicts with a flag that is given, as --tokens does.
            .only("with --tokens", &["vocab-size", "token-format"], |flags| {
                flags.data.tokens.is_some()
            })
            .only(
                "on a rate that changes: not with --schedule constant",
                &["schedule-steps", "min-lr", "warmup"],
                |flags| flags.training.schedule != ScheduleFlag::Constant,
            )
            .of_ranks(|flags| (&flags.ranks, &flags.common))
            .of_exchange(|flags| (&flags.ranks, &flags.exchange))
            .only(
                "with --family",
                &["ignore-config-key", "random-weights", "save-family"],
                |flags| flags.family.family.is_some(),
            )
            .only(
                "on a sample: not with --sample 0",
                &["temperature", "top-k", "top-p", "prompt"],
                |flags| flags.sample.sample > 0,
            )
            .only(
                "where tokens are drawn: not with --temperature 0",
                &["top-k", "top-p"],
                |flags| flags.sample.temperature > 0.0,
            )
    }

    /// The whole of it; a signal if one ended it.
    fn run(&self) -> Result<Option<Signal>> {
        let started = Instant::now();
        // Whatever can be refused is refused before the first step, not after the last.
        let sampling = self.sample.config(self.common.seed);
        sampling.validate()?;
        let communicator = self.ranks.join(&self.common)?;
        if communicator.rank() == 0 {
            self.files.check()?;
        }
        let family = self.family.open(&self.model, &self.data)?;
        let tokenizer = family.as_ref().and_then(|family| family.tokenizer.as_ref());
        let data = match tokenizer {
            Some(tokenizer) => self.data.open()?.encoded(tokenizer)?,
            None => self.data.open()?,
        };
        let (train, validation) = data.split(self.data.validation_fraction)?;
        let prompt = match (&self.data.tokens, tokenizer) {
            (Some(_), _) => validation.slice(0..1)?.to_vec()?,
            (None, Some(tokenizer)) => self.sample.prompt_ids(tokenizer)?,
            (None, None) => self.sample.prompt_bytes(),
        };
        let model = match &family {
            Some(family) => family.config.clone(),
            None => self.model.config(train.vocab_size())?,
        };
        let precision = self.training.precision.precision()?;
        let mut config =
            self.training
                .config(self.model.context_length, self.common.seed, precision)?;
        config.optimizer_in_backward = self.optimizer_in_backward;
        config.keep = self.files.keep.map_or(1, usize::from);
        config.accumulation = self
            .training
            .accumulation
            .unwrap_or(communicator.world_size());
        let header = self.header(
            family.as_ref(),
            &model,
            &config,
            [&train, &validation],
            &communicator,
        )?;
        let data = [train, validation];
        let mut trainer = self.trainer(family.as_ref(), model, config, data, &communicator)?;
        let text = header.to_text(&common::outputs::terminal_layout());
        self.say(format!("{}\n", text.trim_end()))?;

        self.save(&trainer)?;
        let mut speed = Speed::default();
        if let Some(signal) = self.train(&mut trainer, &mut speed)? {
            let kept = match &self.files.checkpoint {
                Some(path) => format!("the run is in {}, --resume goes on", path.display()),
                None => "without --checkpoint nothing is kept of it".into(),
            };
            self.say(format!(
                "\n{signal}: stopped after step {} of {}; {kept}",
                trainer.steps_taken(),
                trainer.config().steps
            ))?;
            return Ok(Some(signal));
        }
        let evaluations = &trainer.history().evaluations;
        let last = evaluations.last().map_or(f64::NAN, |last| last.loss);
        self.say(format!(
            "\nvalidation loss {last:.4} nats a {}, after {} steps; {:.1} s in all, {} tokens/s in training",
            self.unit(),
            trainer.steps_taken(),
            started.elapsed().as_secs_f64(),
            speed.text(),
        ))?;
        if common::fallbacks() != "none" {
            self.say(format!("reference ops: {}", common::fallbacks()))?;
        }
        let folder = self.family.save_family.as_ref();
        if folder.is_none() && self.sample.sample == 0 {
            return Ok(None);
        }
        let Some(model) = trainer.gather_model()? else {
            return Ok(None); // rank 0 has it
        };
        if let (Some(family), Some(folder)) = (&family, folder) {
            family.save(&model, folder)?;
            self.say(format!("the trained model is in {}", folder.display()))?;
        }
        if self.sample.sample > 0 {
            let written = model.generate(&prompt, &sampling)?;
            let ids = [prompt, written].concat();
            let text = match tokenizer {
                Some(tokenizer) => family::text(tokenizer, &ids),
                None => self.data.text(&ids),
            };
            self.say(format!("\n{}", stdout::for_terminal(&text)))?;
        }
        Ok(None)
    }

    /// What one token is.
    fn unit(&self) -> &'static str {
        match self.family.family {
            Some(_) => "token",
            None => self.data.unit(),
        }
    }

    /// The run: a new one, or the saved one.
    fn trainer(
        &self,
        family: Option<&Family>,
        model: TransformerConfig,
        config: TrainConfig,
        [train, validation]: [Tokens; 2],
        communicator: &Communicator,
    ) -> Result<Trainer> {
        let device = communicator.device().clone();
        self.check_memory(&model, &config, communicator)?;
        let sharded = match self.exchange.strategy {
            Strategy::FullyShard if communicator.world_size() > 1 => {
                Some(FullyShard::new(communicator, self.exchange.parts())?)
            }
            _ => None,
        };
        let mut trainer = match &self.files.checkpoint {
            Some(path) if self.files.resume => match &sharded {
                Some(sharded) => {
                    Trainer::resume_fully_sharded(path, &model, sharded, config, train, validation)
                }
                None => Trainer::resume(path, &model, config, train, validation, &device),
            },
            Some(path) if path.exists() => Err(Error::Config {
                config: "train",
                field: "--checkpoint",
                expected: "a file that is not there yet".into(),
                got: format!("{}, which is", path.display()),
                hint: "go on with --resume, or move it away".into(),
            }),
            _ => {
                let (seed, precision) = (self.common.seed, config.precision);
                match &sharded {
                    None => {
                        let model = match family {
                            Some(family) => family.model(seed, precision, &device)?,
                            None => new_model(&model, seed, precision, &device)?,
                        };
                        Trainer::new(model, config, train, validation)
                    }
                    Some(sharded) => {
                        let weights = match family {
                            Some(family) => family.weights(seed, precision)?,
                            None => nn::seeded(seed, precision.parameter_dtype(), &device),
                        };
                        let vb = sharded.builder(weights);
                        let model = TransformerLM::from_var_builder(&model, vb)?;
                        Trainer::fully_sharded(model, sharded, config, train, validation)
                    }
                }
            }
        }?;
        if communicator.world_size() > 1 && sharded.is_none() {
            trainer.replicate(communicator, self.exchange.config())?;
            if self.exchange.strategy == Strategy::ShardedOptimizer {
                trainer.shard_optimizer()?;
            }
        }
        trainer.plan()?; // what cannot be planned is refused before anything is said
        Ok(trainer)
    }

    /// What runs, where, on what.
    fn header(
        &self,
        family: Option<&Family>,
        model: &TransformerConfig,
        config: &TrainConfig,
        [train, validation]: [&Tokens; 2],
        communicator: &Communicator,
    ) -> Result<Report> {
        let count = |n: usize| group_digits(n as u64);
        let mut fields = Fields::new();
        fields.insert(
            "data",
            format!(
                "{} to train, {} to evaluate ({})",
                count(train.len()),
                count(validation.len()),
                self.data.name(self.unit())
            ),
        );
        fields.insert("model", common::models::sizes(model));
        fields.insert("longest context", model.context_length);
        if let Some(family) = family {
            fields.insert("family", family.name());
        }
        fields.insert("attention", model.attention.name());
        fields.insert("checkpointing", model.checkpointing.to_string());
        fields.insert("precision", config.precision.name());
        if communicator.world_size() > 1 {
            let (ranks, config) = (communicator.world_size(), self.exchange.config());
            let dtype = config.dtype;
            let dtype = dtype.map_or("their own dtype", |dtype| dtype.as_str());
            let exchange = match self.exchange.strategy {
                Strategy::FullyShard => format!("buckets of {} MiB", self.exchange.bucket_mib),
                _ => config.exchange.to_string(),
            };
            let divided = match self.exchange.strategy {
                Strategy::Replicated => "",
                Strategy::ShardedOptimizer => ", the optimizer divided among them",
                Strategy::FullyShard => ", weights, gradients and optimizer divided among them",
            };
            fields.insert(
                "ranks",
                format!("{ranks}, gradients averaged in {dtype}: {exchange}{divided}"),
            );
        }
        fields.insert(
            "step",
            format!(
                "{} x {} windows of {}: {} tokens",
                config.accumulation,
                config.batch_size,
                config.sequence_length,
                count(config.tokens_per_step())
            ),
        );
        fields.insert("steps", count(config.steps));
        fields.insert("schedule", config.schedule.to_string());
        let optimizer = &config.optimizer;
        fields.insert(
            "optimizer",
            format!(
                "AdamW{}, betas {} and {}, weight decay {}, gradients {}",
                if self.optimizer_in_backward {
                    " in backward"
                } else {
                    ""
                },
                optimizer.betas.0,
                optimizer.betas.1,
                optimizer.weight_decay,
                match (config.max_grad_norm, config.max_grad_value) {
                    (None, None) => "not clipped".into(),
                    (Some(norm), None) => format!("clipped at norm {norm}"),
                    (None, Some(value)) => format!("clipped at {value}"),
                    (Some(norm), Some(value)) => format!("clipped at norm {norm} and at {value}"),
                }
            ),
        );
        Ok(Report {
            environment: self.common.environment(communicator.device()),
            configuration: fields,
            ..Default::default()
        })
    }

    /// Takes all steps that are left, or those up to a signal; evaluates and saves on the way, and at the end.
    fn train(&self, trainer: &mut Trainer, speed: &mut Speed) -> Result<Option<Signal>> {
        let signals = Signals::listen()?;
        let steps = trainer.config().steps;
        let bar = ProgressBar::new(steps as u64).with_position(trainer.steps_taken() as u64);
        let style = ProgressStyle::with_template("{bar:15} {pos}/{len}  ETA {eta}  {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.reset_eta();

        if trainer.history().evaluations.is_empty() || trainer.is_done() {
            let loss = trainer.evaluate()?;
            self.announce(&bar, trainer, None, loss, speed)?;
        }
        let save_every = self
            .files
            .checkpoint_every
            .map_or(self.training.evaluate_every, usize::from);
        loop {
            if let Some(signal) = signals.received(trainer.communicator())? {
                bar.finish_and_clear();
                self.save(trainer)?;
                return Ok(Some(signal));
            }
            let begun = Instant::now();
            let Some(report) = trainer.step()? else { break };
            speed.add(trainer.config().tokens_per_step(), begun.elapsed());
            if report.tokens == 0 {
                let line = format!("step {:>6}  skipped: no target counts", report.step);
                bar.suspend(|| self.say(line))?;
            }
            bar.inc(1);
            bar.set_message(message(trainer, &report, speed));
            if trainer.evaluation_is_due() {
                let loss = trainer.evaluate()?;
                self.announce(&bar, trainer, Some(&report), loss, speed)?;
            }
            if trainer.is_done() || report.step.is_multiple_of(save_every) {
                self.save(trainer)?;
            }
        }
        bar.finish_and_clear();
        Ok(None)
    }

    /// A line for an evaluation, and the curve up to it.
    fn announce(
        &self,
        bar: &ProgressBar,
        trainer: &Trainer,
        report: Option<&StepReport>,
        validation_loss: f64,
        speed: &Speed,
    ) -> Result<()> {
        let mut line = format!(
            "step {:>6}  validation loss {validation_loss:.4}",
            trainer.steps_taken()
        );
        if let Some(report) = report {
            line += &format!(
                "  loss {:.4}  lr {:.2e}  {} tokens/s{}",
                recent_loss(trainer),
                report.learning_rate,
                speed.text(),
                scale(trainer)
            );
        }
        bar.suspend(|| self.say(line))?;
        if let (Some(folder), true) = (&self.files.out, is_first(trainer)) {
            let history = trainer.history();
            history.chart().save(folder.join(flags::LOSS_SVG))?;
            history
                .report()
                .save(Format::Csv, folder.join(flags::LOSS_CSV))?;
        }
        Ok(())
    }

    /// A line on stdout. Who only wanted the first lines (`| head`) does not stop a training that leaves files.
    fn say(&self, line: impl std::fmt::Display) -> Result<()> {
        stdout::or_files(stdout::line(line), self.files.is_any_given())
    }

    fn save(&self, trainer: &Trainer) -> Result<()> {
        match &self.files.checkpoint {
            Some(path) => trainer.save(path),
            None => Ok(()),
        }
    }

    /// Refuses a run that does not fit in memory, before anything is allocated.
    fn check_memory(
        &self,
        model: &TransformerConfig,
        config: &TrainConfig,
        communicator: &Communicator,
    ) -> Result<()> {
        let device = communicator.device();
        let run = EndToEnd {
            config: model.clone(),
            batch_size: config.batch_size,
            sequence_length: config.sequence_length,
            precision: config.precision,
            optimizer: config.optimizer,
            execution: Execution::Planned,
            ..Default::default()
        };
        // First of all, since it may change where blocks come from.
        let available_bytes = common::memory::available_bytes(device, None, [&run])?;
        let step = StepConfig {
            accumulation: config.accumulation.div_ceil(communicator.world_size()),
            ranks: self.exchange.step_ranks(communicator.shard()),
            ..config.step()
        };
        let least_bytes =
            Step::least_bytes(model, &step, [config.batch_size, config.sequence_length])?;
        let wanted_bytes = match available_bytes {
            // Planning what cannot fit would take too long.
            Some(available_bytes) if least_bytes > available_bytes => least_bytes,
            _ => {
                let rows = config.batch_size.saturating_mul(step.accumulation);
                let batch = Batch::hollow(rows, config.sequence_length)?;
                let (plan, _) = Step::plan_of(device, model, &step, batch)?;
                plan.with_moments(config.optimizer.moments).total_bytes()
            }
        };
        match available_bytes {
            Some(available_bytes) if wanted_bytes > available_bytes => Err(Error::OutOfMemory {
                what: "the training step".into(),
                wanted_bytes,
                available_bytes,
            }),
            _ => Ok(()),
        }
    }
}

/// Whether this rank writes files.
fn is_first(trainer: &Trainer) -> bool {
    trainer.communicator().is_none_or(|ranks| ranks.rank() == 0)
}

/// Tokens trained on and the time it took, evaluations and files left out.
#[derive(Default)]
struct Speed {
    tokens: usize,
    time: Duration,
}

impl Speed {
    fn add(&mut self, tokens: usize, time: Duration) {
        self.tokens += tokens;
        self.time += time;
    }

    /// Tokens a second.
    fn text(&self) -> String {
        match self.tokens {
            0 => "n/a".into(),
            tokens => group_digits((tokens as f64 / self.time.as_secs_f64()) as u64),
        }
    }
}

/// What stands beside the progress bar.
fn message(trainer: &Trainer, report: &StepReport, speed: &Speed) -> String {
    let evaluations = &trainer.history().evaluations;
    let validation = match evaluations.last() {
        Some(last) => format!("{:.3}", last.loss),
        None => "n/a".into(),
    };
    format!(
        "loss {:.3}  validation {validation}  lr {:.2e}  {} tokens/s",
        recent_loss(trainer),
        report.learning_rate,
        speed.text()
    )
}

/// The mean over as many of the last steps as lie between evaluations.
fn recent_loss(trainer: &Trainer) -> f64 {
    let steps = trainer.config().evaluate_every;
    trainer.history().recent_loss(steps).unwrap_or(f64::NAN)
}

/// The loss scale, where there is one, and the steps that it cost so far.
fn scale(trainer: &Trainer) -> String {
    let skipped = trainer.history().skipped.len();
    match trainer.loss_scale() {
        Some(scale) => format!("  scale {scale}  skipped {skipped}"),
        None => String::new(),
    }
}
