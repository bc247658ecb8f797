//! Optimizer files: safetensors, with steps and hyperparameters in the metadata.

use super::state::SKIPPED;
use super::{Optimizer, Rule};
use crate::distributed::FullyShard;
use crate::files::{Entry, TensorFile, save_tensors};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// It names AdamW in the files of all rules, so that those from before there were others stay readable.
const KEY: &str = "tallow.adamw";

/// The metadata of the file, as JSON.
#[derive(Serialize, Deserialize)]
struct Header {
    steps: usize,
    groups: Vec<GroupHeader>,
}

#[derive(Serialize, Deserialize)]
struct GroupHeader {
    config: Rule,
    parameters: Vec<String>,
}

impl Optimizer {
    /// Writes state, step count, groups and hyperparameters to a safetensors file.
    ///
    /// The file is replaced atomically: it is written under another name in the same folder, synced, and renamed.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; [`Error::Weight`] names an entry with an element that is not
    /// finite or, in `exp_avg_sq`, negative; an existing file is unchanged then. If the optimizer is
    /// [sharded](Optimizer::shard), all ranks have to call this and rank 0 writes the whole state; [`Error::Rank`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let entries = self.state_entries("")?;
        if self.own_shard().is_some_and(|shard| shard.rank > 0) {
            return Ok(());
        }
        let groups = self.groups.iter().map(|group| GroupHeader {
            config: group.rule,
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
        save_tensors(path, entries, &[(KEY, header)], 1)
    }

    /// Reads a file of [`Optimizer::save`] into an optimizer of the same parameters in the same groups. Hyperparameters
    /// and learning rates become the saved ones. Later steps have the same bits as without the interruption. Load an
    /// optimizer before it is [sharded](Optimizer::shard).
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Format`] if it is damaged or not of an optimizer,
    /// [`Error::Weight`] naming an entry that is missing, unexpected, of another shape or dtype, not finite or (in
    /// `exp_avg_sq`) negative, [`Error::Resume`] if parameters are in other groups; [`Error::Order`] if the optimizer
    /// is sharded. Nothing has changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        if self.own_shard().is_some() {
            return Err(Error::Order {
                op: "Optimizer::load",
                problem: "this rank has a part of the state, and the file has all of it".into(),
                hint: "load before Optimizer::shard".into(),
            });
        }
        let file = TensorFile::open(path)?;
        let foreign = |problem: String| {
            Error::format(path, problem, "expected a file written by Optimizer::save")
        };
        let header = file.text(KEY);
        let header = header.ok_or_else(|| foreign(format!("no {KEY} in its metadata")))?;
        let header: Header =
            serde_json::from_str(header).map_err(|e| foreign(format!("{KEY}: {e}")))?;
        for group in &header.groups {
            group.config.validate()?;
        }
        let state = self.read_state(&file, "", None)?;
        self.check_groups(path, &header.groups)?;
        self.put_state(&state, header.steps)?;
        for (group, saved) in self.groups.iter_mut().zip(header.groups) {
            group.rule = saved.config;
        }
        Ok(())
    }

    /// Returns the entries of the saved state, with `prefix` before each name. If the optimizer is sharded, rank 0 gets
    /// all of them and other ranks none.
    ///
    /// # Errors
    /// [`Error::Rank`].
    pub(crate) fn state_entries(&self, prefix: &str) -> Result<Vec<Entry>> {
        let entries = self.full_state()?.into_iter();
        let entries = entries.map(|(name, tensor)| Entry {
            numbers: self.numbers_of(&name),
            name: format!("{prefix}{name}"),
            tensor,
        });
        Ok(entries.collect())
    }

    /// Reads the state of [`Optimizer::state_entries`] from a file, where only its names begin with `prefix`. If
    /// parameters are shards, it reads this rank's part.
    ///
    /// # Errors
    /// [`Error::Weight`] names an entry that does not fit; those of [`TensorFile::get`].
    pub(crate) fn read_state(
        &self,
        file: &TensorFile,
        prefix: &str,
        parts: Option<&FullyShard>,
    ) -> Result<HashMap<String, Tensor>> {
        let names = file.names().into_iter();
        let given = names.filter_map(|saved| {
            let name = saved.strip_prefix(prefix)?.to_string();
            let description = file.description(&saved)?;
            let parts = parts.filter(|_| !name.starts_with(SKIPPED));
            let own = parts.and_then(|parts| {
                let (_, weight) = name.split_once('.')?;
                let shape = parts.shape_of(weight)?;
                let dtype = description.strip_suffix(&format!(" {shape:?}"))?;
                Some(format!("{dtype} {:?}", parts.part_dims(&shape)))
            });
            Some((name, own.unwrap_or(description)))
        });
        let given: BTreeMap<String, String> = given.collect();
        let names: Vec<String> = given.keys().cloned().collect();
        let refuse = |name: String, expected, got, hint: &str| {
            Error::weight(file.path(), format!("{prefix}{name}"), got).must_be(expected, hint)
        };
        self.check_layout(given, &refuse)?;
        let mut state = HashMap::new();
        for name in names {
            if let Some(tensor) = file.get(&format!("{prefix}{name}"), &Device::Cpu)? {
                let tensor = match parts {
                    Some(parts) if !name.starts_with(SKIPPED) => {
                        parts.own_part(&tensor)?.force_contiguous()?
                    }
                    _ => tensor,
                };
                state.insert(name, tensor);
            }
        }
        self.check_numbers(&state, &refuse)?;
        Ok(state)
    }

    /// Checks that the saved groups have the parameters of this optimizer's groups.
    fn check_groups(&self, path: &Path, saved: &[GroupHeader]) -> Result<()> {
        let differs = |field: String, saved: String, given: String| Error::Resume {
            path: path.into(),
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
        Ok(())
    }
}
