//! A folder of weights: one safetensors file, or shards with an index.

use super::names::{ours, theirs};
use crate::files::{TensorFile, read_to_string};
use crate::model::WeightSource;
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
    files: Vec<TensorFile>,
    /// By our name, or by theirs where it is none of ours: which file.
    places: BTreeMap<String, usize>,
}

impl Folder {
    /// Opens the files. Of a model whose head is `tied` a file may have the head all the same.
    pub fn open(path: &Path, tied: bool) -> Result<Self> {
        let mut folder = Self {
            path: path.into(),
            files: Vec::new(),
            places: BTreeMap::new(),
        };
        match path.join(INDEX).exists() {
            true => folder.add_shards(tied)?,
            false => {
                let file = TensorFile::open(&path.join(SINGLE))?;
                let names = file.names();
                folder.add(file, names, tied);
            }
        }
        Ok(folder)
    }

    fn add_shards(&mut self, tied: bool) -> Result<()> {
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
            self.add(file, names, tied);
        }
        Ok(())
    }

    fn add(&mut self, file: TensorFile, names: impl IntoIterator<Item = String>, tied: bool) {
        for name in names {
            // Tables of angles that older files have, and a head beside the embedding that it is.
            let is_other =
                name.ends_with("rotary_emb.inv_freq") || tied && name == "lm_head.weight";
            if !is_other {
                let name = ours(&name).unwrap_or(name);
                self.places.insert(name, self.files.len());
            }
        }
        self.files.push(file);
    }
}

impl WeightSource for Folder {
    fn path_of(&self, name: &str) -> &Path {
        match self.places.get(name) {
            Some(file) => self.files[*file].path(),
            None => &self.path,
        }
    }

    fn names(&self) -> Vec<String> {
        self.places.keys().cloned().collect()
    }

    fn name_there(&self, name: &str) -> String {
        theirs(name).unwrap_or(name.into())
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        self.files[*self.places.get(name)?].shape(&self.name_there(name))
    }

    fn get(&self, name: &str, device: &Device) -> Result<Option<Tensor>> {
        match self.places.get(name) {
            Some(file) => self.files[*file].get(&self.name_there(name), device),
            None => Ok(None),
        }
    }
}
