//! The flags of `train`, and the library's configurations that they make.

use crate::common::models::TrainedModelFlags;
use crate::common::modes::OptimizerFlag;
use crate::common::precision::PrecisionFlags;
use crate::common::{outputs, refusal, values};
use crate::setup;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use tallow::data::Tokens;
use tallow::hf::Tokenizer;
use tallow::model::{GenerateConfig, TransformerConfig};
use tallow::nn::{Checkpointing, DropoutRates};
use tallow::optim::{AdamWConfig, LionConfig, MuonConfig, Rule, Schedule, SgdConfig};
use tallow::{Error, Result};

#[derive(Args)]
#[command(next_help_heading = "Data and model")]
pub struct InputFlags {
    /// A text, or a folder of rs, md, toml and py files [default: this crate]
    #[arg(long, value_name = "PATH", default_value = env!("CARGO_MANIFEST_DIR"), hide_default_value = true)]
    pub data: PathBuf,

    /// A token file: llm.c's, modded-nanogpt's, or u16 in a .bin
    #[arg(long, value_name = "FILE", conflicts_with = "data")]
    pub tokens: Option<PathBuf>,

    /// Number of token ids of the token file
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub vocab_size: Option<usize>,

    /// Fraction at the data's end for validation
    #[arg(long, hide_short_help = true, default_value_t = 0.1, value_parser = values::part)]
    pub validation_fraction: f64,

    #[command(flatten)]
    pub trained: TrainedModelFlags,

    /// Probability of dropout [default: 0, or the family's]
    #[arg(long, hide_short_help = true, value_name = "P", value_parser = values::from_0)]
    pub dropout: Option<f64>,

    /// none, block, every-N or sqrt
    #[arg(long, default_value_t = Checkpointing::None, value_name = "NAME")]
    pub activation_checkpointing: Checkpointing,
}

#[derive(Args)]
#[command(next_help_heading = "Training")]
pub struct TrainingFlags {
    /// Token that ends a document; 10 is a line break in bytes
    #[arg(long, hide_short_help = true, value_name = "ID")]
    pub separator: Option<u32>,

    /// Windows in a batch
    #[arg(long, value_name = "B", default_value_t = 12)]
    pub batch_size: usize,

    /// Batches in a step, on all ranks [default: one a rank]
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub accumulation: Option<usize>,

    /// Steps of the whole run
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = values::count())]
    pub steps: usize,

    /// Learning rate: cosine, linear, wsd, restarts or constant (the last two without warm-up)
    #[arg(long, hide_short_help = true, value_enum, value_name = "NAME", default_value_t = ScheduleFlag::Cosine)]
    pub schedule: ScheduleFlag,

    /// Step at which the learning rate is at its lowest [default: --steps]
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub schedule_steps: Option<usize>,

    /// Highest learning rate
    #[arg(long, value_name = "LR", default_value_t = 1e-3, value_parser = values::from_0)]
    pub lr: f64,

    /// Lowest learning rate [default: a tenth of --lr]
    #[arg(long, hide_short_help = true, value_name = "LR", value_parser = values::from_0)]
    pub min_lr: Option<f64>,

    /// Steps of warm-up [default: a twentieth]
    #[arg(long, hide_short_help = true, value_name = "N", alias = "warmup-steps")]
    pub warmup: Option<usize>,

    /// Steps of wsd's decay, or of restarts' first cosine [default: a fifth]
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = values::count())]
    pub decay_steps: Option<usize>,

    /// Decay of matrices
    #[arg(long, hide_short_help = true, value_name = "X", default_value_t = 0.1, value_parser = values::from_0)]
    pub weight_decay: f64,

    /// adamw, adamw-bf16 (bf16 moments), sgd, lion, muon
    #[arg(long, value_enum, value_name = "NAME", default_value = "adamw")]
    pub optimizer: OptimizerFlag,

    /// Momentum of sgd and muon [default: 0.9 and 0.95]
    #[arg(long, hide_short_help = true, value_name = "X", value_parser = values::under_1)]
    pub momentum: Option<f64>,

    /// The two betas of adamw and lion
    #[arg(long, hide_short_help = true, num_args = 1.., value_delimiter = ',', default_value = "0.9,0.99", value_parser = values::under_1)]
    pub betas: Vec<f64>,

    /// Largest norm of the gradients, or 0
    #[arg(long, hide_short_help = true, value_name = "X", default_value_t = 1.0, value_parser = values::from_0)]
    pub clip: f64,

    /// Largest absolute value of a gradient's elements, or 0
    #[arg(long, hide_short_help = true, value_name = "X", default_value_t = 0.0, value_parser = values::from_0)]
    pub clip_value: f64,

    #[command(flatten)]
    pub precision: PrecisionFlags,

    /// Steps between evaluations
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 250)]
    pub evaluate_every: usize,

    /// Update each parameter in backward; needs --clip 0
    #[arg(long, hide_short_help = true)]
    pub optimizer_in_backward: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleFlag {
    Cosine,
    Linear,
    Wsd,
    Restarts,
    Constant,
}

#[derive(Args)]
#[command(next_help_heading = "Files and sample")]
pub struct ResultFlags {
    /// Save the run here: weights, optimizer, position, losses
    #[arg(long, value_name = "FILE")]
    pub checkpoint: Option<PathBuf>,

    /// Steps between checkpoints [default: --evaluate-every]
    #[arg(long, hide_short_help = true, requires = "checkpoint")]
    pub checkpoint_every: Option<NonZeroUsize>,

    /// Checkpoints to keep, older ones as FILE.1, FILE.2 [default: 1]
    #[arg(long, hide_short_help = true, requires = "checkpoint")]
    pub keep: Option<NonZeroUsize>,

    /// Continue from the checkpoint, with the same flags
    #[arg(long, requires = "checkpoint")]
    pub resume: bool,

    /// Folder for the loss curve: loss.svg and loss.csv
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,

    /// Tokens of the sample at the end
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = values::count_from_0())]
    pub sample: usize,

    /// Temperature; 0 takes the likeliest token
    #[arg(long, hide_short_help = true, value_name = "X", default_value_t = 0.8, value_parser = values::from_0)]
    pub temperature: f64,

    /// Sample from the k likeliest tokens
    #[arg(long, hide_short_help = true, value_name = "K")]
    pub top_k: Option<usize>,

    /// Sample from the likeliest tokens of this total probability
    #[arg(long, hide_short_help = true, value_name = "P", value_parser = values::probability)]
    pub top_p: Option<f64>,

    /// Text that the sample continues [default: a line break]
    #[arg(long, hide_short_help = true, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub prompt: Option<String>,
}

impl ResultFlags {
    /// Makes the folder, tries every file that the run will write, and refuses a checkpoint that would be replaced.
    pub fn check(&self) -> Result<()> {
        if let Some(folder) = &self.out {
            std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        }
        let curves = self.curves().into_iter().flatten();
        let mut files = curves.chain(self.checkpoint.clone());
        files.try_for_each(|path| outputs::check_writable(&path))?;
        match self.checkpoint.as_ref().filter(|path| path.exists()) {
            Some(path) if !self.resume => Err(refusal(
                "--checkpoint",
                "a file that is not there yet",
                format!("{}, which is", path.display()),
                "go on with --resume, or move it away",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the picture and the table of the losses.
    pub fn curves(&self) -> Option<[PathBuf; 2]> {
        let folder = self.out.as_ref()?;
        Some(["loss.svg", "loss.csv"].map(|name| folder.join(name)))
    }

    /// Returns the ids that the sample continues.
    pub fn prompt(&self, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
        let prompt = self.prompt.as_deref().unwrap_or("\n");
        let ids = match tokenizer {
            Some(tokenizer) => tokenizer.encode(prompt)?,
            None => prompt.bytes().map(u32::from).collect(),
        };
        match ids.is_empty() && self.sample > 0 {
            false => Ok(ids),
            true => Err(refusal(
                "--prompt",
                "a text of at least 1 token",
                format!("{prompt:?}, which the tokenizer drops"),
                "give another --prompt, or --sample 0",
            )),
        }
    }

    pub fn config(&self, seed: u64) -> GenerateConfig {
        GenerateConfig {
            max_new_tokens: self.sample,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed,
            stop_token: None,
        }
    }
}

impl InputFlags {
    /// Opens the data: ids of a tokenizer if there is one, else bytes or the ids of a file.
    pub fn open(&self, tokenizer: Option<&Tokenizer>) -> Result<Tokens> {
        match (&self.tokens, self.vocab_size, tokenizer) {
            (Some(path), Some(vocab_size), _) => {
                let tokens = Tokens::open(path, vocab_size)?;
                tokens.validate()?; // now, not when a batch meets a bad id
                Ok(tokens)
            }
            (.., Some(tokenizer)) => setup::read(&self.data)?.encoded(tokenizer),
            _ => setup::read(&self.data),
        }
    }

    /// Returns `base` with the flags that hold for every model.
    pub fn applied(&self, base: TransformerConfig) -> Result<TransformerConfig> {
        let config = TransformerConfig {
            dropout: self.dropout.map_or(base.dropout, DropoutRates::all),
            ..base
        };
        config.validate()?;
        config.check_attention(self.trained.attention)?;
        Ok(config)
    }
}

/// Returns the text of ids, which are bytes without a tokenizer; the ids if the tokenizer lacks one of them (an
/// embedding may have more rows).
pub fn text(tokenizer: Option<&Tokenizer>, ids: &[u32]) -> String {
    let Some(tokenizer) = tokenizer else {
        let bytes: Vec<u8> = ids.iter().map(|byte| *byte as u8).collect();
        return String::from_utf8_lossy(&bytes).into_owned();
    };
    let text = tokenizer.decode(ids);
    text.unwrap_or_else(|error| format!("{ids:?}\n({error})"))
}

impl TrainingFlags {
    pub fn schedule(&self) -> Schedule {
        let total_steps = self.schedule_steps.unwrap_or(self.steps);
        let warmup_steps = self.warmup.unwrap_or(total_steps / 20);
        let decay_steps = self.decay_steps.unwrap_or(total_steps / 5);
        let (max_lr, min_lr) = (self.lr, self.min_lr.unwrap_or(self.lr / 10.0));
        match self.schedule {
            ScheduleFlag::Constant => Schedule::Constant { lr: self.lr },
            ScheduleFlag::Cosine => Schedule::WarmupCosine {
                max_lr,
                min_lr,
                warmup_steps,
                total_steps,
            },
            ScheduleFlag::Linear => Schedule::WarmupLinear {
                max_lr,
                min_lr,
                warmup_steps,
                total_steps,
            },
            ScheduleFlag::Wsd => Schedule::WarmupStableDecay {
                max_lr,
                min_lr,
                warmup_steps,
                decay_steps,
                total_steps,
            },
            ScheduleFlag::Restarts => Schedule::CosineRestarts {
                max_lr,
                min_lr,
                period: decay_steps.max(1),
                factor: 1,
            },
        }
    }

    /// Returns the rule with the flags that it has.
    pub fn rule(&self, seed: u64) -> Result<Rule> {
        let [first, second] = self.betas[..] else {
            let (got, hint) = (format!("{:?}", self.betas), "write --betas 0.9,0.99, say");
            return Err(refusal("--betas", "two numbers", got, hint));
        };
        let rule = self.optimizer.rule(seed);
        let mut rule = rule.with_weight_decay(self.weight_decay);
        match &mut rule {
            Rule::AdamW(AdamWConfig { betas, .. }) | Rule::Lion(LionConfig { betas, .. }) => {
                *betas = (first, second);
            }
            Rule::Sgd(SgdConfig { momentum, .. }) | Rule::Muon(MuonConfig { momentum, .. }) => {
                *momentum = self.momentum.unwrap_or(*momentum);
            }
            _ => {}
        }
        Ok(rule)
    }
}
