//! Reading of regular files, and memory for their content, whose size is checked before anything is allocated.

use crate::{Error, Result, hardware};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Opens a regular file for reading. Later renames over `path` do not affect the open file.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be opened, a folder, or a pipe or a device, which is not waited for.
pub(crate) fn open(path: &Path) -> Result<File> {
    let refused = |e| Error::io("read", path, e);
    let mut options = OpenOptions::new();
    options.read(true);
    // Without this flag, opening a pipe waits for its writer.
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

/// The most bytes of a text file that is read completely. The largest text files of models, those of tokenizers, have
/// tens of MB.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Reads a whole file.
///
/// # Errors
/// Those of [`open`]; [`Error::OutOfMemory`] for a file larger than the available memory.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let mut file = open(path)?;
    let refused = |e| Error::io("read", path, e);
    let len = file.metadata().map_err(refused)?.len();
    check_available(path, "its content", len)?;
    let mut content = Vec::new();
    file.read_to_end(&mut content).map_err(refused)?; // reserves memory by the file's length, or fails
    Ok(content)
}

/// Reads a whole text file.
///
/// # Errors
/// Those of [`open`]; [`Error::Io`] for a file that is not UTF-8, or longer than 256 MiB; [`Error::OutOfMemory`].
pub(crate) fn read_to_string(path: &Path) -> Result<String> {
    let refused = |e| Error::io("read", path, e);
    let len = open(path)?.metadata().map_err(refused)?.len();
    if len > MAX_TEXT_BYTES {
        let text =
            format!("it has {len} bytes, and a text of at most {MAX_TEXT_BYTES} is expected");
        return Err(refused(io::Error::new(ErrorKind::FileTooLarge, text)));
    }
    let not_text = |e| refused(io::Error::new(ErrorKind::InvalidData, e));
    String::from_utf8(read(path)?).map_err(|e| not_text(e.utf8_error()))
}

/// Returns the error of opening `path`; for a dangling link it names the link's target.
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

/// Fills `buffer` with the bytes from `offset` on; an error if the file ends earlier. Several threads may read at the
/// same time.
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

/// Smaller allocations are not compared with the available memory: asking the system would take longer.
const CHECKED_BYTES: u64 = 16 << 20;

/// Refuses `wanted_bytes` of memory for a file's content if less is available. A sparse file can have any length
/// without using disk space, and a system that overcommits would grant the memory and then kill the process.
///
/// # Errors
/// [`Error::OutOfMemory`] naming `path` and `what`.
pub(crate) fn check_available(path: &Path, what: &str, wanted_bytes: u64) -> Result<()> {
    if wanted_bytes < CHECKED_BYTES {
        return Ok(());
    }
    hardware::check_available(
        &within(path, what),
        wanted_bytes,
        hardware::available_bytes(),
    )
}

/// Allocates `len` zeros of type `T`, to read a part of a file into.
///
/// # Errors
/// Those of [`check_available`]; [`Error::OutOfMemory`] also if the allocator fails, instead of an abort.
pub(crate) fn zeros<T: Clone + Default>(path: &Path, what: &str, len: usize) -> Result<Vec<T>> {
    let wanted_bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    check_available(path, what, wanted_bytes)?;
    let mut zeros = Vec::new();
    if zeros.try_reserve_exact(len).is_err() {
        return Err(hardware::not_granted(&within(path, what), wanted_bytes));
    }
    zeros.resize(len, T::default());
    Ok(zeros)
}

/// Returns the name for errors: the file, and the part of it.
fn within(path: &Path, what: &str) -> String {
    format!("{}: {what}", path.display())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    /// Not regular files, and links that lead to none, are refused immediately and by name. (A pipe without a writer
    /// used to block.)
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

    /// A sparse file can have any length; content that does not fit into memory is refused before it is read.
    #[test]
    fn a_sparse_file_is_not_read_into_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        File::create(&path).unwrap().set_len(1 << 42).unwrap();
        let error = read(&path).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        let text = read_to_string(&path).unwrap_err().to_string();
        assert!(
            text.contains("config.json: cannot read: it has 4398046511104 bytes"),
            "{text}"
        );
        std::fs::write(&path, [b'a', 0xff]).unwrap();
        let text = read_to_string(&path).unwrap_err().to_string();
        assert!(
            text.contains("config.json") && text.contains("utf-8"),
            "{text}"
        );
    }

    #[test]
    fn no_length_aborts() {
        let path = Path::new("file");
        for len in [1 << 45, usize::MAX / 8, usize::MAX] {
            let error = zeros::<u64>(path, "its ids", len).unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            assert!(error.to_string().starts_with("file: its ids: "), "{error}");
        }
        assert_eq!(zeros::<u32>(path, "its ids", 3).unwrap(), [0; 3]);
    }
}
