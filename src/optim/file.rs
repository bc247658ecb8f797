//! The optimizer in a file: safetensors, with steps and hyperparameters in its metadata.

use super::adamw::AdamW;
use super::config::AdamWConfig;
use crate::files::{TensorFile, save_tensors};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::Path;

/// The metadata's key.
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
    /// [`Error::Io`] if the file cannot be written; [`Error::Weight`] names an entry with an element that is not
    /// finite or, in `exp_avg_sq`, negative. What was there before stays.
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
        save_tensors(path, self.state_entries("").collect(), &[(KEY, header)], 1)
    }

    /// Reads what [`AdamW::save`] wrote into an optimizer of the same parameters in the same groups. Hyperparameters
    /// become the saved ones, learning rates included. Later steps have the bits they would have had without the break.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Format`] if it is damaged or no optimizer's,
    /// [`Error::Weight`] naming an entry that is missing, unexpected, of another shape or dtype, not finite or (in
    /// `exp_avg_sq`) negative, [`Error::Resume`] if parameters are in other groups. Nothing has changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let file = TensorFile::open(path)?;
        let foreign = |problem: String| Error::Format {
            path: path.into(),
            problem,
            hint: "expected a file written by AdamW::save".into(),
        };
        let header = file.text(KEY);
        let header = header.ok_or_else(|| foreign(format!("no {KEY} in its metadata")))?;
        let header: Header =
            serde_json::from_str(header).map_err(|e| foreign(format!("{KEY}: {e}")))?;
        for group in &header.groups {
            group.config.validate()?;
        }
        let state = self.read_state(&file, "")?;
        self.check_groups(path, &header.groups)?;
        self.put_state(&state, header.steps)?;
        for (group, saved) in self.groups.iter_mut().zip(header.groups) {
            group.config = saved.config;
        }
        Ok(())
    }

    /// Whether the saved groups hold the parameters that this optimizer's groups hold.
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
