//! Compiled CUDA sources on disk, in the user's cache directory.
//!
//! A GPU runs the code that is read here. A file is therefore read only if no other user can have written it: the
//! directories and the file belong to the user, nobody else has write permission, and the file name contains the
//! SHA-256 of the content.

use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// A directory `tallow/kernels` of files `{key}-{SHA-256 of the content}.ptx`.
pub(crate) struct PtxCache {
    cache: PathBuf,
}

impl PtxCache {
    /// Returns the cache in `XDG_CACHE_HOME`, or else in `.cache` of the home directory. Relative paths are ignored.
    /// Returns `None` if neither variable holds an absolute path.
    pub fn for_user() -> Option<Self> {
        Self::of(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))
    }

    fn of(cache_home: Option<OsString>, home: Option<OsString>) -> Option<Self> {
        let absolute =
            |path: Option<OsString>| Some(PathBuf::from(path?)).filter(|path| path.is_absolute());
        let cache = match absolute(cache_home) {
            Some(cache) => cache,
            None => absolute(home)?.join(".cache"),
        };
        Some(Self { cache })
    }

    /// Returns the directories that belong to tallow: `tallow` and `tallow/kernels`.
    fn folders(&self) -> [PathBuf; 2] {
        let root = self.cache.join("tallow");
        let kernels = root.join("kernels");
        [root, kernels]
    }

    /// Returns the text stored under `key`, if the file is trusted and intact.
    pub fn read(&self, key: &str) -> Option<String> {
        let [root, kernels] = self.folders();
        let trusted = |folder: &Path| {
            fs::symlink_metadata(folder).is_ok_and(|is| is.is_dir() && is_private(&is))
        };
        if !trusted(&root) || !trusted(&kernels) {
            return None;
        }
        let mut files = fs::read_dir(kernels).ok()?.flatten();
        files.find_map(|file| {
            let name = file.file_name().into_string().ok()?;
            let hash = name
                .strip_prefix(key)?
                .strip_prefix('-')?
                .strip_suffix(".ptx")?;
            let text = read_private(&file.path()).ok()?;
            (hash == self::hash(&[&text])).then_some(text)
        })
    }

    /// Stores `text` under `key`.
    ///
    /// # Errors
    /// I/O errors, and a directory of another user.
    pub fn store(&self, key: &str, text: &str) -> io::Result<()> {
        let folders = self.folders();
        if let Some(parent) = folders[0].parent() {
            fs::create_dir_all(parent)?;
        }
        for folder in &folders {
            make_private(folder)?;
        }
        let [_, kernels] = folders;
        // Temporary files are private. There is no fsync: a truncated file fails its hash and is not read.
        let mut file = tempfile::NamedTempFile::new_in(&kernels)?;
        file.write_all(text.as_bytes())?;
        file.persist(kernels.join(format!("{key}-{}.ptx", hash(&[text]))))?;
        Ok(())
    }
}

/// Returns the SHA-256 of the texts in hexadecimal. Lengths are hashed too, so that texts cannot run into each other.
pub(crate) fn hash(texts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for text in texts {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    }
    hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Creates a directory with mode 0700, or removes the write permission of others from the user's existing one.
fn make_private(folder: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    match builder.create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let is = fs::symlink_metadata(folder)?;
    if !is.is_dir() || !is_own(&is) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    #[cfg(unix)]
    if !is_private(&is) {
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(folder, private)?;
    }
    Ok(())
}

/// Reads a regular file that no other user may write to. Symbolic links are refused.
fn read_private(path: &Path) -> io::Result<String> {
    let mut file = open(path)?;
    let is = file.metadata()?;
    if !is.is_file() || !is_private(&is) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(text)
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)] // does not block on a pipe
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        libc::O_NOFOLLOW | libc::O_NONBLOCK,
    );
    options.open(path)
}

/// Returns whether the file belongs to this user and no other user may write to it.
#[cfg(unix)]
fn is_private(is: &fs::Metadata) -> bool {
    is_own(is) && std::os::unix::fs::MetadataExt::mode(is) & 0o022 == 0
}

#[cfg(unix)]
fn is_own(is: &fs::Metadata) -> bool {
    // SAFETY: geteuid has no arguments and cannot fail.
    std::os::unix::fs::MetadataExt::uid(is) == unsafe { libc::geteuid() }
}

/// Returns `true`: without Unix modes, the user's profile directory protects the cache.
#[cfg(not(unix))]
fn is_private(_: &fs::Metadata) -> bool {
    true
}

#[cfg(not(unix))]
fn is_own(_: &fs::Metadata) -> bool {
    true
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn cache() -> (tempfile::TempDir, PtxCache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = PtxCache::of(Some(folder.path().into()), None).unwrap();
        (folder, cache)
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn only_file(cache: &PtxCache) -> PathBuf {
        let files: Vec<_> = fs::read_dir(&cache.folders()[1])
            .unwrap()
            .flatten()
            .collect();
        assert_eq!(files.len(), 1);
        files[0].path()
    }

    #[test]
    fn what_is_kept_is_read_again() {
        let (_folder, cache) = cache();
        assert_eq!(cache.read("a"), None);
        cache.store("a", "text").unwrap();
        cache.store("a-b", "other").unwrap();
        cache.store("a", "text").unwrap();
        assert_eq!(cache.read("a").as_deref(), Some("text"));
        assert_eq!(cache.read("a-b").as_deref(), Some("other"));
        for missing in ["", "b", "a-", "text"] {
            assert_eq!(cache.read(missing), None, "{missing}");
        }
        let folders = cache.folders();
        for folder in &folders {
            assert_eq!(fs::metadata(folder).unwrap().mode() & 0o777, 0o700);
        }
    }

    #[test]
    fn a_relative_folder_is_none() {
        let of = |cache_home: Option<&str>, home: Option<&str>| {
            let cache = PtxCache::of(cache_home.map(Into::into), home.map(Into::into))?;
            Some(cache.cache.to_str()?.to_string())
        };
        assert_eq!(of(Some("/c"), Some("/h")).as_deref(), Some("/c"));
        for relative in [None, Some(""), Some("c"), Some("./c"), Some("../c")] {
            assert_eq!(of(relative, Some("/h")).as_deref(), Some("/h/.cache"));
            assert_eq!(of(relative, relative), None);
        }
        let own = PtxCache::for_user().map(|cache| cache.cache);
        assert!(own.is_none_or(|cache| cache.is_absolute()));
    }

    #[test]
    fn a_changed_file_is_not_read() {
        let (_folder, cache) = cache();
        cache.store("a", "text").unwrap();
        let file = only_file(&cache);
        for damaged in ["", "texT", "text ", "\u{0}"] {
            fs::write(&file, damaged).unwrap();
            assert_eq!(cache.read("a"), None, "{damaged}");
        }
        fs::write(&file, [0xff]).unwrap(); // not UTF-8
        assert_eq!(cache.read("a"), None);
        cache.store("a", "text").unwrap(); // replaces the damaged file
        assert_eq!(cache.read("a").as_deref(), Some("text"));
    }

    #[test]
    fn what_others_may_write_is_not_read() {
        let (_folder, cache) = cache();
        cache.store("a", "text").unwrap();
        let file = only_file(&cache);
        for mode in [0o620, 0o602, 0o666] {
            set_mode(&file, mode);
            assert_eq!(cache.read("a"), None, "{mode:o}");
        }
        set_mode(&file, 0o644);
        assert!(cache.read("a").is_some());
        for folder in cache.folders() {
            for mode in [0o770, 0o707, 0o777] {
                set_mode(&folder, mode);
                assert_eq!(cache.read("a"), None, "{mode:o}");
            }
            cache.store("a", "text").unwrap(); // removes the permissions
            assert!(cache.read("a").is_some());
        }
    }

    #[test]
    fn links_are_not_followed() {
        let (folder, cache) = cache();
        cache.store("a", "text").unwrap();
        let file = only_file(&cache);
        let elsewhere = folder.path().join("elsewhere");
        fs::rename(&file, &elsewhere).unwrap();
        symlink(&elsewhere, &file).unwrap();
        assert_eq!(cache.read("a"), None);
        fs::remove_file(&file).unwrap();
        fs::rename(&elsewhere, &file).unwrap();
        let [_, kernels] = cache.folders();
        fs::rename(&kernels, &elsewhere).unwrap();
        symlink(&elsewhere, &kernels).unwrap();
        assert_eq!(cache.read("a"), None);
        assert!(cache.store("a", "text").is_err());
    }

    #[test]
    fn another_users_folder_is_not_used() {
        let (_folder, cache) = cache();
        cache.store("a", "text").unwrap();
        // Only root can give a file to another user.
        for path in [only_file(&cache), cache.folders()[1].clone()] {
            if std::os::unix::fs::chown(&path, Some(12_345), None).is_ok() {
                assert_eq!(cache.read("a"), None);
            }
        }
    }
}
