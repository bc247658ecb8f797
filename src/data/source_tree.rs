//! The text files of a folder, one after another.

use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::path::Path;

use crate::files;
use crate::{Error, Result};

/// What reading a tree found.
#[derive(Default)]
pub(super) struct SourceTree {
    /// The content of every chosen file, in order.
    pub(super) bytes: Vec<u8>,
    /// Files with a chosen extension that are not UTF-8, and so not in `bytes`.
    pub(super) not_text: usize,
}

/// Reads `folder` and what is below it; [`Tokens::source_tree`](super::Tokens::source_tree) says which files.
pub(super) fn read(folder: &Path, extensions: &[&OsStr]) -> Result<SourceTree> {
    let mut tree = SourceTree::default();
    add_folder(folder, extensions, &mut tree)?;
    Ok(tree)
}

fn add_folder(folder: &Path, extensions: &[&OsStr], tree: &mut SourceTree) -> Result<()> {
    let mut entries: Vec<DirEntry> = fs::read_dir(folder)
        .and_then(Iterator::collect)
        .map_err(|e| Error::io("read", folder, e))?;
    // The system lists a folder in any order it likes.
    entries.sort_by_key(DirEntry::file_name);

    for entry in entries {
        let path = entry.path();
        // Of the entry itself: a link is neither file nor folder here, so no cycle can be entered.
        let kind = entry.file_type().map_err(|e| Error::io("read", &path, e))?;
        if kind.is_dir() && !is_skipped(&entry.file_name()) {
            add_folder(&path, extensions, tree)?;
        } else if kind.is_file() && path.extension().is_some_and(|e| extensions.contains(&e)) {
            let content = files::read(&path)?;
            if std::str::from_utf8(&content).is_ok() {
                tree.bytes.extend_from_slice(&content);
            } else {
                tree.not_text += 1;
            }
        }
    }
    Ok(())
}

fn is_skipped(folder_name: &OsStr) -> bool {
    folder_name == "target" || folder_name.as_encoded_bytes().starts_with(b".")
}
