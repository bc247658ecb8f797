//! Lookup of a model's folder: a path, or a model in the cache of Hugging Face's hub.

use crate::files::read_to_string;
use crate::{Error, Result};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::{env, fs};

/// Returns the folder of a model: `name` itself if it is a folder, else the snapshot of the repository `org/name` (or
/// `name`, as `gpt2` is called) in the cache of Hugging Face's tools. Nothing is downloaded.
///
/// The cache is chosen as those tools choose it: `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `HF_HOME/hub`, else
/// `XDG_CACHE_HOME/huggingface/hub`, else `~/.cache/huggingface/hub`. In these variables `~`, `$NAME` and `${NAME}` are
/// expanded.
///
/// ```no_run
/// use tallow::hf;
///
/// let folder = hf::find("HuggingFaceTB/SmolLM2-135M")?;
/// let model = hf::load(folder, &tallow::device("cpu")?)?;
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// Those of [`find_in`].
pub fn find(name: impl AsRef<Path>) -> Result<PathBuf> {
    let cache = cache(env::home_dir(), &|variable| env::var_os(variable));
    find_in(name, cache.as_deref())
}

/// Like [`find`], in the cache `root`; `None` means that the machine has no cache.
///
/// The revision is `main`: `models--org--name/refs/main` contains the commit whose files are in
/// `models--org--name/snapshots/<commit>`. A commit downloaded by its hash has no `refs/main`; its snapshot must then
/// be the only one.
///
/// ```
/// use tallow::hf;
///
/// # let cache = std::env::temp_dir().join(format!("tallow-find-in-{}", std::process::id()));
/// let snapshot = cache.join("models--org--name/snapshots/1a2b3c");
/// std::fs::create_dir_all(&snapshot).map_err(|e| tallow::Error::io("write", &snapshot, e))?;
/// assert_eq!(hf::find_in("org/name", Some(&cache))?, snapshot);
/// assert!(hf::find_in("org/other", Some(&cache)).is_err());
/// # let _ = std::fs::remove_dir_all(&cache);
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Data`] if the model is in neither place, with the command that downloads it, and if there are several
/// snapshots without a `refs/main`; [`Error::Format`] for a `refs/main` whose commit is not in the snapshots.
pub fn find_in(name: impl AsRef<Path>, root: Option<&Path>) -> Result<PathBuf> {
    let name = name.as_ref();
    if name.is_dir() {
        return Ok(name.into());
    }
    let Some(parts) = repository(name) else {
        return Err(missing(name, "no such folder".into()));
    };
    let Some(root) = root else {
        let got = "no such folder, and no home folder that has a cache";
        return Err(missing(name, got.into()));
    };
    let cached = root.join(format!("models--{}", parts.join("--")));
    let main = cached.join("refs/main");
    if !main.exists() {
        return only_snapshot(name, &cached);
    }
    let text = read_to_string(&main)?;
    let commit = text.trim();
    let snapshot = cached.join("snapshots").join(commit);
    match is_one_name(commit) && snapshot.is_dir() {
        true => Ok(snapshot),
        false => Err(Error::Format {
            path: main,
            problem: format!("its commit is {commit:?}, which is not among the snapshots"),
            hint: format!("download the model again: hf download {}", name.display()),
        }),
    }
}

/// Returns the only snapshot of a cache entry without `refs/main`.
fn only_snapshot(name: &Path, cached: &Path) -> Result<PathBuf> {
    let folder = cached.join("snapshots");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut snapshots: Vec<PathBuf> = paths.filter(|path| path.is_dir()).collect();
    match (snapshots.pop(), snapshots.len()) {
        (None, _) => {
            let got = format!("no such folder, and no model in {}", cached.display());
            Err(missing(name, got))
        }
        (Some(one), 0) => Ok(one),
        (Some(_), others) => Err(Error::Data {
            what: name.display().to_string(),
            expected: "refs/main, or one snapshot".into(),
            got: format!("{} snapshots in {}", others + 1, folder.display()),
            hint: "name the folder of one of them".into(),
        }),
    }
}

/// Returns the error for a model that is not on this machine.
pub(super) fn missing(name: &Path, got: String) -> Error {
    let hint = match repository(name) {
        Some(_) => format!(
            "download it (hf download {}), or check the path",
            name.display()
        ),
        None => "check the path".into(),
    };
    Error::data(name.display().to_string(), got).must_be(
        "a folder, or org/name of a model in the cache of Hugging Face's tools",
        hint,
    )
}

/// Splits `org/name` or `name` into its parts; `None` for any other path.
fn repository(name: &Path) -> Option<Vec<&str>> {
    let parts: Vec<&str> = name.to_str()?.split('/').collect();
    let is_id = parts.len() <= 2 && parts.iter().all(|part| is_one_name(part));
    is_id.then_some(parts)
}

/// Returns whether `name` is a single path component, and not `..`.
fn is_one_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}

/// Returns the hub's cache according to environment variables; an empty variable counts as not set.
fn cache(home: Option<PathBuf>, variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    let folder = |name: &str| Some(expanded(set(name)?, home.as_deref(), &set));
    folder("HF_HUB_CACHE")
        .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(folder("HF_HOME")?.join("hub")))
        .or_else(|| {
            let caches = folder("XDG_CACHE_HOME");
            let caches = caches.or_else(|| Some(home.as_ref()?.join(".cache")))?;
            Some(caches.join("huggingface/hub"))
        })
}

/// Expands a leading `~` and variables in a path, as Python's `expanduser` and `expandvars` do. Variables that are not
/// set, and paths that are not UTF-8, stay unchanged.
fn expanded(
    path: OsString,
    home: Option<&Path>,
    variable: &dyn Fn(&str) -> Option<OsString>,
) -> PathBuf {
    let Some(text) = path.to_str() else {
        return path.into();
    };
    let text = match (text.strip_prefix('~'), home.and_then(Path::to_str)) {
        (Some(rest), Some(home)) if rest.is_empty() || rest.starts_with('/') => {
            format!("{home}{rest}")
        }
        _ => text.to_string(),
    };
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let (mut done, mut rest) = (String::new(), text.as_str());
    while let Some((before, after)) = rest.split_once('$') {
        done += before;
        let (name, next) = match after
            .strip_prefix('{')
            .and_then(|in_braces| in_braces.split_once('}'))
        {
            Some(found) => found,
            None => after.split_at(after.find(|c| !is_letter(c)).unwrap_or(after.len())),
        };
        match variable(name).and_then(|value| value.into_string().ok()) {
            Some(value) => done += &value,
            None => done += &format!("${}", &after[..after.len() - next.len()]),
        }
        rest = next;
    }
    PathBuf::from(done + rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Expected values are those of huggingface_hub 2.4, except that empty variables are ignored.
    #[test]
    fn the_cache_is_chosen_by_the_environment() {
        let of = |variables: &[(&str, &str)]| {
            let variables: HashMap<_, _> = variables.iter().copied().collect();
            let home = Some("/home/me".into());
            let found = cache(home, &|name| variables.get(name).map(OsString::from));
            found.unwrap().to_str().unwrap().to_string()
        };
        assert_eq!(of(&[]), "/home/me/.cache/huggingface/hub");
        assert_eq!(of(&[("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(of(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h")]), "/h/hub");
        assert_eq!(of(&[("HF_HOME", "~/hf")]), "/home/me/hf/hub");
        assert_eq!(of(&[("HF_HOME", "~")]), "/home/me/hub");
        assert_eq!(of(&[("HF_HOME", "~other/hf")]), "~other/hf/hub");
        assert_eq!(
            of(&[("HF_HOME", "$A/${B}c$D/$"), ("A", "/a"), ("B", "b")]),
            "/a/bc$D/$/hub"
        );
        assert_eq!(
            of(&[("HF_HOME", "/h"), ("HUGGINGFACE_HUB_CACHE", "~/old")]),
            "/home/me/old"
        );
        let both = [("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HUB_CACHE", "~/new")];
        assert_eq!(of(&both), "/home/me/new");
        assert_eq!(of(&[("HF_HUB_CACHE", ""), ("HF_HOME", "/h")]), "/h/hub");
        assert_eq!(cache(None, &|_| None), None);
    }
}
