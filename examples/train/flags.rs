//! The flags of `train`, and what the library makes of them.

use crate::common::precision::PrecisionFlags;
use crate::common::{outputs, values};
use candle_core::Device;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use tallow::attention::Algorithm;
use tallow::data::{TokenFormat, Tokens};
use tallow::model::{GenerateConfig, TransformerConfig, TransformerLM};
use tallow::nn::{self, Checkpointing, DropoutRates};
use tallow::optim::{AdamWConfig, Moments, Schedule};
use tallow::precision::Precision;
use tallow::train::TrainConfig;
use tallow::{Error, Result};

/// The files of `--out`.
pub const LOSS_SVG: &str = "loss.svg";
pub const LOSS_CSV: &str = "loss.csv";

/// What is read of a folder.
const EXTENSIONS: [&str; 4] = ["rs", "md", "toml", "py"];

#[derive(Args)]
#[command(next_help_heading = "Data and model")]
pub struct DataFlags {
    /// A text, or a folder of rs, md, toml and py files [default: this crate]
    #[arg(long, value_name = "PATH", default_value = env!("CARGO_MANIFEST_DIR"), hide_default_value = true)]
    pub data: PathBuf,

    /// A token file: llm.c's, modded-nanogpt's, or u16 in a .bin
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "data",
        requires = "vocab_size"
    )]
    pub tokens: Option<PathBuf>,

    /// Number of token ids of the token file
    #[arg(long, hide_short_help = true, value_name = "N", requires = "tokens")]
    pub vocab_size: Option<usize>,

    /// How the token file is laid out [default: as its magic number says]
    #[arg(long, hide_short_help = true, value_enum, requires = "tokens")]
    pub token_format: Option<TokenFormatFlag>,

    /// Fraction at the data's end for validation
    #[arg(long, hide_short_help = true, default_value_t = 0.1, value_parser = values::part)]
    pub validation_fraction: f64,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum TokenFormatFlag {
    /// u16 ids and nothing else, as nanoGPT writes them
    RawU16,
    /// A header, then u16 ids
    HeaderedU16,
    /// A header, then u32 ids
    HeaderedU32,
}

impl From<TokenFormatFlag> for TokenFormat {
    fn from(flag: TokenFormatFlag) -> Self {
        match flag {
            TokenFormatFlag::RawU16 => Self::RawU16,
            TokenFormatFlag::HeaderedU16 => Self::HeaderedU16,
            TokenFormatFlag::HeaderedU32 => Self::HeaderedU32,
        }
    }
}

#[derive(Args)]
#[command(next_help_heading = "Data and model")]
pub struct ModelFlags {
    /// tiny to 10b [default: width 128, 4 layers, 4 heads]
    #[arg(long, value_name = "NAME")]
    pub size: Option<String>,

    /// Width of the residual stream, instead of the preset's
    #[arg(long, value_name = "N")]
    pub d_model: Option<usize>,

    /// Width of the feed-forward network
    #[arg(long, value_name = "N")]
    pub d_ff: Option<usize>,

    /// Number of blocks
    #[arg(long, value_name = "N")]
    pub num_layers: Option<usize>,

    /// Number of attention heads
    #[arg(long, value_name = "N", alias = "heads")]
    pub num_heads: Option<usize>,

    /// naive or flash
    #[arg(long, value_name = "NAME", default_value_t = Algorithm::Naive)]
    pub attention: Algorithm,

    /// Probability of dropout [default: 0, or the family's]
    #[arg(long, hide_short_help = true, value_name = "P", value_parser = values::from_0)]
    pub dropout: Option<f64>,

    /// none, block, every-N or sqrt
    #[arg(long, default_value_t = Checkpointing::None, value_name = "NAME")]
    pub activation_checkpointing: Checkpointing,

    /// Tokens in a window
    #[arg(
        long,
        value_name = "T",
        alias = "sequence-length",
        default_value_t = 64
    )]
    pub context_length: usize,
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

    /// Learning rate: cosine, linear or constant (no warm-up)
    #[arg(
        long,
        hide_short_help = true,
        value_enum,
        value_name = "NAME",
        hide_possible_values = true,
        default_value = "cosine"
    )]
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

    /// Decay of matrices
    #[arg(long, hide_short_help = true, value_name = "X", default_value_t = 0.1, value_parser = values::from_0)]
    pub weight_decay: f64,

    /// Store AdamW's moments in bf16, rounded stochastically
    #[arg(long, hide_short_help = true)]
    pub bf16_moments: bool,

    /// AdamW's two betas
    #[arg(long, hide_short_help = true, num_args = 1.., value_delimiter = ',', default_value = "0.9,0.99", value_parser = values::beta)]
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
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleFlag {
    Cosine,
    Linear,
    Constant,
}

#[derive(Args)]
#[command(next_help_heading = "Files and sample")]
pub struct FileFlags {
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
}

#[derive(Args)]
#[command(next_help_heading = "Files and sample")]
pub struct SampleFlags {
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
    #[arg(long, value_name = "TEXT", conflicts_with = "tokens", value_parser = NonEmptyStringValueParser::new())]
    pub prompt: Option<String>,
}

impl FileFlags {
    /// Makes the folder, and tries every file that the run will write.
    pub fn check(&self) -> Result<()> {
        if let Some(folder) = &self.out {
            std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
            for file in [LOSS_SVG, LOSS_CSV] {
                outputs::check_writable(&folder.join(file))?;
            }
        }
        let checkpoint = self.checkpoint.as_deref();
        checkpoint.map_or(Ok(()), outputs::check_writable)
    }

    /// Whether the run leaves something beside what it prints.
    pub fn is_any_given(&self) -> bool {
        self.out.is_some() || self.checkpoint.is_some()
    }
}

impl DataFlags {
    pub fn open(&self) -> Result<Tokens> {
        match (&self.tokens, self.vocab_size) {
            (Some(path), Some(vocab_size)) => {
                let tokens = match self.token_format {
                    Some(format) => Tokens::open_as(path, format.into(), vocab_size)?,
                    None => Tokens::open(path, vocab_size)?,
                };
                tokens.validate()?; // now, not when a batch meets a bad id
                Ok(tokens)
            }
            _ if self.data.is_dir() => Tokens::source_tree(&self.data, &EXTENSIONS),
            _ => Tokens::bytes(&self.data),
        }
    }

    /// As the header names it, tokens being bytes or others.
    pub fn name(&self, unit: &str) -> String {
        let path = self.tokens.as_ref().unwrap_or(&self.data);
        format!("{unit}s of {}", path.display())
    }

    /// What one token is.
    pub fn unit(&self) -> &'static str {
        match self.tokens {
            Some(_) => "token",
            None => "byte",
        }
    }

    /// Tokens as a reader sees them: text if they are bytes, else their ids.
    pub fn text(&self, tokens: &[u32]) -> String {
        if self.tokens.is_some() {
            return format!("{tokens:?}");
        }
        let bytes: Vec<u8> = tokens.iter().map(|byte| *byte as u8).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl ModelFlags {
    pub fn config(&self, vocab_size: usize) -> Result<TransformerConfig> {
        let base = match &self.size {
            Some(name) => TransformerConfig::preset(name)?,
            None => TransformerConfig {
                d_model: 128,
                d_ff: 320,
                num_layers: 4,
                num_heads: 4,
                ..Default::default()
            },
        };
        let config = TransformerConfig {
            vocab_size,
            context_length: self.context_length,
            d_model: self.d_model.unwrap_or(base.d_model),
            d_ff: self.d_ff.unwrap_or(base.d_ff),
            num_layers: self.num_layers.unwrap_or(base.num_layers),
            num_heads: self.num_heads.unwrap_or(base.num_heads),
            attention: self.attention,
            checkpointing: self.activation_checkpointing,
            dropout: self.dropout_rates().unwrap_or(base.dropout),
            ..base
        };
        config.validate()?;
        Ok(config)
    }

    /// What is dropped, if that is said.
    pub fn dropout_rates(&self) -> Option<DropoutRates> {
        self.dropout.map(DropoutRates::all)
    }
}

impl TrainingFlags {
    pub fn config(
        &self,
        sequence_length: usize,
        seed: u64,
        precision: Precision,
    ) -> Result<TrainConfig> {
        let config = TrainConfig {
            batch_size: self.batch_size,
            sequence_length,
            accumulation: self.accumulation.unwrap_or(1),
            steps: self.steps,
            schedule: self.schedule(),
            optimizer: AdamWConfig {
                betas: self.betas()?,
                weight_decay: self.weight_decay,
                moments: match self.bf16_moments {
                    true => Moments::Bf16 { seed },
                    false => Moments::Wide,
                },
                ..Default::default()
            },
            max_grad_norm: (self.clip != 0.0).then_some(self.clip),
            max_grad_value: (self.clip_value != 0.0).then_some(self.clip_value),
            precision,
            evaluate_every: self.evaluate_every,
            separator: self.separator,
            seed,
            ..Default::default()
        };
        config.validate()?;
        Ok(config)
    }

    fn schedule(&self) -> Schedule {
        let total_steps = self.schedule_steps.unwrap_or(self.steps);
        let warmup_steps = self.warmup.unwrap_or(total_steps / 20);
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
        }
    }

    fn betas(&self) -> Result<(f64, f64)> {
        match self.betas[..] {
            [first, second] => Ok((first, second)),
            _ => Err(Error::Config {
                config: "train",
                field: "--betas",
                expected: "two numbers".into(),
                got: format!("{:?}", self.betas),
                hint: "write --betas 0.9,0.99, say".into(),
            }),
        }
    }
}

impl SampleFlags {
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

    /// The prompt, where tokens are bytes.
    pub fn prompt_bytes(&self) -> Vec<u32> {
        let prompt = self.prompt.as_deref().unwrap_or("\n");
        prompt.bytes().map(u32::from).collect()
    }
}

/// A new model, with parameters of the dtype that the precision keeps them in.
pub fn new_model(
    config: &TransformerConfig,
    seed: u64,
    precision: Precision,
    device: &Device,
) -> Result<TransformerLM> {
    let weights = nn::seeded(seed, precision.parameter_dtype(), device);
    TransformerLM::from_var_builder(config, weights)
}
