//! Trains a transformer language model on a text, by bytes or a tokenizer, and lets it write.
//!
//! Without flags it is nanoGPT's recipe for characters on a CPU, on this crate's own sources. Its feed-forward network
//! has three matrices of width 320 in place of two of width 512: 0.82 M parameters here, 0.80 M there.
//!
//! Ctrl-C, SIGTERM and SIGHUP (a closed terminal; ignored under `nohup`) end it after the current step, with a
//! checkpoint if there is `--checkpoint`, and with exit status 130, 143 or 129. A second one ends it at once.

#![deny(clippy::print_stdout, clippy::print_stderr)] // common::stdout and common::print_progress do not panic

mod common;
#[path = "train/family.rs"]
mod family;
#[path = "train/flags.rs"]
mod flags;
#[path = "train/setup.rs"]
mod setup;
#[path = "train/signals.rs"]
mod signals;

use candle_core::{DType, Device};
use clap::{CommandFactory, Parser};
use common::effects::{self, Effect, only, only_group};
use common::modes::OptimizerFlag;
use common::ranks::{ExchangeFlags, RankFlags};
use common::{Common, rates, stdout};
use family::{Family, FamilyFlags};
use flags::{InputFlags, ResultFlags, ScheduleFlag, TrainingFlags};
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::low_level::signal_name;
use signals::Signals;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tallow::Result;
use tallow::compile::{StepConfig, StepRanks};
use tallow::data::Tokens;
use tallow::distributed::{Communicator, FullyShard};
use tallow::hf;
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn;
use tallow::report::{Fields, Format, Report, group_digits, plot};
use tallow::train::{TrainConfig, Trainer};

const EXAMPLES: &str = "\
Examples:
  train --data input.txt --steps 2000 --checkpoint run.safetensors --out curves
  train --data input.txt --checkpoint run.safetensors --resume --steps 4000
  train --family HuggingFaceTB/SmolLM2-135M --data input.txt --lr 5e-5 --save-family tuned";

/// Trains a transformer language model on a text, by bytes or a tokenizer, and lets it write.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Flags {
    #[command(flatten)]
    common: Common, // first: headings hold for whatever comes after them
    #[command(flatten)]
    input: InputFlags,
    #[command(flatten)]
    family: FamilyFlags,
    #[command(flatten)]
    training: TrainingFlags,
    #[command(flatten)]
    ranks: RankFlags,
    #[command(flatten)]
    exchange: ExchangeFlags,
    #[command(flatten)]
    results: ResultFlags,
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
    stopped.map_or(code, |signal| signals::exit_status(signal).into())
}

impl Flags {
    /// Returns what the flags' effects depend on.
    fn effects(&self) -> Vec<Effect> {
        use OptimizerFlag::{Muon, Sgd};
        use ScheduleFlag::{Constant, Restarts, Wsd};
        let schedule = self.training.schedule;
        let (changes, rates) = (schedule != Constant, &["schedule-steps", "min-lr"]);
        let rises = ![Constant, Restarts].contains(&schedule);
        let decays = [Wsd, Restarts].contains(&schedule);
        let has_momentum = [Sgd, Muon].contains(&self.training.optimizer);
        let has_tokens = self.input.tokens.is_some();
        let has_vocabulary = self.input.vocab_size.is_some();
        let saves = self.family.save_family.is_some();
        let draws = self.results.temperature > 0.0;
        let mut effects = self.ranks.effects(&self.common);
        effects.extend(self.exchange.effects(&self.ranks));
        effects.extend([
            only("with --tokens", has_tokens, &["vocab-size"]),
            only("with --vocab-size", has_vocabulary, &["tokens"]),
            only("if the rate changes", changes, rates),
            only("with --schedule cosine, linear or wsd", rises, &["warmup"]),
            only("with --schedule wsd or restarts", decays, &["decay-steps"]),
            only("with --optimizer adamw or lion", !has_momentum, &["betas"]),
            only("with --optimizer sgd or muon", has_momentum, &["momentum"]),
            only_group::<FamilyFlags>("with --family", self.family.family.is_some()),
            only("with --save-family", saves, &["save-dtype", "overwrite"]),
            only("without --tokens", !has_tokens, &["sample"]),
            only(
                "on a sample: not with --sample 0 or --tokens",
                self.samples(),
                &["temperature", "top-k", "top-p", "prompt"],
            ),
            only("with a --temperature over 0", draws, &["top-k", "top-p"]),
        ]);
        effects
    }

    /// Whether a sample is written. The ids of a token file have no text.
    fn samples(&self) -> bool {
        self.results.sample > 0 && self.input.tokens.is_none()
    }

    /// Trains and writes a sample. Returns the signal that ended it, if one did.
    fn run(&self) -> Result<Option<i32>> {
        let started = Instant::now();
        // Whatever can be refused is refused before the first step, not after the last.
        let sampling = self.results.config(self.common.seed);
        sampling.validate()?;
        let communicator = self.ranks.join(&self.common)?;
        if communicator.rank() == 0 {
            self.results.check()?;
        }
        let family = self.family.open(&self.input)?;
        let named = family.as_ref().filter(|_| self.input.tokens.is_none());
        let tokenizer = named.map(Family::tokenizer).transpose()?;
        let data = self.input.open(tokenizer.as_ref())?;
        let (train, validation) = data.split(self.input.validation_fraction)?;
        let prompt = self.results.prompt(tokenizer.as_ref())?;
        let model = match &family {
            Some(family) => family.config.clone(),
            None => self
                .input
                .applied(self.input.trained.config(train.vocab_size())?)?,
        };
        let path = self.input.tokens.as_ref().unwrap_or(&self.input.data);
        let data = setup::data(&train, &validation, path);
        let mut trainer =
            self.trainer(family.as_ref(), &model, [train, validation], &communicator)?;
        let header = Report {
            environment: self.common.environment(communicator.device()),
            configuration: self.configuration(data, family.as_ref(), &trainer),
            ..Default::default()
        };
        let header = header.to_text(Some(common::outputs::terminal_width()));
        self.say(format!("{}\n", header.trim_end()))?;

        let signal = self.train(&mut trainer)?;
        let (step, steps) = (trainer.steps_taken(), trainer.config().steps);
        if let Some(signal) = signal {
            let kept = match &self.results.checkpoint {
                Some(path) => format!("the run is in {}, --resume goes on", path.display()),
                None => "without --checkpoint nothing is kept of it".into(),
            };
            let name = signal_name(signal).unwrap_or("a signal");
            let text = format!("\n{name}: stopped after step {step} of {steps}; {kept}");
            return self.say(text).map(|()| Some(signal));
        }
        let evaluations = &trainer.history().evaluations;
        let last = evaluations.last().map_or(f64::NAN, |last| last.loss);
        let seconds = started.elapsed().as_secs_f64();
        self.say(format!(
            "\nvalidation loss {last:.4} nats a token, after {step} steps; {seconds:.1} s in all"
        ))?;
        if common::fallbacks() != "none" {
            self.say(format!("reference ops: {}", common::fallbacks()))?;
        }
        let folder = self.family.save_family.as_ref();
        if folder.is_none() && !self.samples() {
            return Ok(None);
        }
        let Some(model) = trainer.gather_model()? else {
            return Ok(None); // rank 0 has it
        };
        if let (Some(family), Some(folder)) = (&family, folder) {
            hf::save_with(&model, folder, &family.save)?;
            self.say(format!("the trained model is in {}", folder.display()))?;
        }
        if self.samples() {
            let written = model.generate(&prompt, &sampling)?;
            let text = flags::text(tokenizer.as_ref(), &[prompt, written].concat());
            self.say(format!("\n{}", stdout::for_terminal(&text)))?;
        }
        Ok(None)
    }

    fn config(&self, world_size: usize) -> Result<TrainConfig> {
        let (flags, seed) = (&self.training, self.common.seed);
        let config = TrainConfig {
            batch_size: flags.batch_size,
            sequence_length: self.input.trained.context_length,
            accumulation: flags.accumulation.unwrap_or(world_size),
            steps: flags.steps,
            schedule: flags.schedule(),
            optimizer: flags.rule(seed)?,
            max_grad_norm: (flags.clip != 0.0).then_some(flags.clip),
            attention: Some(self.input.trained.attention),
            checkpointing: Some(self.input.activation_checkpointing),
            max_grad_value: (flags.clip_value != 0.0).then_some(flags.clip_value),
            precision: flags.precision.precision()?,
            evaluate_every: flags.evaluate_every,
            separator: flags.separator,
            seed,
            optimizer_in_backward: flags.optimizer_in_backward,
            keep: self.results.keep.map_or(1, usize::from),
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
        let (device, world_size) = (communicator.device(), communicator.world_size());
        let config = self.config(world_size)?;
        let ranks = match world_size {
            1 => StepRanks::Single,
            _ => self.exchange.step_ranks(communicator.shard()),
        };
        let step = StepConfig {
            accumulation: config.accumulation.div_ceil(world_size),
            ranks,
            ..config.step()
        };
        setup::check_memory(model, &config, step, device)?;
        rates::measure(device, &[config.precision.dtype()])?; // before the model fills the memory
        let sharded = match ranks {
            StepRanks::FullySharded(config, _) => Some(FullyShard::new(communicator, config)?),
            _ => None,
        };
        let weights = |host| match family {
            Some(family) if !self.family.random_weights => family.load(host),
            _ => Ok(nn::seeded(self.common.seed, DType::F32, device)),
        };
        let built = |weights| TransformerLM::from_var_builder(model, weights);
        let resumed = self
            .results
            .checkpoint
            .as_ref()
            .filter(|_| self.results.resume);
        let mut trainer = match (resumed, &sharded) {
            (Some(path), None) => Trainer::resume(path, model, config, train, validation, device),
            (Some(path), Some(sharded)) => {
                Trainer::resume_fully_sharded(path, model, sharded, config, train, validation)
            }
            (None, None) => Trainer::new(built(weights(device)?)?, config, train, validation),
            (None, Some(sharded)) => {
                let model = built(sharded.builder(weights(&Device::Cpu)?))?;
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
        let config = trainer.config();
        let ranks = trainer.communicator().map(|ranks| {
            let (count, way) = (ranks.world_size(), self.exchange.way());
            let dtype = ["their own dtype", "bf16"][usize::from(self.exchange.exchange_bf16)];
            format!("{count}, {way}, gradients averaged in {dtype}")
        });
        let mut fields = setup::configuration(data, trainer.model().config(), config);
        let checkpointing = self.input.activation_checkpointing.to_string();
        fields
            .insert("family", family.map(|family| self.family.name(family)))
            .insert("checkpointing", checkpointing)
            .insert("precision", config.precision.name())
            .insert("ranks", ranks);
        fields
    }

    /// Takes all steps that are left, or those up to a signal. Evaluates and saves on the way, and at the end.
    fn train(&self, trainer: &mut Trainer) -> Result<Option<i32>> {
        let signals = Signals::listen()?;
        let device = trainer.model().device().clone();
        let plan = trainer.plan()?;
        let rates = rates::measure(&device, &plan.matmul_dtypes())?;
        let floors = rates.map(|rates| plan.floors(&rates)).transpose()?;
        let floor_seconds = floors.map(|floors| floors.iter().map(|floor| floor.seconds).sum());
        let first_step = trainer.steps_taken();
        let style = ProgressStyle::with_template("{bar:15} {pos}/{len}  ETA {eta}  {wide_msg}");
        let bar = ProgressBar::new(trainer.config().steps as u64)
            .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
            .with_position(first_step as u64);
        bar.reset_eta();
        self.save(trainer)?;
        if trainer.history().evaluations.is_empty() || trainer.is_done() {
            self.evaluate(trainer, &bar, "")?;
        }
        let save_every = self.results.checkpoint_every;
        let save_every = save_every.map_or(self.training.evaluate_every, usize::from);
        let mut time = Duration::ZERO;
        loop {
            if let Some(signal) = signals.received(trainer.communicator())? {
                self.save(trainer)?;
                return Ok(Some(signal));
            }
            let begun = Instant::now();
            let Some(report) = trainer.step()? else {
                return Ok(None);
            };
            time += begun.elapsed();
            if report.tokens == 0 {
                let line = format!("step {:>6}  skipped: no target counts", report.step);
                bar.suspend(|| self.say(line))?;
            }
            let step_seconds = time.as_secs_f64() / (report.step - first_step) as f64;
            let progress = progress(trainer, report.learning_rate, step_seconds, floor_seconds);
            bar.inc(1);
            bar.set_message(progress.clone());
            if trainer.evaluation_is_due() {
                self.evaluate(trainer, &bar, &progress)?;
            }
            if trainer.is_done() || report.step.is_multiple_of(save_every) {
                self.save(trainer)?;
            }
        }
    }

    /// Evaluates, prints a line, and draws the curve so far.
    fn evaluate(&self, trainer: &mut Trainer, bar: &ProgressBar, progress: &str) -> Result<()> {
        let (loss, step) = (trainer.evaluate()?, trainer.steps_taken());
        let line = format!("step {step:>6}  validation loss {loss:.4}  {progress}");
        bar.suspend(|| self.say(line.trim_end()))?;
        if let Some([svg, csv]) = self.results.curves()
            && trainer.communicator().is_none_or(|ranks| ranks.rank() == 0)
        {
            plot::save(&[trainer.history().chart()], svg)?;
            trainer.history().report().save(Format::Csv, csv)?;
        }
        Ok(())
    }

    fn save(&self, trainer: &Trainer) -> Result<()> {
        let path = self.results.checkpoint.as_ref();
        path.map_or(Ok(()), |path| trainer.save(path))
    }

    /// Prints a line. A closed stdout (`| head`) does not stop a training that leaves files.
    fn say(&self, line: impl std::fmt::Display) -> Result<()> {
        let leaves_files = self.results.out.is_some() || self.results.checkpoint.is_some();
        stdout::or_files(stdout::line(line), leaves_files)
    }
}

/// Describes the steps since the last evaluation by their mean loss, and this process's steps by their mean time:
/// tokens a second, and the floor of a step in percent of it (`None` if memory is too short to measure rates).
fn progress(trainer: &Trainer, lr: f64, step_seconds: f64, floor_seconds: Option<f64>) -> String {
    let (history, config) = (trainer.history(), trainer.config());
    let loss = history.recent_loss(config.evaluate_every);
    let loss = loss.unwrap_or(f64::NAN);
    let speed = group_digits((config.tokens_per_step() as f64 / step_seconds) as u64);
    let mut text = format!("loss {loss:.4}  lr {lr:.2e}  {speed} tokens/s");
    if let Some(floor) = floor_seconds {
        text += &format!(", {:.0}% of floor", 100.0 * floor / step_seconds);
    }
    if let Some(scale) = trainer.loss_scale() {
        text += &format!("  scale {scale}  skipped {}", history.skipped.len());
    }
    text
}
