//! Tests of saves that are interrupted between any two changes of the folder, by a kill or by an error.

use super::{SaveOptions, load, save_with};
use crate::files::interrupt::with_hook;
use crate::model::{TransformerConfig, TransformerLM};
use crate::ops::RotaryPairs;
use candle_core::{DType, Device};
use rstest::rstest;
use std::cell::RefCell;
use std::fs;
use std::io;
use std::path::Path;
use std::rc::Rc;
use tempfile::{TempDir, tempdir};

/// A model, and the folder that its tokenizer comes from.
struct Version {
    model: TransformerLM,
    from: TempDir,
    max_shard_bytes: usize,
}

impl Version {
    fn new(seed: u64, rope_theta: f64, tokenizer: &str, is_sharded: bool) -> Self {
        let config = TransformerConfig {
            vocab_size: 20,
            d_model: 8,
            num_layers: 1,
            num_heads: 2,
            d_ff: 12,
            rope_theta,
            rope_pairs: RotaryPairs::Halves,
            ..Default::default()
        };
        let from = tempdir().unwrap();
        fs::write(from.path().join("tokenizer.json"), tokenizer).unwrap();
        Self {
            model: TransformerLM::new(&config, seed, &Device::Cpu).unwrap(),
            from,
            max_shard_bytes: if is_sharded { 1500 } else { usize::MAX },
        }
    }

    fn save(&self, folder: &Path) -> crate::Result<()> {
        let options = SaveOptions {
            from: Some(self.from.path().into()),
            overwrite: true,
            max_shard_bytes: self.max_shard_bytes,
            ..Default::default()
        };
        save_with(&self.model, folder, &options)
    }

    /// Returns whether a loaded model and a folder's tokenizer are those of this version.
    fn is(&self, model: &TransformerLM, folder: &Path) -> bool {
        let weights = |model: &TransformerLM| -> Vec<Vec<f32>> {
            let weights = crate::nn::Layer::weights(model).into_iter();
            let flat = weights.map(|(_, weight)| weight.flatten_all().unwrap().to_vec1());
            flat.map(Result::unwrap).collect()
        };
        let tokenizer = |folder: &Path| fs::read(folder.join("tokenizer.json")).ok();
        let theta = |model: &TransformerLM| model.config().rope_theta;
        weights(model) == weights(&self.model)
            && theta(model) == theta(&self.model)
            && tokenizer(folder) == tokenizer(self.from.path())
    }
}

#[derive(Debug, PartialEq)]
enum State {
    Old,
    New,
    Refused,
    Mixed,
}

fn state(folder: &Path, old: &Version, new: &Version) -> State {
    match load(folder, &Device::Cpu) {
        Err(_) => State::Refused,
        Ok(model) if old.is(&model, folder) => State::Old,
        Ok(model) if new.is(&model, folder) => State::New,
        Ok(_) => State::Mixed,
    }
}

fn copy(from: &Path) -> TempDir {
    let folder = tempdir().unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    folder
}

/// Returns the names in a folder, without the numbers of shard sets.
fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    let names = names.map(|file| file.unwrap().file_name().into_string().unwrap());
    let without_set = |name: String| {
        let sets = ["model-2-", "model-3-"];
        sets.iter()
            .fold(name, |name, set| name.replace(set, "model-"))
    };
    let mut names: Vec<String> = names.map(without_set).collect();
    names.sort();
    names
}

#[rstest]
fn a_save_that_is_cut_short_leaves_one_model_or_none(
    #[values(false, true)] old_is_sharded: bool,
    #[values(false, true)] new_is_sharded: bool,
    #[values((1e4, "old"), (1e4, "new"), (5e5, "new"))] new_settings: (f64, &str),
) {
    let (theta, tokenizer) = new_settings;
    let settings_change = new_settings != (1e4, "old");
    let old = Version::new(1, 1e4, "old", old_is_sharded);
    let new = Version::new(2, theta, tokenizer, new_is_sharded);
    let empty = tempdir().unwrap();
    new.save(empty.path()).unwrap();
    let complete = names(empty.path());

    // Killed: the state at a point is what a process that dies there leaves behind.
    let folder = tempdir().unwrap();
    old.save(folder.path()).unwrap();
    let before = names(folder.path());
    let snapshots = Rc::new(RefCell::new(Vec::new()));
    let (taken, path) = (snapshots.clone(), folder.path().to_path_buf());
    let hook = move |_: &Path| {
        taken.borrow_mut().push(copy(&path));
        Ok(())
    };
    with_hook(hook, || new.save(folder.path())).unwrap();
    assert_eq!(state(folder.path(), &old, &new), State::New);
    assert_eq!(names(folder.path()), complete);
    let snapshots = snapshots.take();
    let mut states = Vec::new();
    for (i, snapshot) in snapshots.iter().enumerate() {
        let found = state(snapshot.path(), &old, &new);
        assert!(
            found != State::Mixed,
            "point {i}: {:?}",
            names(snapshot.path())
        );
        assert!(found != State::Refused || settings_change, "point {i}");
        states.push(found);
        // The next save completes the folder, and removes everything of the interrupted one.
        new.save(snapshot.path()).unwrap();
        assert_eq!(state(snapshot.path(), &old, &new), State::New, "point {i}");
        assert_eq!(names(snapshot.path()), complete, "point {i}");
    }
    assert_eq!(states.contains(&State::Refused), settings_change);
    assert!(states.is_sorted_by_key(|state| match state {
        State::Old => 0,
        State::Refused => 1,
        _ => 2,
    }));

    // Failed: for example, the disk is full.
    for (point, killed) in states.iter().enumerate() {
        let folder = tempdir().unwrap();
        old.save(folder.path()).unwrap();
        let mut passed = 0;
        let hook = move |_: &Path| {
            passed += 1;
            match passed == point + 1 {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => Ok(()),
            }
        };
        let error = with_hook(hook, || new.save(folder.path())).unwrap_err();
        assert!(error.to_string().contains("no storage space"), "{error}");
        // Before the switch everything is as before; after it only states remain that a killed process can leave too.
        let found = state(folder.path(), &old, &new);
        match found {
            State::Old => assert_eq!(names(folder.path()), before, "point {point}"),
            _ => assert_eq!(found, *killed, "point {point}"),
        }
        assert!(
            *killed != State::Old || found == State::Old,
            "point {point}"
        );
    }
}

/// A new folder cannot be loaded until it is complete.
#[rstest]
fn a_first_save_that_is_cut_short_is_refused(#[values(false, true)] is_sharded: bool) {
    let new = Version::new(2, 1e4, "new", is_sharded);
    let folder = tempdir().unwrap();
    let snapshots = Rc::new(RefCell::new(Vec::new()));
    let (taken, path) = (snapshots.clone(), folder.path().to_path_buf());
    let hook = move |_: &Path| {
        taken.borrow_mut().push(copy(&path));
        Ok(())
    };
    with_hook(hook, || new.save(folder.path())).unwrap();
    for snapshot in snapshots.take() {
        let found = state(snapshot.path(), &new, &new);
        assert!(found == State::Refused || names(snapshot.path()) == names(folder.path()));
    }
}

/// Refuses elements that overflow the dtype of the files, and removes what was written.
#[test]
fn a_weight_that_the_dtype_does_not_hold() {
    let version = Version::new(1, 1e4, "old", true);
    let parameters = version.model.parameters();
    let (name, last) = parameters.last().unwrap();
    last.set(&(last.as_tensor() * 1e6).unwrap()).unwrap();
    let folder = tempdir().unwrap();
    let options = SaveOptions {
        dtype: Some(DType::F16),
        max_shard_bytes: 1000,
        ..Default::default()
    };
    let error = save_with(&version.model, folder.path(), &options).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains(name.as_str()) && error.contains("f16"),
        "{error}"
    );
    assert!(names(folder.path()).is_empty());
    let options = SaveOptions {
        dtype: Some(DType::BF16),
        ..options
    };
    save_with(&version.model, folder.path(), &options).unwrap();
}
