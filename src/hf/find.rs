//! Where the folder of a name is: a path, or a model in the cache of Hugging Face's hub.

use crate::files::read_to_string;
use crate::{Error, Result};
use std::env;
use std::path::{Component, Path, PathBuf};

/// The folder that `name` says: a folder of that path if there is one, else the model `org/name` as the hub's own tools
/// have put it into their cache. That is `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`. Nothing
/// is downloaded.
///
/// # Errors
/// As [`find_in`].
pub fn find(name: impl AsRef<Path>) -> Result<PathBuf> {
    find_in(name, cache().as_deref())
}

/// As [`find`], in the cache `root`; `None` is for a machine that has none.
///
/// The revision is `main`: `models--org--name/refs/main` has the commit whose files are in
/// `models--org--name/snapshots/<commit>`.
///
/// # Errors
/// [`Error::Data`] where neither is there, with the places that were looked at and the command that downloads;
/// [`Error::Format`] for a `refs/main` whose commit is no folder of the snapshots.
pub fn find_in(name: impl AsRef<Path>, root: Option<&Path>) -> Result<PathBuf> {
    let name = name.as_ref();
    if name.is_dir() {
        return Ok(name.into());
    }
    let Some((organisation, model)) = repository(name) else {
        return Err(missing(name, "no such folder".into(), None));
    };
    let id = format!("{organisation}/{model}");
    let Some(root) = root else {
        let got = "no such folder, and no home folder that has a cache of the hub's";
        return Err(missing(name, got.into(), Some(&id)));
    };
    let cached = root.join(format!("models--{organisation}--{model}"));
    let main = cached.join("refs/main");
    if !main.exists() {
        let got = format!("no such folder, and no {}", main.display());
        return Err(missing(name, got, Some(&id)));
    }
    let text = read_to_string(&main)?;
    let commit = text.trim();
    let snapshot = cached.join("snapshots").join(commit);
    match is_one_name(commit) && snapshot.is_dir() {
        true => Ok(snapshot),
        false => Err(Error::Format {
            path: main,
            problem: format!("it says {commit:?}, which is no folder of the snapshots beside it"),
            hint: format!("fetch the model again: hf download {id}"),
        }),
    }
}

fn missing(name: &Path, got: String, id: Option<&str>) -> Error {
    Error::Data {
        what: name.display().to_string(),
        expected: "a folder, or org/name of a model in the cache of Hugging Face's hub".into(),
        got,
        hint: match id {
            Some(id) => format!("fetch it with: hf download {id}"),
            None => "check the path".into(),
        },
    }
}

/// `org` and `name` of `org/name`, where it is that.
fn repository(name: &Path) -> Option<(&str, &str)> {
    let (organisation, model) = name.to_str()?.split_once('/')?;
    (is_one_name(organisation) && is_one_name(model)).then_some((organisation, model))
}

/// Whether it names one thing in a folder, and nothing above it.
fn is_one_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// The hub's cache, as its own tools choose it. An empty variable is none.
fn cache() -> Option<PathBuf> {
    let folder = |variable| env::var_os(variable).filter(|value| !value.is_empty());
    let of_home = || Some(env::home_dir()?.join(".cache/huggingface"));
    folder("HF_HUB_CACHE").map(PathBuf::from).or_else(|| {
        let home = folder("HF_HOME").map(PathBuf::from).or_else(of_home)?;
        Some(home.join("hub"))
    })
}
