//! Files to read: regular ones, opened once.

use crate::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Opens a regular file for reading. What is read is what was opened, whatever is renamed over `path` meanwhile.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be opened, a folder, and a pipe or a device, which is not waited for.
pub(crate) fn open(path: &Path) -> Result<File> {
    let refused = |e| Error::io("read", path, e);
    let mut options = OpenOptions::new();
    options.read(true);
    // Otherwise opening a pipe waits for its writer.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path);
    let file = file.map_err(|e| refused(naming_link(path, e)))?;
    let kind = file.metadata().map_err(refused)?;
    if kind.is_dir() {
        return Err(refused(ErrorKind::IsADirectory.into()));
    }
    if !kind.is_file() {
        let text = "it is not a regular file but a pipe or a device";
        return Err(refused(io::Error::new(ErrorKind::InvalidInput, text)));
    }
    Ok(file)
}

/// The whole of a text file.
///
/// # Errors
/// As [`open`]; [`Error::Io`] for what is not UTF-8.
pub(crate) fn read_to_string(path: &Path) -> Result<String> {
    let mut text = String::new();
    let read = open(path)?.read_to_string(&mut text);
    read.map_err(|e| Error::io("read", path, e))?;
    Ok(text)
}

/// The error of opening `path`; where the file is missing because a link leads nowhere, it says so.
pub(super) fn naming_link(path: &Path, error: io::Error) -> io::Error {
    match std::fs::read_link(path) {
        Ok(target) if error.kind() == ErrorKind::NotFound => {
            let text = format!(
                "it is a symbolic link to {}, which does not exist",
                target.display()
            );
            io::Error::new(ErrorKind::NotFound, text)
        }
        _ => error,
    }
}

/// Fills `buffer` with the bytes from `offset` on; an error if the file ends before. Several threads may read at once.
pub(crate) fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset);
    #[cfg(windows)]
    {
        use std::os::windows::fs::FileExt;
        let mut done = 0;
        while done < buffer.len() {
            match file.seek_read(&mut buffer[done..], offset + done as u64)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    /// What is no file, or leads to none, is refused at once and by name. (A pipe without a writer used to be waited
    /// for.)
    #[test]
    fn pipes_devices_folders_and_links_to_nothing_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let pipe = place("pipe");
        let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
        // SAFETY: a path that ends in a zero byte.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        symlink("nowhere", place("dangling")).unwrap();
        symlink("two", place("one")).unwrap();
        symlink("one", place("two")).unwrap();
        symlink("pipe", place("to a pipe")).unwrap();
        for (path, part) in [
            (pipe, "regular file"),
            (place("to a pipe"), "regular file"),
            ("/dev/null".into(), "regular file"),
            (folder.path().into(), "directory"),
            (place("dangling"), "link to nowhere, which does not exist"),
            (place("one"), "symbolic links"),
            (place("missing"), "No such file"),
        ] {
            let text = open(&path).unwrap_err().to_string();
            let wanted = format!("{}: cannot read: ", path.display());
            assert!(text.starts_with(&wanted) && text.contains(part), "{text}");
        }
    }
}
