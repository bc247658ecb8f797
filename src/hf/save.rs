//! Saving of folders: weights, settings and the tokenizer's files. A reader never finds a mix of two models.

use super::folder::{ADAPTER, INDEX, SINGLE, check_no_adapter, exists};
use super::merged_config;
use super::weights::{FileWeight, Names};
use super::{CONFIG, GENERATION};
use crate::files::{Entry, Staged, read, read_to_string, remove, rename, save_tensors};
use crate::model::{Origin, TransformerConfig, TransformerLM};
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Options of [`save_with`].
///
/// ```
/// use candle_core::DType;
/// use tallow::hf::SaveOptions;
///
/// // A model that was loaded from SmolLM2-135M and trained in f32, as it was published: in bf16,
/// // with its tokenizer.
/// let options = SaveOptions {
///     from: Some("SmolLM2-135M".into()),
///     dtype: Some(DType::BF16),
///     ..Default::default()
/// };
/// # let _ = options;
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SaveOptions {
    /// A folder from which the tokenizer's files, chat templates and licences are copied. Its `config.json` and
    /// `generation_config.json` replace those that the model was loaded with. A model from a training run's checkpoint
    /// has neither, so pass the folder that the run began with. `None` copies nothing.
    pub from: Option<PathBuf>,
    /// Unknown keys to allow in the `config.json` of [`from`](Self::from), as in
    /// [`LoadOptions::ignore_keys`](crate::model::LoadOptions::ignore_keys). They are written unchanged.
    pub ignore_keys: Vec<String>,
    /// The dtype of the weights in the files: f64, f32, f16 or bf16. `None` means that of the parameters.
    pub dtype: Option<DType>,
    /// Whether an existing model, or another file to be written, is replaced. Otherwise it is an error.
    pub overwrite: bool,
    /// The most bytes of a shard; a larger weight has a shard of its own. The default is 5 GB.
    pub max_shard_bytes: usize,
}

/// The parameters' dtype, nothing copied, nothing replaced, shards of 5 GB.
impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            from: None,
            ignore_keys: Vec::new(),
            dtype: None,
            overwrite: false,
            max_shard_bytes: 5_000_000_000,
        }
    }
}

/// Files copied from [`SaveOptions::from`].
const COPIED: [&str; 13] = [
    GENERATION,
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
    "LICENSE",
    "LICENSE.txt",
];

/// Files of which any one shows that a folder contains a model.
const MODEL_FILES: [&str; 6] = [
    CONFIG,
    SINGLE,
    INDEX,
    ADAPTER,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// Writes a folder that [`load`](super::load) and `transformers` read: `config.json`, and the weights in their dtype.
/// Weights of more than 5 GB are split into shards with an index.
///
/// A model that was loaded from such a folder keeps its settings: the keys of `config.json` that this crate does not
/// use (ids of special tokens, the model's class) and `generation_config.json` are written as they were read.
///
/// The [module](super) has an example.
///
/// # Errors
/// Those of [`save_with`].
pub fn save(model: &TransformerLM, folder: impl AsRef<Path>) -> Result<()> {
    save_with(model, folder, &SaveOptions::default())
}

/// Like [`save()`], with options: another dtype, the tokenizer's files, replacing an existing model.
///
/// All weights are written before anything is replaced, so a process that dies meanwhile leaves the old model. If the
/// settings stay the same, the switch is one rename. Otherwise `config.json` is removed before the switch and written
/// after it. A process that dies in between leaves a folder that cannot be loaded, never a mix of two models. The rest
/// of the old model and of interrupted saves is removed last.
///
/// ```
/// use tallow::hf::{self, SaveOptions};
/// use tallow::model::{TransformerConfig, TransformerLM};
/// use tallow::ops::RotaryPairs;
///
/// # let folder = std::env::temp_dir().join(format!("tallow-save-with-{}", std::process::id()));
/// let config = TransformerConfig {
///     vocab_size: 50, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32,
///     rope_pairs: RotaryPairs::Halves, ..Default::default()
/// };
/// let model = TransformerLM::new(&config, 0, &tallow::device("cpu")?)?;
/// hf::save(&model, &folder)?;
/// assert!(hf::save(&model, &folder).is_err()); // there is a model already
/// hf::save_with(&model, &folder, &SaveOptions { overwrite: true, ..Default::default() })?;
/// # let _ = std::fs::remove_dir_all(&folder);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// A folder with a model, or with files that would be replaced, without [`overwrite`](SaveOptions::overwrite); a folder
/// with an adapter; a symbolic link in place of a file to be written; a path that cannot be written; a model in none of
/// the families (one that rotates adjacent pairs, for example); a weight with an element that is not finite, or too
/// large for the dtype. Until everything is written, the folder keeps its content.
pub fn save_with(
    model: &TransformerLM,
    folder: impl AsRef<Path>,
    options: &SaveOptions,
) -> Result<()> {
    let folder = folder.as_ref();
    let weights = weights(model, options.dtype);
    let dtype = weights.first().map_or(DType::F32, |weight| weight.dtype);
    let files = files(model.config(), model.origin(), dtype, options)?;
    let old = Old::find(folder, &files, options)?;
    fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;

    let shards = split(&weights, options.max_shard_bytes);
    let paths: Vec<PathBuf> = (1..=shards.len())
        .map(|number| folder.join(shard_name(old.next_set(), number, shards.len())))
        .collect();
    let is_stale =
        !files.iter().any(|(name, _)| *name == GENERATION) && exists(&folder.join(GENERATION));
    let mut replacement = Replacement {
        folder,
        paths: &paths,
        index: None,
        changed: Vec::new(),
        old_config: None,
    };
    let switched = replacement
        .prepare(&shards, &files, &old, is_stale)
        .and_then(|()| replacement.switch());
    if let Err(error) = switched {
        replacement.undo();
        return Err(error);
    }
    if is_stale {
        remove(&folder.join(GENERATION))?;
    }
    for file in replacement.changed {
        file.persist()?;
    }
    for shard in &old.shards {
        remove(&folder.join(shard))?;
    }
    Ok(())
}

/// Creates the folder, and checks whether [`save_with`] could write a model of this configuration there, as far as can
/// be known without its weights: call it before a training, not after it.
///
/// ```
/// use tallow::hf::{self, SaveOptions};
/// use tallow::model::TransformerConfig;
/// use tallow::ops::RotaryPairs;
///
/// # let folder = std::env::temp_dir().join(format!("tallow-check-save-{}", std::process::id()));
/// let adjacent = TransformerConfig::preset("tiny")?; // rotates adjacent pairs, which no family does
/// let halves = TransformerConfig { rope_pairs: RotaryPairs::Halves, ..adjacent.clone() };
/// assert!(hf::check_save(&halves, &folder, &SaveOptions::default()).is_ok());
/// assert!(hf::check_save(&adjacent, &folder, &SaveOptions::default()).is_err());
/// # let _ = std::fs::remove_dir_all(&folder);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`save_with`].
pub fn check_save(
    config: &TransformerConfig,
    folder: impl AsRef<Path>,
    options: &SaveOptions,
) -> Result<()> {
    let folder = folder.as_ref();
    let files = files(config, None, options.dtype.unwrap_or(DType::F32), options)?;
    Old::find(folder, &files, options)?;
    fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    Staged::new(&folder.join(CONFIG), &[]).map(|_| ())
}

/// A file's name and content.
type Content = (&'static str, Vec<u8>);

/// Returns the files to write in addition to weights, `config.json` last.
fn files(
    config: &TransformerConfig,
    origin: Option<&Origin>,
    dtype: DType,
    options: &SaveOptions,
) -> Result<Vec<Content>> {
    let mut files = Vec::new();
    let mut origin_of_from = None;
    if let Some(from) = &options.from {
        for name in COPIED.iter().filter(|name| exists(&from.join(name))) {
            files.push((*name, read(&from.join(name))?));
        }
        let has_settings = exists(&from.join(CONFIG));
        origin_of_from = has_settings
            .then(|| super::origin(from, &options.ignore_keys))
            .transpose()?;
    }
    let origin = origin_of_from.as_ref().or(origin);
    if let Some(generation) = origin.and_then(|origin| origin.generation.clone())
        && !files.iter().any(|(name, _)| *name == GENERATION)
    {
        files.push((GENERATION, generation));
    }
    let settings = merged_config::settings(config, dtype_name(dtype)?, origin)?;
    files.push((CONFIG, pretty(&settings).into_bytes()));
    Ok(files)
}

/// Returns the name of a dtype in `transformers`.
fn dtype_name(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F16 => Ok("float16"),
        DType::BF16 => Ok("bfloat16"),
        DType::F32 => Ok("float32"),
        DType::F64 => Ok("float64"),
        other => Err(Error::dtype("hf::save", other.as_str()).must_be(
            "weights of f64, f32, f16 or bf16",
            "set another SaveOptions::dtype",
        )),
    }
}

/// The content of a folder before a save.
struct Old {
    /// The shards, including those of interrupted saves.
    shards: BTreeSet<String>,
    /// The numbers of the sets that the shards belong to.
    sets: BTreeSet<usize>,
    /// Files that already have the content to be written.
    same: BTreeSet<&'static str>,
}

impl Old {
    /// Finds what a save of these files replaces and removes.
    fn find(folder: &Path, files: &[Content], options: &SaveOptions) -> Result<Self> {
        let mut old = Self {
            shards: BTreeSet::new(),
            sets: BTreeSet::new(),
            same: BTreeSet::new(),
        };
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(old),
            Err(e) => return Err(Error::io("read", folder, e)),
        };
        let in_index: BTreeSet<String> = indexed(folder).into_iter().collect();
        let mut names: Vec<String> = in_index.iter().cloned().collect();
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("read", folder, e))?;
            names.extend(entry.file_name().into_string());
        }
        // A set that only the index names is in use too: its missing shard must not reappear as another model's.
        old.sets
            .extend(names.iter().filter_map(|name| set_of(name)));
        let is_shard = |name: &String| set_of(name).is_some() || in_index.contains(name);
        let shards = names.into_iter().filter(is_shard);
        let shards = shards.filter(|name| name != SINGLE && exists(&folder.join(name)));
        old.shards.extend(shards);
        let others = [SINGLE, INDEX, GENERATION];
        let names = files.iter().map(|(name, _)| *name).chain(others);
        for name in names.chain(old.shards.iter().map(String::as_str)) {
            check_no_link(&folder.join(name))?;
        }
        check_no_adapter(folder)?;
        let is_new = |name: &str| !exists(&folder.join(name));
        for (name, content) in files.iter().filter(|(name, _)| !is_new(name)) {
            if read(&folder.join(name))? == *content {
                old.same.insert(name);
            }
        }
        if !options.overwrite {
            let is_replaced = |name: &&str| !is_new(name) && !old.same.contains(name);
            let mut model = MODEL_FILES.iter().copied().filter(|name| !is_new(name));
            let mut replaced = files.iter().map(|(name, _)| *name).filter(is_replaced);
            let first = model.next().or_else(|| replaced.next());
            if let Some(name) = first.or(old.shards.first().map(String::as_str)) {
                return Err(Error::data(folder.display().to_string(), name).must_be(
                    "a folder without a model, or files that a save replaces",
                    "name another folder, or allow it (SaveOptions::overwrite, --overwrite)",
                ));
            }
        }
        Ok(old)
    }

    /// Returns the number of a shard set that the folder does not have.
    fn next_set(&self) -> usize {
        (1..).find(|set| !self.sets.contains(set)).unwrap_or(1)
    }
}

/// Refuses a symbolic link: its target (in the hub's cache, for example) is outside of the folder.
fn check_no_link(path: &Path) -> Result<()> {
    match fs::read_link(path) {
        Ok(target) => Err(Error::Format {
            path: path.into(),
            problem: format!("it is a symbolic link to {}", target.display()),
            hint: "a save does not write through links; name another folder".into(),
        }),
        Err(_) => Ok(()),
    }
}

/// Returns the shards that the folder's index names, under any names.
fn indexed(folder: &Path) -> Vec<String> {
    let text = read_to_string(&folder.join(INDEX)).unwrap_or_default();
    let json: Value = serde_json::from_str(&text).unwrap_or_default();
    let map = json.get("weight_map").and_then(Value::as_object);
    let shards = map
        .into_iter()
        .flat_map(Map::values)
        .filter_map(Value::as_str);
    let is_own_shard = |name: &&str| {
        let path = Path::new(name);
        path.file_name() == Some(name.as_ref())
            && path.extension().is_some_and(|end| end == "safetensors")
    };
    shards.filter(is_own_shard).map(String::from).collect()
}

/// Returns `model-00001-of-00003.safetensors`, or `model-2-00001-of-00003.safetensors` for a second set in the folder.
fn shard_name(set: usize, number: usize, count: usize) -> String {
    let set = match set {
        1 => String::new(),
        _ => format!("{set}-"),
    };
    format!("model-{set}{number:05}-of-{count:05}.safetensors")
}

/// Returns the set of a shard according to its name; `None` for other files.
fn set_of(name: &str) -> Option<usize> {
    let name = name.strip_prefix("model-")?.strip_suffix(".safetensors")?;
    let (before, count) = name.rsplit_once("-of-")?;
    let (set, number) = match before.split_once('-') {
        Some((set, number)) => (set.parse().ok()?, number),
        None => (1, before),
    };
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(number) && is_number(count)).then_some(set)
}

/// A new model next to the old one, complete before it replaces that.
struct Replacement<'a> {
    folder: &'a Path,
    /// Paths of the new shards.
    paths: &'a [PathBuf],
    /// The index, if there are several shards.
    index: Option<Staged>,
    /// Other files whose content changes, `config.json` last; empty if none changes.
    changed: Vec<Staged>,
    /// The old `config.json`, if it must be absent during the switch.
    old_config: Option<Staged>,
}

impl Replacement<'_> {
    /// Writes the shards and stages the other files. A reader of the folder still finds the old model.
    fn prepare(
        &mut self,
        shards: &[&[Weight]],
        files: &[Content],
        old: &Old,
        is_stale: bool,
    ) -> Result<()> {
        let mut weight_map = Map::new();
        let mut total = 0;
        for (shard, path) in shards.iter().zip(self.paths) {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            for weight in *shard {
                weight_map.insert(weight.file_weight.name.clone(), json!(file));
                total += weight.bytes();
            }
            let entries = shard.iter().map(|weight| weight.entry(path));
            let entries: Vec<Entry> = entries.collect::<Result<_>>()?;
            save_tensors(path, entries, &[("format", "pt".into())], 1)?;
        }
        if shards.len() > 1 {
            let json = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            let text = pretty(&json);
            self.index = Some(Staged::new(&self.folder.join(INDEX), text.as_bytes())?);
        }
        let is_same = |name: &str| old.same.contains(name);
        if !is_stale && files.iter().all(|(name, _)| is_same(name)) {
            return Ok(());
        }
        for (name, content) in files
            .iter()
            .filter(|(name, _)| *name == CONFIG || !is_same(name))
        {
            let staged = Staged::new(&self.folder.join(name), content)?;
            self.changed.push(staged);
        }
        let config = self.folder.join(CONFIG);
        if exists(&config) {
            self.old_config = Some(Staged::new(&config, &read(&config)?)?);
        }
        Ok(())
    }

    /// Replaces the old weights with the new ones. If other files change too, the folder has no `config.json` from here
    /// on, and cannot be loaded.
    fn switch(&mut self) -> Result<()> {
        let [config, single, index] = [CONFIG, SINGLE, INDEX].map(|name| self.folder.join(name));
        if self.old_config.is_some() {
            remove(&config)?;
        }
        match self.index.take() {
            // Readers prefer the single file: once it exists they read the new model,
            None => {
                rename(&self.paths[0], &single)?;
                remove(&index)
            }
            // and until it is removed they read the old one.
            Some(index) => {
                index.persist()?;
                remove(&single)
            }
        }
    }

    /// Removes what was written if the old weights are still in place, and restores the old settings. Errors are
    /// dropped: the one that led here is reported.
    fn undo(self) {
        let is_single = self.paths.len() == 1;
        let [single, index] = [SINGLE, INDEX].map(|name| self.folder.join(name));
        let is_switched = match is_single {
            true => !exists(&self.paths[0]) && exists(&single),
            false => {
                !exists(&single)
                    && indexed(self.folder)
                        .iter()
                        .any(|shard| self.paths.contains(&self.folder.join(shard)))
            }
        };
        if is_switched {
            return;
        }
        if !is_single && exists(&single) {
            let _ = remove(&index);
        }
        for path in self.paths {
            let _ = remove(path);
        }
        if let Some(config) = self.old_config {
            let _ = config.persist();
        }
    }
}

/// A weight in the files, and the entries that it is made of.
struct Weight {
    file_weight: FileWeight,
    /// One entry of this crate, or the three that are one tensor in the files.
    entries: Vec<Entry>,
    /// Dtype in the file.
    dtype: DType,
}

/// Returns the model's weights as they are in the files, in the model's order.
fn weights(model: &TransformerLM, dtype: Option<DType>) -> Vec<Weight> {
    let names = Names::of(model.config().architecture);
    let mut weights: Vec<Weight> = Vec::new();
    for entry in model.entries() {
        let file_weight = names.file_weight(&entry.name);
        let file_weight = file_weight.unwrap_or_else(|| FileWeight::same(entry.name.clone()));
        let mut known = weights.iter_mut().rev();
        match known.find(|weight| weight.file_weight.name == file_weight.name) {
            Some(weight) => weight.entries.push(entry),
            None => weights.push(Weight {
                file_weight,
                dtype: dtype.unwrap_or(entry.tensor.dtype()),
                entries: vec![entry],
            }),
        }
    }
    weights
}

/// Splits the weights into shards of at most `max_bytes`, with at least one weight each.
fn split(weights: &[Weight], max_bytes: usize) -> Vec<&[Weight]> {
    let mut shards = Vec::new();
    let mut rest = weights;
    while let Some(first) = rest.first() {
        let mut size = first.bytes();
        let more = rest[1..].iter().take_while(|weight| {
            size += weight.bytes();
            size <= max_bytes
        });
        let (shard, others) = rest.split_at(1 + more.count());
        shards.push(shard);
        rest = others;
    }
    shards
}

impl Weight {
    fn bytes(&self) -> usize {
        let entries = self.entries.iter().map(|entry| entry.tensor.elem_count());
        entries.sum::<usize>() * self.dtype.size_in_bytes()
    }

    /// Returns the weight as it is saved to `path`: a copy if its layout or dtype differs in the file.
    fn entry(&self, path: &Path) -> Result<Entry> {
        let tensors: Vec<Tensor> = self
            .entries
            .iter()
            .map(|entry| entry.tensor.clone())
            .collect();
        let tensor_in_file = self.file_weight.file_tensor(&tensors)?;
        let tensor = tensor_in_file.to_dtype(self.dtype)?;
        let numbers = self.entries[0].numbers;
        if tensor.dtype() != tensor_in_file.dtype()
            && numbers.misfit(&tensor_in_file)?.is_none()
            && let Some(got) = numbers.misfit(&tensor)?
        {
            return Err(
                Error::weight(path, self.file_weight.name.clone(), got).must_be(
                    format!("numbers that {} holds", self.dtype.as_str()),
                    "nothing was saved; save it in bf16 or f32",
                ),
            );
        }
        Ok(Entry {
            name: self.file_weight.name.clone(),
            tensor,
            numbers,
        })
    }
}

fn pretty(json: &Value) -> String {
    format!("{json:#}\n")
}
