//! Models as Hugging Face's folders have them: `config.json` and safetensors, one file or shards with an index.
//!
//! [`load`] reads such a folder into a [`TransformerLM`], and [`save()`] writes one that the library `transformers`
//! reads with equal logits. Llama 3.x, SmolLM2, Mistral with its sliding window, Qwen2.5 and Qwen3 without windows,
//! GPT-2 and Gemma 2 are known; another architecture or setting is an error that names it. Weights are read one at a
//! time, into the dtype that is asked for. [`find`] says where the folder of a name is, [`Tokenizer`] is the one beside
//! a model. What does not live here: downloading.
//!
//! ```
//! use tallow::hf;
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::ops::RotaryPairs;
//!
//! # let folder = std::env::temp_dir().join(format!("tallow-hf-{}", std::process::id()));
//! let device = tallow::device("cpu")?;
//! let config = TransformerConfig {
//!     vocab_size: 50, d_model: 16, num_layers: 1, num_heads: 4, num_kv_heads: Some(2), d_ff: 32,
//!     rope_pairs: RotaryPairs::Halves, tie_embeddings: true, ..Default::default()
//! };
//! let model = TransformerLM::new(&config, 0, &device)?;
//! hf::save(&model, &folder)?; // for transformers.AutoModelForCausalLM.from_pretrained
//! let same = hf::load(&folder, &device)?;
//! assert_eq!(same.num_parameters(), model.num_parameters());
//! # let _ = std::fs::remove_dir_all(&folder);
//! # Ok::<(), tallow::Error>(())
//! ```

mod config;
mod find;
mod folder;
mod gemma2;
mod gpt2;
#[cfg(test)]
mod interrupted;
mod save;
mod settings;
#[cfg(feature = "hf")]
mod tokenizer;
mod weights;
mod written_back;

pub use find::{find, find_in};
pub use save::{SaveOptions, check_save, save, save_with};
#[cfg(feature = "hf")]
pub use tokenizer::Tokenizer;

use crate::Result;
use crate::files::{read, read_to_string};
use crate::model::{LoadOptions, Origin, TransformerConfig, TransformerLM};
use crate::nn::Architecture;
use candle_core::Device;
use folder::{Folder, check_no_adapter, is_there};
use std::path::Path;
use weights::Names;

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";

/// Reads the configuration of the model in a folder: its `config.json`, without a look at the weights. Its attention is
/// flash where heads are not too wide.
///
/// # Errors
/// A file that cannot be read or is no JSON; an architecture or a setting that is not known (a key that `transformers`
/// ignores too is known); sizes that make no model. Each names the file.
pub fn config(folder: impl AsRef<Path>) -> Result<TransformerConfig> {
    config_with(folder, &LoadOptions::default())
}

/// The configuration of the model in a folder, as [`config()`] reads it, without the keys that the options
/// [ignore](LoadOptions::ignore_keys). The other options change nothing here.
///
/// ```
/// use tallow::hf;
/// use tallow::model::LoadOptions;
///
/// # let folder = std::env::temp_dir().join(format!("tallow-config-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).map_err(|e| tallow::Error::io("write", &folder, e))?;
/// let text = r#"{"model_type": "gpt2", "vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2,
///                "trained_by": "me"}"#;
/// std::fs::write(folder.join("config.json"), text).map_err(|e| tallow::Error::io("write", &folder, e))?;
/// let error = hf::config(&folder).unwrap_err();
/// assert!(error.to_string().contains("trained_by"));
/// let options = LoadOptions { ignore_keys: vec!["trained_by".into()], ..Default::default() };
/// assert_eq!(hf::config_with(&folder, &options)?.d_model, 16);
/// # let _ = std::fs::remove_dir_all(&folder);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`config()`].
pub fn config_with(folder: impl AsRef<Path>, options: &LoadOptions) -> Result<TransformerConfig> {
    let path = folder.as_ref().join(CONFIG);
    config::parse(&config_text(folder.as_ref())?, &path, &options.ignore_keys)
}

/// The text of a folder's `config.json`.
fn config_text(folder: &Path) -> Result<String> {
    if !folder.is_dir() {
        return Err(find::missing(
            folder,
            "no such folder (hf::find looks in the cache)".into(),
        ));
    }
    check_no_adapter(folder)?;
    read_to_string(&folder.join(CONFIG))
}

/// Returns the configuration that [`load_with`] gives the model in a folder. It is that of [`config_with`] unless
/// `tie_word_embeddings` is set and the files have a head that differs from the embedding: `transformers` then keeps
/// both, and so does this crate (`tie_embeddings` is false). It reads both weights to compare them.
///
/// # Errors
/// Those of [`config()`]; files of weights that are missing or not whole.
pub fn loaded_config(folder: impl AsRef<Path>, options: &LoadOptions) -> Result<TransformerConfig> {
    let folder = folder.as_ref();
    let (config, _) = opened(folder, &config_text(folder)?, options)?;
    Ok(config)
}

/// The configuration of the model in a folder whose `config.json` is `text`, and the files of its weights.
fn opened(folder: &Path, text: &str, options: &LoadOptions) -> Result<(TransformerConfig, Folder)> {
    let config = config::parse(text, &folder.join(CONFIG), &options.ignore_keys)?;
    let mut files = Folder::open(folder, config.architecture, &options.strip_prefixes)?;
    let tie_embeddings = files.tie_head(config.tie_embeddings, options.dtype)?;
    let config = TransformerConfig {
        tie_embeddings,
        ..config
    };
    Ok((config, files))
}

/// What a weight of a [`TransformerLM`] is called there, or what it is a part of; `None` for what is none.
///
/// ```
/// use tallow::hf;
/// use tallow::nn::Architecture::{Gpt2, Llama};
///
/// let w3 = hf::name_of(Llama, "layers.3.ffn.w3.weight");
/// assert_eq!(w3.unwrap(), "model.layers.3.mlp.up_proj.weight");
/// let keys = hf::name_of(Gpt2, "layers.3.attn.k_proj.bias"); // the second third of it
/// assert_eq!(keys.unwrap(), "transformer.h.3.attn.c_attn.bias");
/// ```
pub fn name_of(architecture: Architecture, weight: &str) -> Option<String> {
    let theirs = Names::of(architecture).theirs(weight)?;
    Some(theirs.name)
}

/// Loads the model in a folder, in f32.
///
/// # Errors
/// As [`load_with`].
pub fn load(folder: impl AsRef<Path>, device: &Device) -> Result<TransformerLM> {
    load_with(folder, &LoadOptions::default(), device)
}

/// Loads the model in a folder: of `model.safetensors`, else of the shards that an index names. Prefixes are stripped
/// from the names in the files; `model.` or `transformer.`, which files of a base model lack, may be there or not. The
/// model remembers the settings of the folder, for [`save()`].
///
/// The output head is the embedding as [`loaded_config`] has it.
///
/// # Errors
/// Those of [`config()`]; a folder that has no safetensors, or an adapter; a file or a shard that is missing or not
/// whole; an index that names others; a weight that is missing, misshapen, no float, not finite, or (unless the options
/// allow it) not the model's: each with the file that it is in.
pub fn load_with(
    folder: impl AsRef<Path>,
    options: &LoadOptions,
    device: &Device,
) -> Result<TransformerLM> {
    let folder = folder.as_ref();
    let origin = origin(folder, &options.ignore_keys)?;
    let (config, files) = opened(folder, &origin.config, options)?;
    let options = LoadOptions {
        strip_prefixes: Vec::new(), // they were stripped of the names in the files
        ..options.clone()
    };
    let model = TransformerLM::read_weights(&config, &files, &options, device, |vb| vb)?;
    Ok(model.with_origin(origin))
}

/// What a folder has besides weights that is saved with its model.
fn origin(folder: &Path, ignored: &[String]) -> Result<Origin> {
    let generation = folder.join(GENERATION);
    Ok(Origin {
        config: config_text(folder)?,
        ignored: ignored.to_vec(),
        generation: match is_there(&generation) {
            true => Some(read(&generation)?),
            false => None,
        },
    })
}
