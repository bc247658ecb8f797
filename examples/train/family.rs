//! Training that starts from a model of another family, with its tokenizer.

use crate::flags::{DataFlags, ModelFlags, SampleFlags, new_model};
use candle_core::Device;
use candle_nn::VarBuilder;
use clap::Args;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tallow::hf::{self, Tokenizer};
use tallow::model::{LoadOptions, TransformerConfig, TransformerLM};
use tallow::nn::Layer;
use tallow::precision::Precision;
use tallow::{Error, Result};

#[derive(Args)]
#[command(next_help_heading = "Family")]
pub struct FamilyFlags {
    /// Go on from the weights of a folder of Hugging Face's (Llama, Qwen2, Qwen3, Mistral or GPT-2), or of org/name
    /// in its hub's cache, with its tokenizer on --data; windows are of --context-length tokens
    #[arg(long, value_name = "FOLDER|ORG/NAME",
        conflicts_with_all = ["size", "d_model", "d_ff", "num_layers", "num_heads"])]
    pub family: Option<PathBuf>,

    /// Begin with random weights in place of the folder's, which may then have none
    #[arg(long, requires = "family")]
    random_weights: bool,

    /// Read the folder's config.json without this key: a setting that is not known is refused otherwise, since it may
    /// stand for another model
    #[arg(long, requires = "family", value_name = "KEY")]
    ignore_config_key: Vec<String>,

    /// Write the trained model here at the end, as transformers reads it, with the tokenizer's files
    #[arg(long, requires = "family", value_name = "FOLDER")]
    pub save_family: Option<PathBuf>,
}

/// The model that a run starts from.
pub struct Family {
    folder: PathBuf,
    pub config: TransformerConfig,
    /// None where the data are ids already.
    pub tokenizer: Option<Tokenizer>,
    random_weights: bool,
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
        let config = TransformerConfig {
            attention: model.attention,
            checkpointing: model.activation_checkpointing,
            dropout: model.dropout_rates().unwrap_or(saved.dropout),
            ..saved
        };
        config.validate()?;
        let weights = ["model.safetensors", "model.safetensors.index.json"];
        let has_weights = weights.iter().any(|file| folder.join(file).exists());
        if !has_weights && !self.random_weights {
            return Err(refuse(
                "--family",
                format!("a folder with {}", weights.join(" or ")),
                format!("{}, which has neither", folder.display()),
                "fetch the weights too, or begin with --random-weights",
            ));
        }
        let tokenizer = match data.tokens {
            Some(_) => None,
            None => Some(Tokenizer::open(&folder)?),
        };
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check_fits(&config)?;
        }
        if let Some(written) = &self.save_family {
            check_other(written, &folder)?;
        }
        Ok(Some(Family {
            folder,
            config,
            tokenizer,
            random_weights: self.random_weights,
            ignore_keys: options.ignore_keys,
        }))
    }
}

/// Makes the folder to write; it must not be the one that is read.
fn check_other(written: &Path, read: &Path) -> Result<()> {
    fs::create_dir_all(written).map_err(|e| Error::io("create", written, e))?;
    crate::common::outputs::check_writable(&written.join("config.json"))?;
    let place = |folder: &Path| fs::canonicalize(folder).map_err(|e| Error::io("read", folder, e));
    match place(written)? == place(read)? {
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
        match self.random_weights {
            true => format!("{}, begun with random weights", self.folder.display()),
            false => self.folder.display().to_string(),
        }
    }

    /// The trained model, with the files beside the weights that it started from.
    pub fn save(&self, model: &TransformerLM, folder: &Path) -> Result<()> {
        hf::save_as_from(model, &self.folder, folder)
    }
}
