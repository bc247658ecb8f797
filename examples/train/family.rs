//! Training that starts from a model of another family, with its tokenizer.

use crate::flags::{DataFlags, ModelFlags, SampleFlags, new_model};
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use clap::{Args, ValueEnum};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tallow::hf::{self, SaveOptions, Tokenizer};
use tallow::model::{LoadOptions, TransformerConfig, TransformerLM};
use tallow::nn::Layer;
use tallow::precision::Precision;
use tallow::{Error, Result};

#[derive(Args)]
#[command(next_help_heading = "Data and model")]
pub struct FamilyFlags {
    /// Continue from a folder's weights, or org/name in the hub's cache
    #[arg(long, value_name = "FOLDER",
        conflicts_with_all = ["size", "d_model", "d_ff", "num_layers", "num_heads"])]
    pub family: Option<PathBuf>,

    /// Start from random weights instead of the folder's
    #[arg(long, hide_short_help = true)]
    random_weights: bool,

    /// Ignore this unknown key of the folder's config.json
    #[arg(long, hide_short_help = true, value_name = "KEY")]
    ignore_config_key: Vec<String>,

    /// Write the trained model here, as transformers reads it
    #[arg(long, value_name = "FOLDER")]
    pub save_family: Option<PathBuf>,

    /// Dtype of the written weights [default: f32]
    #[arg(long, hide_short_help = true, value_enum, requires = "save_family")]
    save_dtype: Option<SaveDtype>,

    /// Replace a model in the folder of --save-family
    #[arg(long, hide_short_help = true, requires = "save_family")]
    overwrite: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum SaveDtype {
    #[value(aliases = ["float32", "fp32"])]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(aliases = ["float16", "fp16", "half"])]
    F16,
}

impl From<SaveDtype> for DType {
    fn from(dtype: SaveDtype) -> Self {
        match dtype {
            SaveDtype::F32 => Self::F32,
            SaveDtype::Bf16 => Self::BF16,
            SaveDtype::F16 => Self::F16,
        }
    }
}

/// The model that a run starts from.
pub struct Family {
    folder: PathBuf,
    pub config: TransformerConfig,
    /// None where the data are ids already.
    pub tokenizer: Option<Tokenizer>,
    random_weights: bool,
    /// Whether the files have another head than the embedding that config.json ties it to.
    is_untied: bool,
    save_options: SaveOptions,
    ignore_keys: Vec<String>,
}

impl SampleFlags {
    /// The prompt, where a tokenizer makes ids of it.
    pub fn prompt_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let prompt = self.prompt.as_deref().unwrap_or("\n");
        let ids = tokenizer.encode(prompt)?;
        match ids.is_empty() && self.sample > 0 {
            false => Ok(ids),
            true => Err(refuse(
                "--prompt",
                "a text of at least 1 token".into(),
                format!("{prompt:?}, which the tokenizer drops"),
                "give another --prompt, or --sample 0",
            )),
        }
    }
}

/// Tokens as a reader sees them. A model may write an id that its tokenizer has not, where its embedding has more rows.
pub fn text(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    match tokenizer.decode(ids) {
        Ok(text) => text,
        Err(error) => format!("{ids:?}\n({error})"),
    }
}

impl FamilyFlags {
    /// The family that is asked for, and whatever can be refused of it and of the folder to write.
    pub fn open(&self, model: &ModelFlags, data: &DataFlags) -> Result<Option<Family>> {
        let Some(name) = &self.family else {
            return Ok(None);
        };
        let folder = hf::find(name)?;
        let options = LoadOptions {
            ignore_keys: self.ignore_config_key.clone(),
            ..Default::default()
        };
        let saved = hf::config_with(&folder, &options)?;
        let tied = match self.random_weights {
            true => saved.tie_embeddings,
            false => {
                hf::loaded_config(&folder, &options)
                    .map_err(or_random)?
                    .tie_embeddings
            }
        };
        let config = TransformerConfig {
            attention: model.attention,
            checkpointing: model.activation_checkpointing,
            dropout: model.dropout_rates().unwrap_or(saved.dropout),
            tie_embeddings: tied,
            ..saved
        };
        config.validate()?;
        let tokenizer = match data.tokens {
            Some(_) => None,
            None => Some(Tokenizer::open(&folder)?),
        };
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check_fits(&config)?;
        }
        let save_options = SaveOptions {
            from: Some(folder.clone()),
            dtype: self.save_dtype.map(DType::from),
            overwrite: self.overwrite,
            ignore_keys: self.ignore_config_key.clone(),
            ..Default::default()
        };
        if let Some(written) = &self.save_family {
            check_other(written, &folder)?;
            hf::check_save(&config, written, &save_options)?;
        }
        Ok(Some(Family {
            folder,
            is_untied: saved.tie_embeddings && !tied,
            config,
            tokenizer,
            random_weights: self.random_weights,
            save_options,
            ignore_keys: options.ignore_keys,
        }))
    }
}

/// Names the flag that needs no weights in the error of a folder without them.
fn or_random(error: Error) -> Error {
    match error {
        Error::Data {
            what,
            expected,
            got,
            hint,
        } => Error::Data {
            what,
            expected,
            got,
            hint: format!("{hint}, or begin with --random-weights"),
        },
        other => other,
    }
}

/// Refuses to write the folder that is read.
fn check_other(written: &Path, read: &Path) -> Result<()> {
    let place = |folder: &Path| fs::canonicalize(folder).ok();
    match place(written).is_some_and(|written| Some(written) == place(read)) {
        false => Ok(()),
        true => Err(refuse(
            "--save-family",
            "another folder than --family's".into(),
            written.display().to_string(),
            "the model that it started from would be lost; name a new folder",
        )),
    }
}

fn refuse(field: &'static str, expected: String, got: String, hint: &str) -> Error {
    Error::Config {
        config: "train",
        field,
        expected,
        got,
        hint: hint.into(),
    }
}

impl Family {
    /// The model before its first step.
    pub fn model(&self, seed: u64, precision: Precision, device: &Device) -> Result<TransformerLM> {
        if self.random_weights {
            return new_model(&self.config, seed, precision, device);
        }
        let options = LoadOptions {
            dtype: precision.parameter_dtype(),
            ignore_keys: self.ignore_keys.clone(),
            ..Default::default()
        };
        let model = hf::load_with(&self.folder, &options, device)?;
        let model = model.with_attention(self.config.attention);
        let model = model.with_dropout(self.config.dropout)?;
        Ok(model.with_checkpointing(self.config.checkpointing))
    }

    /// Its weights, on the host.
    pub fn weights(&self, seed: u64, precision: Precision) -> Result<VarBuilder<'static>> {
        let device = Device::Cpu;
        let model = self.model(seed, precision, &device)?;
        let weights: HashMap<_, _> = model.weights().into_iter().collect();
        let dtype = precision.parameter_dtype();
        Ok(VarBuilder::from_tensors(weights, dtype, &device))
    }

    /// As the header names it.
    pub fn name(&self) -> String {
        let folder = self.folder.display();
        match (self.random_weights, self.is_untied) {
            (true, _) => format!("{folder}, begun with random weights"),
            (_, true) => format!(
                "{folder}, whose head differs from the embedding and is kept (config.json has tie_word_embeddings)"
            ),
            _ => folder.to_string(),
        }
    }

    /// The trained model, with the files beside the weights that it started from.
    pub fn save(&self, model: &TransformerLM, folder: &Path) -> Result<()> {
        hf::save_with(model, folder, &self.save_options)
    }
}
