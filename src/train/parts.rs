//! Saving of a fully sharded run: each rank writes its part to a file.

use super::Trainer;
use crate::distributed::{Communicator, FullyShard};
use crate::files::{self, Entry, Manifest, Part, PartFile, TensorFile};
use crate::model::STATE_PREFIX;
use crate::saved::Numbers;
use crate::{Error, Result};
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

impl Trainer {
    /// Writes this rank's part and, on rank 0 once all ranks have written theirs, the file that lists the parts.
    pub(super) fn save_parts(&self, path: &Path, sharded: &FullyShard) -> Result<()> {
        let ranks = sharded.communicator();
        let entries = self.part_entries()?;
        let tensors = entries.iter().map(|entry| {
            let weight = match entry.name.strip_prefix(STATE_PREFIX) {
                Some(state) => state.split_once('.').map_or(state, |(_, weight)| weight),
                None => &entry.name,
            };
            let shape = sharded.shape_of(weight).unwrap_or_default();
            let dtype = entry.tensor.dtype().as_str().to_string();
            (entry.name.clone(), (dtype, shape))
        });
        let tensors: BTreeMap<_, _> = tensors.collect();
        let prefix = prefix_of(path)?;
        let save = format!("{}-{:08x}", self.step, save_number(ranks)?);
        let name = |rank: usize| format!("{prefix}{save}-{rank}-of-{}", ranks.world_size());
        let parts = entries.into_iter();
        let parts = parts
            .filter(|entry| entry.tensor.elem_count() > 0)
            .collect();
        let part = Part {
            save: save.clone(),
            rank: ranks.rank(),
            world_size: ranks.world_size(),
        };
        let written = files::save_part(&sibling(path, &name(ranks.rank())), parts, &part);
        let written = check_all_ranks(ranks, path, written)?;
        let files = gather_numbers(ranks, written.crc32)?
            .into_iter()
            .enumerate();
        let manifest = Manifest {
            save: save.clone(),
            files: files
                .map(|(rank, crc32)| PartFile {
                    name: name(rank),
                    crc32,
                })
                .collect(),
            tensors,
        };
        let written = match ranks.rank() {
            0 => self.write(path, Vec::new(), Some(&manifest)),
            _ => Ok(()),
        };
        check_all_ranks(ranks, path, written)?;
        if ranks.rank() == 0 {
            self.remove_old_parts(path, &prefix);
        }
        Ok(())
    }

    fn part_entries(&self) -> Result<Vec<Entry>> {
        let weights = self.parameters.iter().map(|(name, part)| Entry {
            name: name.clone(),
            tensor: part.as_tensor().clone(),
            numbers: Numbers::Finite,
        });
        let state = self.optimizer.state_entries(STATE_PREFIX)?;
        Ok(weights.chain(state).collect())
    }

    /// Removes parts that neither the file at `path` nor the earlier files that are kept list.
    fn remove_old_parts(&self, path: &Path, prefix: &str) {
        let kept = (1..self.config.keep).map(|number| {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        });
        let mut named = HashSet::new();
        for file in [path.to_path_buf()].into_iter().chain(kept) {
            if !file.exists() {
                continue;
            }
            let Ok(file) = TensorFile::open_one(&file) else {
                return; // it may list some
            };
            let Some(text) = file.text(Manifest::KEY) else {
                continue; // a run without parts
            };
            match serde_json::from_str::<Manifest>(text) {
                Ok(manifest) => named.extend(manifest.files.into_iter().map(|file| file.name)),
                Err(_) => return,
            }
        }
        let Ok(entries) = fs::read_dir(sibling(path, ".")) else {
            return;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(name) = name.to_str() else {
                continue;
            };
            if name.starts_with(prefix) && !named.contains(name) {
                let _ = fs::remove_file(entry.path()); // the next save retries
            }
        }
    }
}

/// Returns the beginning of the parts' names.
///
/// # Errors
/// [`Error::Io`] for a path without a file name.
fn prefix_of(path: &Path) -> Result<String> {
    match path.file_name() {
        Some(name) => Ok(format!("{}.part-", name.to_string_lossy())),
        None => Err(Error::io(
            "write",
            path,
            std::io::ErrorKind::InvalidInput.into(),
        )),
    }
}

fn sibling(path: &Path, name: &str) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(name)
}

/// Returns a number that is unique to this save and the same on all ranks, so that no part in use is overwritten.
fn save_number(ranks: &Communicator) -> Result<u32> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let own = now.as_nanos() as u32 ^ std::process::id();
    Ok(gather_numbers(ranks, own)?[0])
}

/// Returns the numbers of all ranks, in rank order.
fn gather_numbers(ranks: &Communicator, own: u32) -> Result<Vec<u32>> {
    let world_size = ranks.world_size();
    let mut numbers = vec![0.0; world_size];
    numbers[ranks.rank()] = f64::from(own);
    let means = ranks.mean(&numbers)?.into_iter();
    // Dividing and multiplying a u32 in f64 has an error far below one half.
    Ok(means
        .map(|mean| (mean * world_size as f64).round() as u32)
        .collect())
}

/// Returns the result of writing; an error on all ranks if it failed on one.
fn check_all_ranks<T>(ranks: &Communicator, path: &Path, written: Result<T>) -> Result<T> {
    let failed = f64::from(u8::from(written.is_err()));
    let failed = ranks.mean(&[failed])?[0] > 0.0;
    let written = written?;
    match failed {
        false => Ok(written),
        true => {
            let other = "another rank failed to write its part; see its error";
            Err(Error::io("write", path, std::io::Error::other(other)))
        }
    }
}
