//! A folder of weights: one safetensors file, or shards with an index.

use super::weights::Names;
use crate::files::{TensorFile, read_to_string};
use crate::model::{TransformerConfig, WeightSource};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The files, and which of them has a weight.
pub(super) struct Folder {
    path: PathBuf,
    names: &'static Names,
    /// Whether the head is the embedding: a file may have it all the same.
    is_tied: bool,
    files: Vec<TensorFile>,
    /// By our name, or by theirs where it is none of ours: which file, and what it is called there.
    places: BTreeMap<String, (usize, String)>,
}

impl Folder {
    /// Opens the files of a model of this configuration.
    pub fn open(path: &Path, config: &TransformerConfig) -> Result<Self> {
        let mut folder = Self {
            path: path.into(),
            names: Names::of(config.architecture),
            is_tied: config.tie_embeddings,
            files: Vec::new(),
            places: BTreeMap::new(),
        };
        match path.join(INDEX).exists() {
            true => folder.add_shards()?,
            false => {
                let file = TensorFile::open(&path.join(SINGLE))?;
                let names = file.names();
                folder.add(file, names)?;
            }
        }
        Ok(folder)
    }

    fn add_shards(&mut self) -> Result<()> {
        let index = self.path.join(INDEX);
        let refuse = |problem: String| Error::Format {
            path: index.clone(),
            problem,
            hint: "fetch the folder again, all of its shards".into(),
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
                    "{name} is in {shard}, which is no file of the folder"
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
            self.add(file, names)?;
        }
        Ok(())
    }

    fn add(&mut self, file: TensorFile, names: impl IntoIterator<Item = String>) -> Result<()> {
        for theirs in names {
            let is_other = self.is_tied && theirs == "lm_head.weight";
            if is_other || self.names.is_table(&theirs) {
                continue;
            }
            let mut weights = self.names.ours(&theirs);
            if weights.is_empty() {
                weights.push(theirs.clone());
            }
            for weight in weights {
                let place = (self.files.len(), theirs.clone());
                if let Some((_, other)) = self.places.insert(weight, place) {
                    return Err(Error::Weight {
                        path: file.path().into(),
                        name: theirs,
                        expected: "one tensor a weight".into(),
                        got: format!("{other} too"),
                        hint: "leave one of them out".into(),
                    });
                }
            }
        }
        self.files.push(file);
        Ok(())
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

    fn name_there(&self, name: &str) -> String {
        match self.places.get(name) {
            Some((_, there)) => there.clone(),
            None => self
                .names
                .theirs(name)
                .map_or(name.into(), |theirs| theirs.name),
        }
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        let (file, there) = self.places.get(name)?;
        self.files[*file].shape(there)
    }

    fn shape_there(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        self.names
            .theirs(name)
            .map_or(shape.into(), |theirs| theirs.shape(shape))
    }

    fn get(&self, name: &str, device: &Device) -> Result<Option<Tensor>> {
        let Some((file, there)) = self.places.get(name) else {
            return Ok(None);
        };
        let whole = self.files[*file].get(there, device)?;
        match (whole, self.names.theirs(name)) {
            (Some(whole), Some(theirs)) => Ok(Some(theirs.part_of(&whole)?)),
            (whole, _) => Ok(whole),
        }
    }
}
