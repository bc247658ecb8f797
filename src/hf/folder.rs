//! A folder of weights: one safetensors file, or shards with an index.

use super::weights::{HEAD, Names};
use crate::files::{TensorFile, read_to_string};
use crate::model::{WeightSource, without_prefixes};
use crate::nn::Architecture;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The embedding's name in this crate.
const EMBEDDING: &str = "token_embeddings.weight";

/// The weight files of a folder, and the file of each weight.
pub(super) struct Folder {
    path: PathBuf,
    names: &'static Names,
    files: Vec<TensorFile>,
    /// Index of the file and name in that file, by this crate's name; by the file's own name for a weight unknown here.
    places: BTreeMap<String, (usize, String)>,
}

impl Folder {
    /// Opens the weight files of a model. `model.safetensors` is preferred to an index, as in `transformers`.
    pub fn open(
        path: &Path,
        architecture: Architecture,
        strip_prefixes: &[String],
    ) -> Result<Self> {
        let mut folder = Self {
            path: path.into(),
            names: Names::of(architecture),
            files: Vec::new(),
            places: BTreeMap::new(),
        };
        let single = path.join(SINGLE);
        if exists(&single) {
            let file = TensorFile::open(&single)?;
            let names = file.names();
            folder.add(file, names, strip_prefixes)?;
        } else if exists(&path.join(INDEX)) {
            folder.add_shards(strip_prefixes)?;
        } else {
            return Err(no_weights(path));
        }
        Ok(folder)
    }

    /// Decides whether the head is tied to the embedding, as `transformers` does: files with a head that differs from
    /// the embedding are not tied, whatever the configuration says. A head equal to the embedding in `dtype` is
    /// ignored. A head without an embedding becomes the embedding.
    pub fn tie_head(&mut self, tied: bool, dtype: DType) -> Result<bool> {
        match (tied, self.places.get(HEAD), self.places.get(EMBEDDING)) {
            (false, None, Some(_)) => {
                let hint = "these may be the files of a base model, which has no head; take those of the causal \
                            language model, or set tie_word_embeddings in config.json if its head is the embedding";
                let got = Error::weight(self.path_of(HEAD), HEAD, "no such weight");
                Err(got.must_be("the weight of the output head", hint))
            }
            (true, Some(_), Some(_)) => {
                let same = self.is_same(HEAD, EMBEDDING, dtype)?;
                if same {
                    self.places.remove(HEAD);
                }
                Ok(same)
            }
            (true, Some(head), None) => {
                let head = head.clone();
                self.places.insert(EMBEDDING.into(), head);
                self.places.remove(HEAD);
                Ok(true)
            }
            (tied, ..) => Ok(tied),
        }
    }

    /// Returns whether two weights are equal in `dtype`.
    fn is_same(&self, a: &str, b: &str, dtype: DType) -> Result<bool> {
        let [Some(a), Some(b)] = [self.get(a, &Device::Cpu)?, self.get(b, &Device::Cpu)?] else {
            return Ok(false);
        };
        if a.shape() != b.shape() || a.elem_count() == 0 {
            return Ok(a.shape() == b.shape());
        }
        let equal = a.to_dtype(dtype)?.eq(&b.to_dtype(dtype)?)?;
        Ok(equal.min_all()?.to_scalar::<u8>()? == 1)
    }

    fn add_shards(&mut self, strip_prefixes: &[String]) -> Result<()> {
        let index = self.path.join(INDEX);
        let refuse = |problem: String| Error::Format {
            path: index.clone(),
            problem,
            hint: "fetch the folder again, all of its shards, or save the model again".into(),
        };
        let text = read_to_string(&index)?;
        let json: Value =
            serde_json::from_str(&text).map_err(|e| refuse(format!("it is not JSON: {e}")))?;
        let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
            return Err(refuse("it has no weight_map".into()));
        };
        let mut shards: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for (name, shard) in map {
            let is_name = |shard: &&str| Path::new(shard).file_name() == Some(shard.as_ref());
            let Some(shard) = shard.as_str().filter(is_name) else {
                return Err(refuse(format!(
                    "{name} is in {shard}, which is not in the folder"
                )));
            };
            shards.entry(shard).or_default().insert(name.clone());
        }
        for (shard, names) in shards {
            let path = self.path.join(shard);
            if !path.exists() {
                return Err(refuse(format!("its shard {shard} is not there")));
            }
            let file = TensorFile::open(&path)?;
            let there: BTreeSet<String> = file.names().into_iter().collect();
            if let Some(name) = there.symmetric_difference(&names).next() {
                return Err(refuse(format!(
                    "{name} is in one of {shard} and its index alone"
                )));
            }
            self.add(file, names, strip_prefixes)?;
        }
        Ok(())
    }

    fn add(
        &mut self,
        file: TensorFile,
        names: impl IntoIterator<Item = String>,
        strip_prefixes: &[String],
    ) -> Result<()> {
        for file_name in names {
            if self.names.is_table(&file_name) {
                continue;
            }
            let mut weights = self
                .names
                .own_names(without_prefixes(&file_name, strip_prefixes));
            if weights.is_empty() {
                weights.push(file_name.clone());
            }
            for weight in weights {
                let place = (self.files.len(), file_name.clone());
                if let Some((_, other)) = self.places.insert(weight, place) {
                    return Err(
                        Error::weight(file.path(), file_name, format!("{other} too"))
                            .must_be("one tensor a weight", "leave one of them out"),
                    );
                }
            }
        }
        self.files.push(file);
        Ok(())
    }
}

/// Returns whether a folder has a file of this name, or a link, even a dangling one.
pub(super) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Files of folders that this crate cannot load, each with a hint how to convert the model.
const OTHERS: [(&str, &str); 8] = [
    (ADAPTER, MERGE),
    ("pytorch_model.bin", CONVERT),
    ("pytorch_model.bin.index.json", CONVERT),
    (
        "tf_model.h5",
        "convert it with an older transformers, 4.x: from_pretrained(.., from_tf=True), then save_pretrained",
    ),
    (
        "flax_model.msgpack",
        "convert it with an older transformers, 4.x: from_pretrained(.., from_flax=True), then save_pretrained",
    ),
    (
        "consolidated.safetensors",
        "fetch the model's files for transformers, model.safetensors or its shards",
    ),
    (
        "consolidated.00.pth",
        "fetch the model's files for transformers, model.safetensors or its shards",
    ),
    ("adapter_model.safetensors", MERGE),
];

/// The file that marks a folder as an adapter.
pub(super) const ADAPTER: &str = "adapter_config.json";

const CONVERT: &str = "convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder) in transformers";

const MERGE: &str =
    "merge it into its base model first (merge_and_unload, then save_pretrained, in peft)";

/// Returns the error for a folder without a model's weights, which names what the folder has in their place.
pub(super) fn no_weights(folder: &Path) -> Error {
    let other = OTHERS.iter().find(|(name, _)| exists(&folder.join(name)));
    let got = other.map_or("neither".into(), |(name, _)| match *name {
        ADAPTER => format!("an adapter of peft ({name})"),
        _ => name.to_string(),
    });
    Error::data(folder.display().to_string(), got).must_be(
        format!("{SINGLE} or {INDEX}"),
        other.map_or("fetch the weights too", |(_, hint)| hint),
    )
}

/// Refuses the folder of an adapter, which `transformers` would apply to another model.
pub(super) fn check_no_adapter(folder: &Path) -> Result<()> {
    match exists(&folder.join(ADAPTER)) {
        true => Err(Error::data(
            folder.display().to_string(),
            format!("an adapter of peft ({ADAPTER})"),
        )
        .must_be("a model", MERGE)),
        false => Ok(()),
    }
}

impl WeightSource for Folder {
    fn path_of(&self, name: &str) -> &Path {
        match self.places.get(name) {
            Some((file, _)) => self.files[*file].path(),
            None => match &self.files[..] {
                [one] => one.path(),
                _ => &self.path,
            },
        }
    }

    fn names(&self) -> Vec<String> {
        self.places.keys().cloned().collect()
    }

    fn file_name(&self, name: &str) -> String {
        match self.places.get(name) {
            Some((_, there)) => there.clone(),
            None => self
                .names
                .file_weight(name)
                .map_or(name.into(), |file_weight| file_weight.name),
        }
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        let (file, there) = self.places.get(name)?;
        self.files[*file].shape(there)
    }

    fn file_shape(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        self.names
            .file_weight(name)
            .map_or(shape.into(), |file_weight| file_weight.shape(shape))
    }

    fn get(&self, name: &str, device: &Device) -> Result<Option<Tensor>> {
        let Some((file, there)) = self.places.get(name) else {
            return Ok(None);
        };
        let whole = self.files[*file].get(there, device)?;
        match (whole, self.names.file_weight(name)) {
            (Some(whole), Some(file_weight)) => Ok(Some(file_weight.own_weight(&whole)?)),
            (whole, _) => Ok(whole),
        }
    }
}
