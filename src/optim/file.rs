//! The optimizer in a file: safetensors, with steps and hyperparameters in its metadata.

use super::adamw::AdamW;
use super::config::AdamWConfig;
use crate::{Error, Result};
use candle_core::{DType, safetensors::SliceSafetensors};
use safetensors::{SafeTensorError, SafeTensors};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

/// The metadata's key. One key alone: a map of several has no fixed order, and equal states should give equal files.
const KEY: &str = "tallow.adamw";

/// What the file says beside the tensors, as JSON.
#[derive(Serialize, Deserialize)]
struct Header {
    steps: usize,
    groups: Vec<GroupHeader>,
}

#[derive(Serialize, Deserialize)]
struct GroupHeader {
    config: AdamWConfig,
    parameters: Vec<String>,
}

impl AdamW {
    /// Writes state, step count, groups and hyperparameters to a safetensors file.
    ///
    /// The file is whole or not there: it is written under another name in the same folder, synced, and renamed.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let groups = self.groups.iter().map(|group| GroupHeader {
            config: group.config,
            parameters: group
                .parameters
                .iter()
                .map(|(name, _)| name.clone())
                .collect(),
        });
        let header = Header {
            steps: self.steps,
            groups: groups.collect(),
        };
        let header = serde_json::to_string(&header)
            .map_err(|e| Error::io("write", path, std::io::Error::other(e)))?;
        let metadata = HashMap::from([(KEY.to_string(), header)]);
        write_atomically(path, |temporary| {
            safetensors::serialize_to_file(self.state(), Some(metadata), temporary).map_err(|e| {
                let e = match e {
                    SafeTensorError::IoError(e) => e,
                    other => std::io::Error::other(other),
                };
                Error::io("write", path, e)
            })
        })
    }

    /// Reads what [`AdamW::save`] wrote into an optimizer of the same parameters in the same groups. Hyperparameters
    /// become the saved ones, learning rates included. Later steps have the bits they would have had without the break.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Format`] if it is damaged or no optimizer's,
    /// [`Error::Weight`] naming an entry that is missing, unexpected or of another shape or dtype, [`Error::Resume`]
    /// if parameters are in other groups. Nothing has changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|e| Error::io("read", path, e))?;
        // SAFETY: only that nobody writes to the file while it is mapped, and `save` replaces files, never writes into them.
        let bytes = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| Error::io("map", path, e))?;
        let damaged = |problem: String| Error::Format {
            path: path.to_path_buf(),
            problem,
            hint: "expected a safetensors file written by AdamW::save".into(),
        };
        let (_, metadata) =
            SafeTensors::read_metadata(&bytes).map_err(|e| damaged(e.to_string()))?;
        let header = metadata.metadata().as_ref().and_then(|map| map.get(KEY));
        let header = header.ok_or_else(|| damaged(format!("no {KEY} in its metadata")))?;
        let header: Header =
            serde_json::from_str(header).map_err(|e| damaged(format!("{KEY}: {e}")))?;
        let tensors = SliceSafetensors::new(&bytes).map_err(|e| damaged(e.to_string()))?;

        let views = tensors.tensors();
        let mut given = HashMap::new();
        for (name, view) in &views {
            let dtype =
                DType::try_from(view.dtype()).map_err(|e| damaged(format!("{name}: {e}")))?;
            given.insert(name.as_str(), (dtype, view.shape().to_vec()));
        }
        self.check_state(&given).map_err(|misfit| Error::Weight {
            path: path.into(),
            name: misfit.name,
            expected: misfit.expected,
            got: misfit.got,
            hint: misfit.hint,
        })?;
        self.check_groups(path, &header.groups)?;

        let devices: HashMap<String, _> = self
            .state_vars()
            .map(|(name, var)| (name, var.device().clone()))
            .collect();
        self.put_state(header.steps, |name| Ok(tensors.load(name, &devices[name])?))?;
        for (group, saved) in self.groups.iter_mut().zip(header.groups) {
            group.config = saved.config;
        }
        Ok(())
    }

    /// Whether the saved groups hold the parameters that this optimizer's groups hold.
    fn check_groups(&self, path: &Path, saved: &[GroupHeader]) -> Result<()> {
        let differs = |field: String, saved: String, given: String| Error::Resume {
            path: path.to_path_buf(),
            field,
            saved,
            given,
        };
        if saved.len() != self.groups.len() {
            return Err(differs(
                "parameter groups".into(),
                saved.len().to_string(),
                self.groups.len().to_string(),
            ));
        }
        let saved_groups: HashMap<&String, usize> = saved
            .iter()
            .enumerate()
            .flat_map(|(i, group)| group.parameters.iter().map(move |name| (name, i)))
            .collect();
        for (i, group) in self.groups.iter().enumerate() {
            for (name, _) in &group.parameters {
                let saved = saved_groups.get(name);
                if saved != Some(&i) {
                    return Err(differs(
                        format!("parameter {name} in group"),
                        saved.map_or("none".into(), usize::to_string),
                        i.to_string(),
                    ));
                }
            }
        }
        saved.iter().try_for_each(|group| group.config.validate())
    }
}

/// Has `write` make a file beside `path`, syncs it, and renames it to `path`.
fn write_atomically(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let io = |e| Error::io("write", path, e);
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // Made here and not by tempfile, whose files only their owner may read.
    let temporary = tempfile::Builder::new()
        .prefix(".tallow-")
        .make_in(folder, |path| File::create_new(path))
        .map_err(io)?;
    let permissions = temporary.as_file().metadata().map_err(io)?.permissions();
    let temporary = temporary.into_temp_path(); // removed when dropped, on every error below
    write(&temporary)?;
    // `write` may have put another file in place of the one made above.
    let file = File::options().write(true).open(&temporary).map_err(io)?;
    file.set_permissions(permissions).map_err(io)?;
    file.sync_all().map_err(io)?;
    drop(file);
    temporary.persist(path).map_err(|e| io(e.error))?;
    // The rename itself lasts once the folder is synced. (Windows opens no folders.)
    #[cfg(unix)]
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(io)?;
    Ok(())
}
