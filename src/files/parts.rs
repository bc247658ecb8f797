//! Tensors split into parts: each rank writes a file, and a manifest file lists them. The save is complete once it
//! exists.

use super::atomic::folder_of;
use super::open::check_available;
use super::tensors::TensorFile;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The list of the part files, stored as JSON in the manifest file's metadata.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// The unique id of the save; each part has it too.
    pub save: String,
    /// The parts in the order of ranks; they are in the same folder as the manifest file.
    pub files: Vec<PartFile>,
    /// By name: dtype, as candle names it, and shape of the full tensor. The parts have consecutive elements of the
    /// flattened tensor, in order; a part without elements of a tensor omits it.
    pub tensors: BTreeMap<String, (String, Vec<usize>)>,
}

/// A part's entry in the manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PartFile {
    pub name: String,
    /// CRC-32 of the part's header, which contains the checksums of its tensors.
    pub crc32: u32,
}

/// The identity of a part, stored as JSON in its metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// The id of the save, as in [`Manifest::save`].
    pub save: String,
    pub rank: usize,
    pub world_size: usize,
}

impl Manifest {
    pub(crate) const KEY: &str = "tallow.parts";
}

impl Part {
    pub(crate) const KEY: &str = "tallow.part";
}

/// The part files of a save, in the order of ranks.
pub(super) struct Parts {
    manifest: Manifest,
    files: Vec<TensorFile>,
}

impl Parts {
    /// Opens the parts that a file lists, if any, and checks them against the manifest: rank, save, and number of
    /// elements of each tensor.
    ///
    /// # Errors
    /// Those of [`TensorFile::open`].
    pub fn open(file: &TensorFile) -> Result<Option<Self>> {
        let Some(json) = file.text(Manifest::KEY) else {
            return Ok(None);
        };
        let manifest: Manifest = serde_json::from_str(json)
            .map_err(|e| file.damaged(format!("{} does not read: {e}", Manifest::KEY)))?;
        if manifest.files.is_empty() {
            let problem = format!("{} names no files", Manifest::KEY);
            return Err(file.damaged(problem));
        }
        let files = (0..manifest.files.len()).map(|rank| open_part(file, &manifest, rank));
        let files = files.collect::<Result<_>>()?;
        let parts = Self { manifest, files };
        parts.check_tensors(file)?;
        Ok(Some(parts))
    }

    /// Checks that every tensor is listed once, and that the parts have all of its elements. The manifest's number of
    /// elements is never trusted.
    fn check_tensors(&self, file: &TensorFile) -> Result<()> {
        let own = file.own_names();
        if let Some(name) = own.iter().find(|name| self.shape(name).is_some()) {
            return Err(file.damaged(format!("{name} is in it, and in parts of it")));
        }
        let mut unnamed = BTreeSet::new();
        for part in &self.files {
            unnamed.extend(part.own_names());
        }
        for (name, (dtype, shape)) in &self.manifest.tensors {
            unnamed.remove(name);
            let expected = shape.iter().try_fold(1usize, |all, n| all.checked_mul(*n));
            let mut elements = 0;
            for (part, (of_part, count)) in self
                .files
                .iter()
                .filter_map(|part| Some((part, part.own_elements(name)?)))
            {
                if of_part != *dtype {
                    let problem = format!("{name} is {of_part} in it, and {dtype} was written");
                    return Err(part.damaged(problem));
                }
                elements += count;
            }
            if elements == 0 || expected != Some(elements) {
                return Err(file.damaged(format!(
                    "its {} parts have {elements} elements of {name}, expected those of {shape:?}",
                    self.files.len()
                )));
            }
        }
        match unnamed.first() {
            Some(name) => {
                let problem = format!("its parts have {name}, which {} lacks", Manifest::KEY);
                Err(file.damaged(problem))
            }
            None => Ok(()),
        }
    }

    pub fn names(&self) -> impl Iterator<Item = String> {
        self.manifest.tensors.keys().cloned()
    }

    /// Returns the shape of the full tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let (_, shape) = self.manifest.tensors.get(name)?;
        Some(shape)
    }

    pub fn dtype(&self, name: &str) -> Option<&str> {
        let (dtype, _) = self.manifest.tensors.get(name)?;
        Some(dtype)
    }

    /// Joins the parts of a tensor.
    ///
    /// # Errors
    /// Those of [`TensorFile::get`].
    pub fn joined(&self, name: &str, device: &Device) -> Result<Tensor> {
        let parts = self.files.iter().filter_map(|file| {
            let part = file.get(name, &Device::Cpu).transpose()?;
            Some(part.and_then(|part| Ok(part.flatten_all()?)))
        });
        let parts = parts.collect::<Result<Vec<Tensor>>>()?;
        let bytes = |part: &Tensor| part.elem_count() * part.dtype().size_in_bytes();
        let bytes: usize = parts.iter().map(bytes).sum();
        check_available(self.files[0].path(), name, bytes as u64)?;
        let shape = self.shape(name).unwrap_or_default();
        Ok(Tensor::cat(&parts, 0)?.reshape(shape)?.to_device(device)?)
    }
}

/// Opens a rank's part, and checks that it is of this rank and this save.
fn open_part(file: &TensorFile, manifest: &Manifest, rank: usize) -> Result<TensorFile> {
    let PartFile { name, crc32 } = &manifest.files[rank];
    // Only a file's name, without a path that leaves the folder.
    if Path::new(name).file_name() != Some(name.as_ref()) {
        return Err(file.damaged(format!("expected a file name, got {name:?}")));
    }
    let part = TensorFile::open_one(&folder_of(file.path()).join(name))?;
    let expected = Part {
        save: manifest.save.clone(),
        rank,
        world_size: manifest.files.len(),
    };
    let described = |part: &Part| {
        format!(
            "rank {} of {} in the save {}",
            part.rank, part.world_size, part.save
        )
    };
    let refused = |problem: String| Error::Format {
        path: part.path().into(),
        problem,
        hint: format!(
            "it is not the file that {} was saved with: restore all files of that save, or resume from another \
             checkpoint",
            file.path().display()
        ),
    };
    let found = part.text(Part::KEY).map(serde_json::from_str::<Part>);
    match found {
        Some(Ok(found)) if found == expected => {}
        Some(Ok(found)) => {
            return Err(refused(format!(
                "expected the part of {}, got that of {}",
                described(&expected),
                described(&found)
            )));
        }
        _ => {
            return Err(refused(format!(
                "expected the part of {}, got a file without {}",
                described(&expected),
                Part::KEY
            )));
        }
    }
    if part.header_crc32() != *crc32 {
        return Err(refused(format!(
            "its header has the CRC-32 {:08x}, and {crc32:08x} was written",
            part.header_crc32()
        )));
    }
    Ok(part)
}

#[cfg(all(test, feature = "train"))] // only this feature writes parts
mod tests {
    use super::*;
    use crate::files::{Entry, save_part, save_tensors};
    use crate::saved::Numbers;
    use std::fs;
    use std::path::PathBuf;

    fn entry(name: &str, values: &[f32]) -> Entry {
        Entry {
            name: name.into(),
            tensor: Tensor::new(values, &Device::Cpu).unwrap(),
            numbers: Numbers::Any,
        }
    }

    fn part_path(folder: &Path, save: &str, rank: usize) -> PathBuf {
        folder.join(format!("part-{save}-{rank}"))
    }

    /// Saves two ranks' parts, whose values begin at `value`, and returns their manifest.
    fn save(folder: &Path, save: &str, value: f32) -> Manifest {
        let files = (0..2).map(|rank| {
            let part = Part {
                save: save.into(),
                rank,
                world_size: 2,
            };
            let mut entries = vec![entry("w", &[value + rank as f32; 3])];
            if rank == 1 {
                entries.push(entry("b", &[value]));
            }
            save_part(&part_path(folder, save, rank), entries, &part).unwrap()
        });
        Manifest {
            save: save.into(),
            files: files.collect(),
            tensors: [
                ("w".into(), ("f32".into(), vec![2, 3])),
                ("b".into(), ("f32".into(), vec![1])),
            ]
            .into(),
        }
    }

    fn open(folder: &Path, manifest: &Manifest) -> Result<TensorFile> {
        let path = folder.join("run.safetensors");
        let text = serde_json::to_string(manifest).unwrap();
        save_tensors(
            &path,
            vec![entry("own", &[1.0])],
            &[(Manifest::KEY, text)],
            1,
        )
        .unwrap();
        TensorFile::open(&path)
    }

    #[track_caller]
    fn refused(folder: &Path, manifest: &Manifest, words: &str) {
        let error = open(folder, manifest).err().expect(words);
        assert!(matches!(error, Error::Format { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }

    /// Files with the same names and sizes, but of another rank or save: their values would look right.
    #[test]
    fn swapped_and_mixed_parts_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let (a, b) = (save(folder, "a", 0.0), save(folder, "b", 5.0));
        let file = open(folder, &a).unwrap();
        let w = file.get("w", &Device::Cpu).unwrap().unwrap();
        let values: Vec<Vec<f32>> = w.to_vec2().unwrap();
        assert_eq!(values, [[0.0; 3], [1.0; 3]]);
        assert_eq!(file.names(), ["b", "own", "w"]);

        let swap = |one: &Path, other: &Path| {
            let content = [fs::read(one).unwrap(), fs::read(other).unwrap()];
            fs::write(one, &content[1]).unwrap();
            fs::write(other, &content[0]).unwrap();
        };
        let ranks = [0, 1].map(|rank| part_path(folder, "a", rank));
        swap(&ranks[0], &ranks[1]);
        refused(
            folder,
            &a,
            "expected the part of rank 0 of 2 in the save a, got that of rank 1 of 2",
        );
        swap(&ranks[0], &ranks[1]);
        let saves = ["a", "b"].map(|save| part_path(folder, save, 1));
        swap(&saves[0], &saves[1]);
        refused(
            folder,
            &a,
            "in the save a, got that of rank 1 of 2 in the save b",
        );
        refused(
            folder,
            &b,
            "in the save b, got that of rank 1 of 2 in the save a",
        );
        swap(&saves[0], &saves[1]);
        // The same save and rank, written again with other values.
        save(folder, "a", 0.5);
        refused(folder, &a, "its header has the CRC-32");
        save(folder, "a", 0.0);
        open(folder, &a).unwrap();
        save_tensors(&ranks[0], vec![entry("w", &[0.0; 3])], &[], 1).unwrap();
        refused(folder, &a, "a file without tallow.part");
    }

    #[test]
    fn manifests_that_cannot_be_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let whole = save(folder, "a", 0.0);
        let changed = |change: &dyn Fn(&mut Manifest)| {
            let mut manifest = whole.clone();
            change(&mut manifest);
            manifest
        };
        let shape =
            |shape: &[usize]| changed(&|m| m.tensors.get_mut("w").unwrap().1 = shape.to_vec());
        for (manifest, words) in [
            (changed(&|m| m.files.clear()), "names no files"),
            (
                changed(&|m| m.files[0].name = "../part".into()),
                "expected a file name",
            ),
            (
                changed(&|m| m.files[1] = m.files[0].clone()),
                "got that of rank 0",
            ),
            (changed(&|m| drop(m.files.pop())), "got that of rank 0 of 2"),
            (shape(&[1 << 33, 1 << 33]), "6 elements of w"),
            (shape(&[usize::MAX, 2]), "6 elements of w"),
            (shape(&[7]), "6 elements of w"),
            (shape(&[0]), "6 elements of w"),
            (
                changed(&|m| m.tensors.get_mut("w").unwrap().0 = "f64".into()),
                "and f64 was written",
            ),
            (changed(&|m| drop(m.tensors.remove("w"))), "have w, which"),
            (
                changed(&|m| drop(m.tensors.insert("c".into(), ("f32".into(), vec![1])))),
                "0 elements of c",
            ),
            (
                changed(&|m| drop(m.tensors.insert("own".into(), ("f32".into(), vec![1])))),
                "own is in it, and in parts of it",
            ),
        ] {
            refused(folder, &manifest, words);
        }
        let path = folder.join("run.safetensors");
        let text = r#"{"files":[],"tensors":{"w":["f32",[2,3]]}}"#.into();
        save_tensors(&path, Vec::new(), &[(Manifest::KEY, text)], 1).unwrap();
        assert!(matches!(TensorFile::open(&path), Err(Error::Format { .. })));
    }
}
