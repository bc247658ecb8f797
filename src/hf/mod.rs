//! Models as Hugging Face's folders have them: `config.json` and safetensors, one file or shards with an index.
//!
//! What lives here: reading such a folder into a [`TransformerLM`], and writing one that the library `transformers`
//! reads with equal logits. Llama 3.x, SmolLM2, Mistral with its sliding window, Qwen2.5 and Qwen3 without windows, and
//! GPT-2 are known; another architecture or setting is an error that names it. Weights are read one at a time, into the
//! dtype that is asked for. [`find`] says where the folder of a name is, [`Tokenizer`] is the one beside a model. What
//! does not live here: downloading.
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
mod gpt2;
mod settings;
#[cfg(feature = "hf")]
mod tokenizer;
mod weights;

pub use find::{find, find_in};
#[cfg(feature = "hf")]
pub use tokenizer::Tokenizer;

use crate::files::{Entry, open, read_to_string, save_tensors, write_bytes};
use crate::model::{LoadOptions, TransformerConfig, TransformerLM};
use crate::nn::Architecture;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use folder::{Folder, INDEX, SINGLE};
use serde_json::{Map, Value, json};
use std::io::Read;
use std::path::Path;
use weights::{Names, Theirs};

const CONFIG: &str = "config.json";

/// The bytes of a shard, at most, unless one weight alone has more.
const SHARD_BYTES: usize = 5_000_000_000;

/// The configuration of the model in a folder: its `config.json`. Its attention is flash where heads are not too wide.
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
    config::parse(&read_to_string(&path)?, &path, &options.ignore_keys)
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

/// The model in a folder, in f32.
///
/// # Errors
/// As [`load_with`].
pub fn load(folder: impl AsRef<Path>, device: &Device) -> Result<TransformerLM> {
    load_with(folder, &LoadOptions::default(), device)
}

/// The model in a folder. Of the options, prefixes are not stripped: names are the library's.
///
/// # Errors
/// Those of [`config()`]; a file or a shard that is missing or not whole; an index that names others; a weight that is
/// missing, misshapen, no float, or (unless the options allow it) not the model's: each with the file that it is in.
pub fn load_with(
    folder: impl AsRef<Path>,
    options: &LoadOptions,
    device: &Device,
) -> Result<TransformerLM> {
    let config = config_with(&folder, options)?;
    let files = Folder::open(folder.as_ref(), &config)?;
    TransformerLM::read_weights(&config, &files, options, device, |vb| vb)
}

/// Writes a folder that [`load`] and `transformers` read: `config.json`, and the weights in their dtype, in shards of
/// 5 GB with an index where they are more. Files of other names stay.
///
/// # Errors
/// A model of none of the families (one that rotates adjacent pairs, say); a path that cannot be written; a weight with
/// an element that is not finite.
pub fn save(model: &TransformerLM, folder: impl AsRef<Path>) -> Result<()> {
    save_in_shards(model, folder, SHARD_BYTES)
}

/// As [`save`], with what stands beside the weights in the folder `from`, where the model was loaded from: the
/// tokenizer's files, templates of chats, settings of generation, licences. Other files, weights of any kind among
/// them, are not copied, nor is `config.json`.
///
/// # Errors
/// As [`save`]; a file that cannot be read, or copied.
pub fn save_as_from(
    model: &TransformerLM,
    from: impl AsRef<Path>,
    folder: impl AsRef<Path>,
) -> Result<()> {
    save(model, &folder)?;
    for name in BESIDE {
        let source = from.as_ref().join(name);
        if source.exists() {
            let mut content = Vec::new();
            let read = open(&source)?.read_to_end(&mut content);
            read.map_err(|e| Error::io("read", &source, e))?;
            write_bytes(&folder.as_ref().join(name), &content)?;
        }
    }
    Ok(())
}

/// What [`save_as_from`] copies.
const BESIDE: [&str; 13] = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
];

/// As [`save`], in shards of at most `max_shard_bytes`; a weight of more bytes has a shard of its own.
///
/// # Errors
/// As [`save`].
pub fn save_in_shards(
    model: &TransformerLM,
    folder: impl AsRef<Path>,
    max_shard_bytes: usize,
) -> Result<()> {
    let folder = folder.as_ref();
    let weights = weights(model);
    let dtype = weights
        .first()
        .map_or("float32", |weight| match weight.dtype() {
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::F64 => "float64",
            _ => "float32",
        });
    let config = config::to_json(model.config(), dtype)?;
    std::fs::create_dir_all(folder).map_err(|e| Error::io("write", folder, e))?;
    let mut shards: Vec<(usize, Vec<Weight>)> = Vec::new();
    let mut total = 0;
    for weight in weights {
        let bytes = weight.bytes();
        total += bytes;
        match shards.last_mut() {
            Some((size, shard)) if *size + bytes <= max_shard_bytes => {
                *size += bytes;
                shard.push(weight);
            }
            _ => shards.push((bytes, vec![weight])),
        }
    }
    let count = shards.len();
    let mut weight_map = Map::new();
    for (i, (_, shard)) in shards.into_iter().enumerate() {
        let file = match count {
            1 => SINGLE.to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        for weight in &shard {
            weight_map.insert(weight.theirs.name.clone(), Value::String(file.clone()));
        }
        let entries: Vec<Entry> = shard.iter().map(Weight::entry).collect::<Result<_>>()?;
        save_tensors(&folder.join(file), entries, &[("format", "pt".into())], 1)?;
    }
    let [single, index] = [SINGLE, INDEX].map(|name| folder.join(name));
    match count {
        1 => remove(&index)?,
        _ => {
            let json = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            write_bytes(&index, pretty(&json).as_bytes())?;
            remove(&single)?;
        }
    }
    write_bytes(&folder.join(CONFIG), pretty(&config).as_bytes())
}

/// A weight there, and what it is made of.
struct Weight {
    theirs: Theirs,
    /// One of ours, or the three that are one there.
    ours: Vec<Entry>,
}

/// The model's weights as they are there, in its order.
fn weights(model: &TransformerLM) -> Vec<Weight> {
    let names = Names::of(model.config().architecture);
    let mut weights: Vec<Weight> = Vec::new();
    for entry in model.entries() {
        let theirs = names.theirs(&entry.name);
        let theirs = theirs.unwrap_or_else(|| Theirs::as_here(entry.name.clone()));
        let mut known = weights.iter_mut().rev();
        match known.find(|weight| weight.theirs.name == theirs.name) {
            Some(weight) => weight.ours.push(entry),
            None => weights.push(Weight {
                theirs,
                ours: vec![entry],
            }),
        }
    }
    weights
}

impl Weight {
    fn dtype(&self) -> DType {
        self.ours[0].tensor.dtype()
    }

    fn bytes(&self) -> usize {
        let ours = self.ours.iter().map(|entry| entry.tensor.elem_count());
        ours.sum::<usize>() * self.dtype().size_in_bytes()
    }

    /// As it is saved: here it takes memory, where it lies another way there.
    fn entry(&self) -> Result<Entry> {
        let tensors: Vec<Tensor> = self.ours.iter().map(|entry| entry.tensor.clone()).collect();
        Ok(Entry {
            name: self.theirs.name.clone(),
            tensor: self.theirs.joined(&tensors)?,
            numbers: self.ours[0].numbers,
        })
    }
}

/// Removes a file of another model that was here: a reader would take it for this one's.
fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

fn pretty(json: &Value) -> String {
    format!("{json:#}\n")
}
