//! Models in Hugging Face's folders: `config.json` and safetensors, one file or shards with an index.
//!
//! [`load`] reads such a folder into a [`TransformerLM`]; [`save()`] writes one that the library `transformers` reads
//! with equal logits. Supported are Llama 3.x, SmolLM2, Mistral with its sliding window, Qwen2.5 and Qwen3 without
//! windows, GPT-2 and Gemma 2. Any other architecture or setting is an error that names it. Weights are read one at a
//! time and converted to the requested dtype. [`find`] returns the folder of a model's name, and [`Tokenizer`] is a
//! model's tokenizer. Nothing is downloaded.
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
mod merged_config;
mod save;
mod settings;
#[cfg(feature = "hf")]
mod tokenizer;
mod weights;

pub use find::{find, find_in};
pub use save::{SaveOptions, check_save, save, save_with};
#[cfg(feature = "hf")]
pub use tokenizer::Tokenizer;

use crate::Result;
use crate::attention::Algorithm;
use crate::files::{read, read_to_string};
use crate::model::{LoadOptions, Origin, TransformerConfig, TransformerLM};
use crate::nn::Architecture;
use candle_core::Device;
use folder::{Folder, check_no_adapter, exists};
use std::path::Path;
use weights::Names;

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";

/// Reads the configuration of the model in a folder from its `config.json`, without reading weights.
///
/// ```
/// use tallow::hf;
///
/// # let folder = std::env::temp_dir().join(format!("tallow-hf-config-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).map_err(|e| tallow::Error::io("write", &folder, e))?;
/// let text = r#"{"model_type": "gpt2", "vocab_size": 50, "n_positions": 8,
///                "n_embd": 16, "n_layer": 3, "n_head": 2}"#;
/// std::fs::write(folder.join("config.json"), text)
///     .map_err(|e| tallow::Error::io("write", &folder, e))?;
/// assert_eq!(hf::config(&folder)?.num_layers, 3);
/// # let _ = std::fs::remove_dir_all(&folder);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A file that cannot be read or is not JSON; an unknown architecture or setting (keys that `transformers` ignores are
/// allowed); sizes that are not those of a valid model. Each error names the file.
pub fn config(folder: impl AsRef<Path>) -> Result<TransformerConfig> {
    config_with(folder, &LoadOptions::default())
}

/// Reads the configuration like [`config()`], without the keys that the options [ignore](LoadOptions::ignore_keys). The
/// other options have no effect.
///
/// ```
/// use tallow::hf;
/// use tallow::model::LoadOptions;
///
/// # let folder = std::env::temp_dir().join(format!("tallow-config-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).map_err(|e| tallow::Error::io("write", &folder, e))?;
/// let text = r#"{"model_type": "gpt2", "vocab_size": 50, "n_positions": 8,
///                "n_embd": 16, "n_layer": 1, "n_head": 2, "trained_by": "me"}"#;
/// std::fs::write(folder.join("config.json"), text)
///     .map_err(|e| tallow::Error::io("write", &folder, e))?;
/// let error = hf::config(&folder).unwrap_err();
/// assert!(error.to_string().contains("trained_by"));
/// let options = LoadOptions { ignore_keys: vec!["trained_by".into()], ..Default::default() };
/// assert_eq!(hf::config_with(&folder, &options)?.d_model, 16);
/// # let _ = std::fs::remove_dir_all(&folder);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`config()`].
pub fn config_with(folder: impl AsRef<Path>, options: &LoadOptions) -> Result<TransformerConfig> {
    let path = folder.as_ref().join(CONFIG);
    config::parse(&config_text(folder.as_ref())?, &path, &options.ignore_keys)
}

/// Reads the text of a folder's `config.json`.
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
/// `tie_word_embeddings` is set and the files have a head that differs from the embedding. `transformers` then keeps
/// both, and so does this crate (`tie_embeddings` is false). Both weights are read to compare them.
///
/// ```
/// use tallow::hf;
/// use tallow::model::{LoadOptions, TransformerConfig, TransformerLM};
/// use tallow::ops::RotaryPairs;
///
/// # let folder = std::env::temp_dir().join(format!("tallow-loaded-config-{}", std::process::id()));
/// let config = TransformerConfig {
///     vocab_size: 50, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32,
///     rope_pairs: RotaryPairs::Halves, ..Default::default()
/// };
/// hf::save(&TransformerLM::new(&config, 0, &tallow::device("cpu")?)?, &folder)?;
/// assert!(!hf::loaded_config(&folder, &LoadOptions::default())?.tie_embeddings);
/// # let _ = std::fs::remove_dir_all(&folder);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`config()`]; weight files that are missing or incomplete.
pub fn loaded_config(folder: impl AsRef<Path>, options: &LoadOptions) -> Result<TransformerConfig> {
    let folder = folder.as_ref();
    let (config, _) = opened(folder, &config_text(folder)?, options)?;
    Ok(config)
}

/// Returns the configuration of the model in a folder whose `config.json` is `text`, and its weight files.
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

/// Returns the name in the files of a [`TransformerLM`] weight, or of the tensor that it is a part of; `None` for other
/// names.
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
    let file_weight = Names::of(architecture).file_weight(weight)?;
    Some(file_weight.name)
}

/// Loads the model in a folder, in f32.
///
/// The [module](self) has an example.
///
/// # Errors
/// Those of [`load_with`].
pub fn load(folder: impl AsRef<Path>, device: &Device) -> Result<TransformerLM> {
    load_with(folder, &LoadOptions::default(), device)
}

/// Loads the model in a folder: from `model.safetensors`, else from the shards that an index names. Prefixes are
/// stripped from the names in the files. The prefix `model.` or `transformer.` may be missing, as in files of a base
/// model. The model remembers the settings of the folder, for [`save()`]. Its attention is flash, or naive if the heads
/// are [too wide](TransformerConfig::check_attention).
///
/// Whether the output head is tied to the embedding is decided as in [`loaded_config`].
///
/// ```
/// use candle_core::DType;
/// use tallow::hf;
/// use tallow::model::{LoadOptions, TransformerConfig, TransformerLM};
/// use tallow::ops::RotaryPairs;
///
/// # let folder = std::env::temp_dir().join(format!("tallow-load-with-{}", std::process::id()));
/// let device = tallow::device("cpu")?;
/// let config = TransformerConfig {
///     vocab_size: 50, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32,
///     rope_pairs: RotaryPairs::Halves, ..Default::default()
/// };
/// hf::save(&TransformerLM::new(&config, 0, &device)?, &folder)?; // in f32
/// let options = LoadOptions { dtype: DType::BF16, ..Default::default() };
/// let model = hf::load_with(&folder, &options, &device)?;
/// assert!(model.parameters().iter().all(|(_, weight)| weight.dtype() == DType::BF16));
/// # let _ = std::fs::remove_dir_all(&folder);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`config()`]; a folder without safetensors, or with an adapter; a file or shard that is missing or
/// incomplete; an index that does not match the shards; a weight that is missing, misshapen, not a float, not finite,
/// or (unless the options allow it) unknown. Each error names the file.
pub fn load_with(
    folder: impl AsRef<Path>,
    options: &LoadOptions,
    device: &Device,
) -> Result<TransformerLM> {
    let folder = folder.as_ref();
    let origin = origin(folder, &options.ignore_keys)?;
    let (config, files) = opened(folder, &origin.config, options)?;
    let options = LoadOptions {
        strip_prefixes: Vec::new(), // stripped when the files were opened
        ..options.clone()
    };
    let model = TransformerLM::read_weights(&config, &files, &options, device, |vb| vb)?;
    let attention = match config.check_attention(Algorithm::Flash) {
        Ok(()) => Algorithm::Flash,
        Err(_) => Algorithm::Naive,
    };
    Ok(model.with_attention(attention)?.with_origin(origin))
}

/// Reads the files of a folder, except weights, that are saved with its model.
fn origin(folder: &Path, ignored: &[String]) -> Result<Origin> {
    let generation = folder.join(GENERATION);
    Ok(Origin {
        config: config_text(folder)?,
        ignored: ignored.to_vec(),
        generation: match exists(&generation) {
            true => Some(read(&generation)?),
            false => None,
        },
    })
}
