//! Tensors in parts: ranks write a file each, and one file says which these are, and is complete because it is there.

use super::atomic::folder_of;
use super::tensors::TensorFile;
use crate::Result;
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// What the one file says of the others, as JSON in its metadata.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// The files' names, in the order of the ranks; beside this one.
    pub files: Vec<String>,
    /// By name: dtype, as candle names it, and shape of all of a tensor. Each file has its next elements, in a row;
    /// what has none of a tensor lacks it.
    pub tensors: BTreeMap<String, (String, Vec<usize>)>,
}

impl Manifest {
    /// Its key in the metadata.
    pub(crate) const KEY: &str = "tallow.parts";
}

/// The files with parts of tensors.
pub(super) struct Parts {
    manifest: Manifest,
    files: Vec<TensorFile>,
}

impl Parts {
    /// Those that a file names, if it names any.
    ///
    /// # Errors
    /// As [`TensorFile::open`].
    pub fn open(file: &TensorFile) -> Result<Option<Self>> {
        let Some(json) = file.text(Manifest::KEY) else {
            return Ok(None);
        };
        let manifest: Manifest = serde_json::from_str(json)
            .map_err(|e| file.damaged(format!("{} does not read: {e}", Manifest::KEY)))?;
        let files = manifest.files.iter().map(|name| {
            // A name, not a way out of the folder.
            match Path::new(name).file_name() == Some(name.as_ref()) {
                true => TensorFile::open_one(&folder_of(file.path()).join(name)),
                false => Err(file.damaged(format!("{name:?} is no file's name"))),
            }
        });
        let files = files.collect::<Result<_>>()?;
        Ok(Some(Self { manifest, files }))
    }

    pub fn names(&self) -> impl Iterator<Item = String> {
        self.manifest.tensors.keys().cloned()
    }

    /// Of all of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let (_, shape) = self.manifest.tensors.get(name)?;
        Some(shape)
    }

    pub fn dtype(&self, name: &str) -> Option<&str> {
        let (dtype, _) = self.manifest.tensors.get(name)?;
        Some(dtype)
    }

    /// All of a tensor.
    ///
    /// # Errors
    /// As [`TensorFile::get`]; parts that are not all of it.
    pub fn joined(&self, name: &str, device: &Device) -> Result<Tensor> {
        let parts = self.files.iter().filter_map(|file| {
            let part = file.get(name, &Device::Cpu).transpose()?;
            Some(part.and_then(|part| Ok(part.flatten_all()?)))
        });
        let parts = parts.collect::<Result<Vec<Tensor>>>()?;
        let shape = self.shape(name).unwrap_or_default();
        let wanted: usize = shape.iter().product();
        let elements: usize = parts.iter().map(Tensor::elem_count).sum();
        let is_alike = parts
            .iter()
            .all(|part| Some(part.dtype().as_str()) == self.dtype(name));
        if elements != wanted || !is_alike || parts.is_empty() {
            let first = &self.files[0];
            return Err(first.damaged(format!(
                "it and the other {} have {elements} elements of {name}, and {wanted} were written",
                self.files.len() - 1
            )));
        }
        Ok(Tensor::cat(&parts, 0)?.reshape(shape)?.to_device(device)?)
    }
}
