//! Training that starts from a model of another family, with its tokenizer.

use crate::common::refusal;
use crate::flags::{DataFlags, ModelFlags, Vocabulary};
use candle_core::Device;
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use tallow::hf::{self, SaveOptions, Tokenizer};
use tallow::model::{LoadOptions, TransformerConfig, TransformerLM};
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

    /// Dtype of the written weights: f32, bf16 or f16 [default: f32]
    #[arg(
        long,
        hide_short_help = true,
        value_name = "NAME",
        requires = "save_family"
    )]
    save_dtype: Option<Precision>,

    /// Replace a model in the folder of --save-family
    #[arg(long, hide_short_help = true, requires = "save_family")]
    overwrite: bool,
}

/// The model that a run starts from.
pub struct Family<'f> {
    flags: &'f FamilyFlags,
    folder: PathBuf,
    pub config: TransformerConfig,
    /// Whether the files have another head than the embedding that config.json ties it to.
    is_untied: bool,
}

impl FamilyFlags {
    /// Opens the family, if one is asked for, with the meaning of its ids. Refuses a folder that cannot be written.
    pub fn open(
        &self,
        model: &ModelFlags,
        data: &DataFlags,
    ) -> Result<(Option<Family<'_>>, Vocabulary)> {
        let ids = match data.tokens {
            Some(_) => Vocabulary::Ids,
            None => Vocabulary::Bytes,
        };
        let Some(name) = &self.family else {
            return Ok((None, ids));
        };
        let folder = hf::find(name)?;
        let saved = hf::config_with(&folder, &self.load_options())?;
        let tied = match self.random_weights {
            true => saved.tie_embeddings,
            false => {
                hf::loaded_config(&folder, &self.load_options())
                    .map_err(or_random)?
                    .tie_embeddings
            }
        };
        let config = model.applied(TransformerConfig {
            tie_embeddings: tied,
            ..saved.clone()
        })?;
        let vocabulary = match ids {
            Vocabulary::Ids => ids,
            _ => {
                let tokenizer = Tokenizer::open(&folder)?;
                tokenizer.check_fits(&config)?;
                Vocabulary::Words(tokenizer.into())
            }
        };
        let family = Family {
            flags: self,
            is_untied: saved.tie_embeddings && !tied,
            folder,
            config,
        };
        if let Some(written) = &self.save_family {
            let place = |folder: &Path| fs::canonicalize(folder).ok();
            if place(written).is_some_and(|written| Some(written) == place(&family.folder)) {
                return Err(refusal(
                    "--save-family",
                    "another folder than --family's",
                    written.display(),
                    "the model that it started from would be lost; name a new folder",
                ));
            }
            hf::check_save(&family.config, written, &family.save_options())?;
        }
        Ok((Some(family), vocabulary))
    }

    fn load_options(&self) -> LoadOptions {
        LoadOptions {
            ignore_keys: self.ignore_config_key.clone(),
            ..Default::default()
        }
    }
}

/// Names the flag that needs no weights in the error of a folder without them.
fn or_random(mut error: Error) -> Error {
    if let Error::Data { hint, .. } = &mut error {
        hint.push_str(", or begin with --random-weights");
    }
    error
}

impl Family<'_> {
    /// Loads the model; `None` with --random-weights.
    pub fn load(&self, device: &Device) -> Result<Option<TransformerLM>> {
        if self.flags.random_weights {
            return Ok(None);
        }
        let model = hf::load_with(&self.folder, &self.flags.load_options(), device)?;
        Ok(Some(model.with_dropout(self.config.dropout)?))
    }

    /// Describes it for the header.
    pub fn name(&self) -> String {
        let folder = self.folder.display();
        match (self.flags.random_weights, self.is_untied) {
            (true, _) => format!("{folder}, begun with random weights"),
            (_, true) => format!(
                "{folder}, whose head differs from the embedding and is kept (config.json has tie_word_embeddings)"
            ),
            _ => folder.to_string(),
        }
    }

    /// Saves the trained model, with the files next to the weights that it started from.
    pub fn save(&self, model: &TransformerLM, folder: &Path) -> Result<()> {
        hf::save_with(model, folder, &self.save_options())
    }

    fn save_options(&self) -> SaveOptions {
        SaveOptions {
            from: Some(self.folder.clone()),
            dtype: self.flags.save_dtype.map(Precision::dtype),
            overwrite: self.flags.overwrite,
            ignore_keys: self.flags.ignore_config_key.clone(),
            ..Default::default()
        }
    }
}
