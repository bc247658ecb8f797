//! Trains a transformer language model on a text, by bytes or a tokenizer, and lets it write.
//!
//! Without flags it is nanoGPT's recipe for characters on a CPU (4 layers, 4 heads, width 128, windows of 64, batches
//! of 12, 2000 steps), on this crate's own sources. Its feed-forward network has three matrices of width 320 in place
//! of two of width 512, which makes the models equal in size: 0.82 M parameters here, 0.80 M there.
//!
//! ```text
//! cargo run --example train -- --data my.txt --out out --checkpoint out/run.safetensors --resume
//! cargo run --example train -- --data my.txt --clip 0 --optimizer-in-backward
//! cargo run --example train -- --data my.txt --family HuggingFaceTB/SmolLM2-135M --lr 5e-5 --save-family tuned
//! cargo run --example train --features cuda -- --data my.txt --size small --precision bf16 --gpus 2
//! cargo run --example train -- --tokens train.bin --vocab-size 50257 --size small --context-length 512 --batch-size 4
//! ```
//!
//! Ctrl-C, SIGTERM and SIGHUP (a closed terminal; ignored under `nohup`) end it after the current step, with a
//! checkpoint if there is `--checkpoint`, and with exit status 130, 143 or 129. A second one ends it at once.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
#[path = "train/family.rs"]
mod family;
#[path = "train/flags.rs"]
mod flags;
#[path = "train/signals.rs"]
mod signals;

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use clap::{CommandFactory, Parser};
use common::effects::{self, Effect, only};
use common::modes::OptimizerFlag;
use common::ranks::{ExchangeFlags, RankFlags};
use common::{Common, rates, stdout};
use family::{Family, FamilyFlags};
use flags::{
    DataFlags, FileFlags, LOSS_CSV, LOSS_SVG, ModelFlags, SampleFlags, ScheduleFlag, TrainingFlags,
};
use indicatif::{ProgressBar, ProgressStyle};
use signals::{Signal, Signals};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tallow::Result;
use tallow::bench::{EndToEnd, Execution};
use tallow::compile::{Batch, Step, StepConfig, StepRanks};
use tallow::data::Tokens;
use tallow::distributed::{Communicator, FullyShard};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{self, Layer};
use tallow::report::{Fields, Format, Report, group_digits, plot};
use tallow::train::{StepReport, TrainConfig, Trainer};

const EXAMPLES: &str = "\
Examples:
  train --data input.txt --steps 2000 --checkpoint run.safetensors --out curves
  train --data input.txt --checkpoint run.safetensors --resume --steps 4000
  train --family HuggingFaceTB/SmolLM2-135M --data input.txt --save-family tuned";

/// Trains a transformer language model on a text, by bytes or a tokenizer, and lets it write.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
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
    /// Update each parameter in backward; needs --clip 0
    #[arg(long, hide_short_help = true, help_heading = "Training")]
    optimizer_in_backward: bool,
    #[command(flatten)]
    files: FileFlags,
    #[command(flatten)]
    sample: SampleFlags,
}

fn main() -> ExitCode {
    let flags = effects::parse(Flags::command(), Flags::effects);
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
    /// Returns what the flags' effects depend on.
    fn effects(&self) -> Vec<Effect> {
        use OptimizerFlag::{Muon, Sgd};
        let schedule = self.training.schedule;
        let is_constant = schedule == ScheduleFlag::Constant;
        let restarts = schedule == ScheduleFlag::Restarts;
        let has_momentum = [Sgd, Muon].contains(&self.training.optimizer);
        let has_family = self.family.family.is_some();
        let mut effects = self.ranks.effects(&self.common);
        effects.extend(self.exchange.effects(&self.ranks));
        effects.extend([
            // clap lets `requires` pass where what is required conflicts with a flag that is given, as --tokens does.
            only("with --tokens", self.data.tokens.is_some(), &["vocab-size"]),
            only(
                "on a rate that changes: not with --schedule constant",
                !is_constant,
                &["schedule-steps", "min-lr"],
            ),
            only(
                "with a warm-up: not with --schedule constant or restarts",
                !is_constant && !restarts,
                &["warmup"],
            ),
            only(
                "with --schedule wsd or restarts",
                schedule == ScheduleFlag::Wsd || restarts,
                &["decay-steps"],
            ),
            only("with --optimizer adamw or lion", !has_momentum, &["betas"]),
            only("with --optimizer sgd or muon", has_momentum, &["momentum"]),
            only(
                "with --family",
                has_family,
                &["ignore-config-key", "random-weights", "save-family"],
            ),
            only(
                "on a sample: not with --sample 0",
                self.sample.sample > 0,
                &["temperature", "top-k", "top-p", "prompt"],
            ),
            only(
                "where tokens are drawn: not with --temperature 0",
                self.sample.temperature > 0.0,
                &["top-k", "top-p"],
            ),
        ]);
        effects
    }

    /// Trains and writes a sample. Returns the signal that ended it, if one did.
    fn run(&self) -> Result<Option<Signal>> {
        let started = Instant::now();
        // Whatever can be refused is refused before the first step, not after the last.
        let sampling = self.sample.config(self.common.seed);
        sampling.validate()?;
        let communicator = self.ranks.join(&self.common)?;
        if communicator.rank() == 0 {
            self.files.check()?;
        }
        let (family, vocabulary) = self.family.open(&self.model, &self.data)?;
        let data = self.data.open(&vocabulary)?;
        let (train, validation) = data.split(self.data.validation_fraction)?;
        let prompt = vocabulary.prompt(&self.sample, &validation)?;
        let model = match &family {
            Some(family) => family.config.clone(),
            None => self.model.config(train.vocab_size())?,
        };
        let unit = vocabulary.unit();
        let [train_len, validation_len] =
            [&train, &validation].map(|tokens| group_digits(tokens.len() as u64));
        let path = self
            .data
            .tokens
            .as_ref()
            .unwrap_or(&self.data.data)
            .display();
        let data =
            format!("{train_len} to train, {validation_len} to evaluate ({unit}s of {path})");
        let trainer = self.trainer(family.as_ref(), &model, [train, validation], &communicator)?;
        let header = Report {
            environment: self.common.environment(communicator.device()),
            configuration: self.configuration(data, family.as_ref(), &trainer),
            ..Default::default()
        };
        let header = header.to_text(Some(common::outputs::terminal_width()));
        self.say(format!("{}\n", header.trim_end()))?;

        let mut run = Run::new(self, trainer)?;
        run.save()?;
        let signal = run.train()?;
        run.bar.finish_and_clear();
        let trainer = &run.trainer;
        let (step, steps) = (trainer.steps_taken(), trainer.config().steps);
        if let Some(signal) = signal {
            let kept = match &self.files.checkpoint {
                Some(path) => format!("the run is in {}, --resume goes on", path.display()),
                None => "without --checkpoint nothing is kept of it".into(),
            };
            self.say(format!(
                "\n{signal}: stopped after step {step} of {steps}; {kept}"
            ))?;
            return Ok(Some(signal));
        }
        let evaluations = &trainer.history().evaluations;
        let last = evaluations.last().map_or(f64::NAN, |last| last.loss);
        self.say(format!(
            "\nvalidation loss {last:.4} nats a {unit}, after {step} steps; {:.1} s in all, {} in training",
            started.elapsed().as_secs_f64(),
            run.speed(),
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
            let text = vocabulary.text(&[prompt, written].concat());
            self.say(format!("\n{}", stdout::for_terminal(&text)))?;
        }
        Ok(None)
    }

    /// Returns how this rank's step exchanges.
    fn step_ranks(&self, communicator: &Communicator) -> StepRanks {
        match communicator.world_size() {
            1 => StepRanks::Single,
            _ => self.exchange.step_ranks(communicator.shard()),
        }
    }

    fn config(&self, world_size: usize) -> Result<TrainConfig> {
        let (flags, seed) = (&self.training, self.common.seed);
        let config = TrainConfig {
            batch_size: flags.batch_size,
            sequence_length: self.model.trained.context_length,
            accumulation: flags.accumulation.unwrap_or(world_size),
            steps: flags.steps,
            schedule: flags.schedule(),
            optimizer: flags.rule(seed)?,
            max_grad_norm: (flags.clip != 0.0).then_some(flags.clip),
            attention: Some(self.model.trained.attention),
            checkpointing: Some(self.model.activation_checkpointing),
            max_grad_value: (flags.clip_value != 0.0).then_some(flags.clip_value),
            precision: flags.precision.precision()?,
            evaluate_every: flags.evaluate_every,
            separator: flags.separator,
            seed,
            optimizer_in_backward: self.optimizer_in_backward,
            keep: self.files.keep.map_or(1, usize::from),
            ..Default::default()
        };
        config.validate()?;
        Ok(config)
    }

    /// Returns a new run, or the saved one. Refuses a step that cannot be planned.
    fn trainer(
        &self,
        family: Option<&Family>,
        model: &TransformerConfig,
        [train, validation]: [Tokens; 2],
        communicator: &Communicator,
    ) -> Result<Trainer> {
        let config = self.config(communicator.world_size())?;
        let (device, ranks) = (communicator.device(), self.step_ranks(communicator));
        self.check_memory(model, &config, communicator)?;
        rates::measure(device, &[config.precision.dtype()])?; // before the model fills the memory
        let sharded = match ranks {
            StepRanks::FullySharded(config, _) => Some(FullyShard::new(communicator, config)?),
            _ => None,
        };
        let seeded = || nn::seeded(self.common.seed, DType::F32, device);
        let loaded = |device| family.map_or(Ok(None), |family| family.load(device));
        let resumed = self.files.checkpoint.as_ref().filter(|_| self.files.resume);
        let mut trainer = match (resumed, &sharded) {
            (Some(path), None) => Trainer::resume(path, model, config, train, validation, device),
            (Some(path), Some(sharded)) => {
                Trainer::resume_fully_sharded(path, model, sharded, config, train, validation)
            }
            (None, None) => {
                let model = match loaded(device)? {
                    Some(loaded) => loaded,
                    None => TransformerLM::from_var_builder(model, seeded())?,
                };
                Trainer::new(model, config, train, validation)
            }
            (None, Some(sharded)) => {
                let weights = match loaded(&Device::Cpu)? {
                    Some(loaded) => {
                        let weights = loaded.weights().into_iter().collect();
                        VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu)
                    }
                    None => seeded(),
                };
                let model = TransformerLM::from_var_builder(model, sharded.builder(weights))?;
                Trainer::fully_sharded(model, sharded, config, train, validation)
            }
        }?;
        if let StepRanks::Replicated(config) | StepRanks::ShardedOptimizer(config, _) = ranks {
            trainer.replicate(communicator, config)?;
        }
        if let StepRanks::ShardedOptimizer(..) = ranks {
            trainer.shard_optimizer()?;
        }
        trainer.plan()?;
        Ok(trainer)
    }

    /// Describes the run for the header.
    fn configuration(&self, data: String, family: Option<&Family>, trainer: &Trainer) -> Fields {
        let (model, config) = (trainer.model().config(), trainer.config());
        let TrainConfig {
            accumulation,
            batch_size,
            sequence_length,
            optimizer,
            ..
        } = config;
        let [tokens, steps] =
            [config.tokens_per_step(), config.steps].map(|n| group_digits(n as u64));
        let ranks = trainer.communicator().map(|ranks| {
            let (count, way) = (ranks.world_size(), self.exchange.way());
            let dtype = ["their own dtype", "bf16"][usize::from(self.exchange.exchange_bf16)];
            format!("{count}, {way}, gradients averaged in {dtype}")
        });
        let place = ["", ", in backward"][usize::from(config.optimizer_in_backward)];
        let clipped = match (config.max_grad_norm, config.max_grad_value) {
            (None, None) => "not clipped".into(),
            (Some(norm), None) => format!("clipped at norm {norm}"),
            (None, Some(value)) => format!("clipped at {value}"),
            (Some(norm), Some(value)) => format!("clipped at norm {norm} and at {value}"),
        };
        let optimizer = format!("{optimizer}{place}, gradients {clipped}");
        let step =
            format!("{accumulation} x {batch_size} windows of {sequence_length}: {tokens} tokens");
        let mut fields = Fields::from_iter([("data", data)]);
        fields
            .insert("model", common::models::sizes(model))
            .insert("longest context", model.context_length)
            .insert("family", family.map(Family::name))
            .insert("attention", self.model.trained.attention.name())
            .insert(
                "checkpointing",
                self.model.activation_checkpointing.to_string(),
            )
            .insert("precision", config.precision.name())
            .insert("ranks", ranks)
            .insert("step", step)
            .insert("steps", steps)
            .insert("schedule", config.schedule.to_string())
            .insert("optimizer", optimizer);
        fields
    }

    /// Prints a line. A closed stdout (`| head`) does not stop a training that leaves files.
    fn say(&self, line: impl std::fmt::Display) -> Result<()> {
        stdout::or_files(stdout::line(line), self.files.is_any_given())
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
            attention: self.model.trained.attention,
            checkpointing: self.model.activation_checkpointing,
            batch_size: config.batch_size,
            sequence_length: config.sequence_length,
            precision: config.precision,
            optimizer: config.optimizer,
            execution: Execution::Planned,
            ..Default::default()
        };
        // Before anything else, since it may change where blocks come from.
        let Some(available_bytes) = common::memory::available_bytes(device, None, [&run])? else {
            return Ok(());
        };
        let step = StepConfig {
            accumulation: config.accumulation.div_ceil(communicator.world_size()),
            ranks: self.step_ranks(communicator),
            ..config.step()
        };
        let shape = [config.batch_size, config.sequence_length];
        let (attention, checkpointing) = (
            self.model.trained.attention,
            self.model.activation_checkpointing,
        );
        let mut wanted_bytes =
            Step::memory_lower_bound(model, attention, checkpointing, &step, shape)?;
        if wanted_bytes <= available_bytes {
            // Planning what cannot fit would take too long.
            let rows = config.batch_size.saturating_mul(step.accumulation);
            let batch = Batch::meta(rows, config.sequence_length)?;
            let model = TransformerLM::meta(model)?.with_attention(attention)?;
            let model = model.with_checkpointing(checkpointing);
            let (plan, _) = Step::plan_for_model(device, &model, &step, batch)?;
            wanted_bytes = plan.total_bytes();
        }
        common::memory::check("the training step", wanted_bytes, Some(available_bytes))
    }
}

/// A training under way.
struct Run<'f> {
    flags: &'f Flags,
    trainer: Trainer,
    bar: ProgressBar,
    /// Tokens of the steps so far, and their time.
    tokens: usize,
    time: Duration,
    /// The floor of a step at the device's rates, in seconds; `None` if memory is too short to measure them.
    floor_seconds: Option<f64>,
}

impl<'f> Run<'f> {
    fn new(flags: &'f Flags, mut trainer: Trainer) -> Result<Self> {
        let device = trainer.model().device().clone();
        let plan = trainer.plan()?;
        let rates = rates::measure(&device, &plan.matmul_dtypes())?;
        let floors = rates.map(|rates| plan.floors(&rates)).transpose()?;
        let floor_seconds =
            floors.map(|floors| floors.iter().map(|floor| floor.seconds).sum::<f64>());
        let bar = ProgressBar::new(trainer.config().steps as u64);
        let style = ProgressStyle::with_template("{bar:15} {pos}/{len}  ETA {eta}  {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(trainer.steps_taken() as u64);
        bar.reset_eta();
        Ok(Self {
            flags,
            trainer,
            bar,
            tokens: 0,
            time: Duration::ZERO,
            floor_seconds,
        })
    }

    /// Takes all steps that are left, or those up to a signal. Evaluates and saves on the way, and at the end.
    fn train(&mut self) -> Result<Option<Signal>> {
        let signals = Signals::listen()?;
        if self.trainer.history().evaluations.is_empty() || self.trainer.is_done() {
            self.evaluate(None)?;
        }
        let save_every = self.flags.files.checkpoint_every;
        let save_every = save_every.map_or(self.flags.training.evaluate_every, usize::from);
        loop {
            let signal = signals.received(self.trainer.communicator())?;
            if signal.is_some() {
                self.save()?;
                return Ok(signal);
            }
            let begun = Instant::now();
            let Some(report) = self.trainer.step()? else {
                return Ok(None);
            };
            self.tokens += self.trainer.config().tokens_per_step();
            self.time += begun.elapsed();
            if report.tokens == 0 {
                let line = format!("step {:>6}  skipped: no target counts", report.step);
                self.bar.suspend(|| self.flags.say(line))?;
            }
            let validation = self.trainer.history().evaluations.last();
            self.bar.inc(1);
            self.bar.set_message(format!(
                "loss {:.3}  validation {}  lr {:.2e}  {}",
                self.recent_loss(),
                validation.map_or("n/a".into(), |last| format!("{:.3}", last.loss)),
                report.learning_rate,
                self.speed()
            ));
            if self.trainer.evaluation_is_due() {
                self.evaluate(Some(&report))?;
            }
            if self.trainer.is_done() || report.step.is_multiple_of(save_every) {
                self.save()?;
            }
        }
    }

    /// Evaluates, prints a line, and draws the curve so far.
    fn evaluate(&mut self, report: Option<&StepReport>) -> Result<()> {
        let loss = self.trainer.evaluate()?;
        let trainer = &self.trainer;
        let history = trainer.history();
        let mut line = format!(
            "step {:>6}  validation loss {loss:.4}",
            trainer.steps_taken()
        );
        if let Some(report) = report {
            let (recent, lr, speed) = (self.recent_loss(), report.learning_rate, self.speed());
            line += &format!("  loss {recent:.4}  lr {lr:.2e}  {speed}");
            if let Some(scale) = trainer.loss_scale() {
                line += &format!("  scale {scale}  skipped {}", history.skipped.len());
            }
        }
        self.bar.suspend(|| self.flags.say(line))?;
        let is_first = trainer.communicator().is_none_or(|ranks| ranks.rank() == 0);
        if let (Some(folder), true) = (&self.flags.files.out, is_first) {
            plot::save(&[history.chart()], folder.join(LOSS_SVG))?;
            history.report().save(Format::Csv, folder.join(LOSS_CSV))?;
        }
        Ok(())
    }

    fn save(&self) -> Result<()> {
        let path = self.flags.files.checkpoint.as_ref();
        path.map_or(Ok(()), |path| self.trainer.save(path))
    }

    /// Returns the mean loss of as many of the last steps as there are between evaluations.
    fn recent_loss(&self) -> f64 {
        let steps = self.trainer.config().evaluate_every;
        self.trainer
            .history()
            .recent_loss(steps)
            .unwrap_or(f64::NAN)
    }

    /// Returns the tokens a second, and the floor of a step in percent of its time.
    fn speed(&self) -> String {
        if self.tokens == 0 {
            return "n/a tokens/s".into();
        }
        let seconds = self.time.as_secs_f64();
        let speed = group_digits((self.tokens as f64 / seconds) as u64);
        let steps = self.tokens as f64 / self.trainer.config().tokens_per_step() as f64;
        match self.floor_seconds {
            Some(floor) => format!(
                "{speed} tokens/s, {:.0}% of floor",
                100.0 * floor * steps / seconds
            ),
            None => format!("{speed} tokens/s"),
        }
    }
}
