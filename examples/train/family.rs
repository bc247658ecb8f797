//! Training that starts from a model of another family, with its tokenizer.

use crate::common::refusal;
use crate::flags::InputFlags;
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use clap::Args;
use std::fs;
use std::path::PathBuf;
use tallow::hf::{self, SaveOptions, Tokenizer};
use tallow::model::{LoadOptions, TransformerConfig};
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
    pub random_weights: bool,

    /// Ignore this unknown key of the folder's config.json
    #[arg(long, hide_short_help = true, value_name = "KEY")]
    ignore_config_key: Vec<String>,

    /// Write the trained model here, as transformers reads it
    #[arg(long, value_name = "FOLDER")]
    pub save_family: Option<PathBuf>,

    /// Dtype of the written weights: f32, bf16 or f16 [default: f32]
    #[arg(long, hide_short_help = true, value_name = "NAME")]
    save_dtype: Option<Precision>,

    /// Replace a model in the folder of --save-family
    #[arg(long, hide_short_help = true)]
    overwrite: bool,
}

/// The model that a run starts from.
pub struct Family {
    folder: PathBuf,
    load: LoadOptions,
    pub config: TransformerConfig,
    /// The options of saving the trained model: with the files next to the weights that it started from.
    pub save: SaveOptions,
}

impl FamilyFlags {
    /// Opens the family, if one is named. Refuses a folder that the trained model cannot be written to.
    pub fn open(&self, input: &InputFlags) -> Result<Option<Family>> {
        let Some(name) = &self.family else {
            return Ok(None);
        };
        let folder = hf::find(name)?;
        let load = LoadOptions {
            ignore_keys: self.ignore_config_key.clone(),
            ..Default::default()
        };
        let config = match self.random_weights {
            true => hf::config_with(&folder, &load)?,
            false => hf::loaded_config(&folder, &load).map_err(or_random)?,
        };
        let config = input.applied(config)?;
        let save = SaveOptions {
            from: Some(folder.clone()),
            dtype: self.save_dtype.map(Precision::dtype),
            overwrite: self.overwrite,
            ignore_keys: self.ignore_config_key.clone(),
            ..Default::default()
        };
        if let Some(written) = &self.save_family {
            if fs::canonicalize(written).ok() == fs::canonicalize(&folder).ok() {
                return Err(refusal(
                    "--save-family",
                    "another folder than --family's",
                    written.display(),
                    "the model that it started from would be lost; name a new folder",
                ));
            }
            hf::check_save(&config, written, &save)?;
        }
        Ok(Some(Family {
            folder,
            load,
            config,
            save,
        }))
    }

    /// Describes the model for the header.
    pub fn name(&self, family: &Family) -> String {
        let begun = ["", ", begun with random weights"][usize::from(self.random_weights)];
        format!("{}{begun}", family.folder.display())
    }
}

/// Names the flag that needs no weights in the error of a folder without them.
fn or_random(mut error: Error) -> Error {
    if let Error::Data { hint, .. } = &mut error {
        hint.push_str(", or begin with --random-weights");
    }
    error
}

impl Family {
    /// Loads the weights.
    pub fn load(&self, device: &Device) -> Result<VarBuilder<'static>> {
        let model = hf::load_with(&self.folder, &self.load, device)?;
        let weights = model.weights().into_iter().collect();
        Ok(VarBuilder::from_tensors(weights, DType::F32, device))
    }

    /// Opens the tokenizer, which must fit the model.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = Tokenizer::open(&self.folder)?;
        tokenizer.check_fits(&self.config)?;
        Ok(tokenizer)
    }
}
