//! Output files, which are checked for writing before hours are spent on their content.

use super::stdout;
use clap::Args;
use std::fs::OpenOptions;
use std::io::{Error as IoError, ErrorKind, Write};
use std::path::{Path, PathBuf};
use tallow::report::{Format, Report};
use tallow::{Error, Result};

/// Flags of every example that prints a table.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Report and run")]
pub struct Output {
    /// text, markdown, csv, json or latex
    #[arg(long, default_value = "text", value_name = "NAME")]
    pub format: Format,

    /// Write the report to a file; as CSV, one per table
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

impl Output {
    /// Checks that this output and others can be written.
    pub fn check_with<const N: usize>(&self, others: [&Option<PathBuf>; N]) -> Result<()> {
        check([&self.output].into_iter().chain(others))
    }

    /// Writes the rows so far if `--output` names a file, so that a sweep that is stopped leaves them.
    pub fn save_so_far(&self, report: &Report) -> Result<()> {
        let path = self.output.as_deref();
        path.map_or(Ok(()), |path| self.save(report, path).map(|_| ()))
    }

    /// Writes the finished report to the file of `--output`, or to stdout.
    pub fn publish(&self, report: &Report) -> Result<()> {
        match &self.output {
            Some(path) => {
                let written = self.save(report, path)?;
                written.iter().for_each(|path| super::wrote(path));
                Ok(())
            }
            None => {
                if self.format == Format::Csv && !report.details.is_empty() {
                    let titles: Vec<&str> =
                        report.details.iter().map(|d| d.title.as_str()).collect();
                    let titles = titles.join("; ");
                    super::print_progress(format_args!(
                        "not in one CSV: {titles}; --output FILE.csv writes these too"
                    ));
                }
                stdout::write(&self.document(report)?)
            }
        }
    }

    /// Returns the report for stdout, as text as wide as the terminal.
    pub fn document(&self, report: &Report) -> Result<Vec<u8>> {
        if self.format == Format::Text {
            return Ok(report.to_text(Some(terminal_width())).into_bytes());
        }
        let mut bytes = Vec::new();
        report.write_to(self.format, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes the report to a file, and as CSV its details to others. If that fails, it goes to stdout, so that the
    /// measurements are not lost.
    fn save(&self, report: &Report, path: &Path) -> Result<Vec<PathBuf>> {
        let saved = report.save(self.format, path);
        if saved.is_err() {
            let _ = self.document(report).and_then(|text| stdout::write(&text)); // the error in `saved` is reported
        }
        saved
    }
}

/// Returns `step.svg` for a single run, or `step-tiny-B4-T128-naive-f32-eager-forward.svg` for one of several.
pub fn named(path: &Path, title: &str, runs: usize) -> PathBuf {
    if runs == 1 {
        return path.to_path_buf();
    }
    let words: Vec<&str> = title
        .split([' ', ',', '/'])
        .filter(|word| !word.is_empty())
        .collect();
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let mut name = format!("{stem}-{}", words.join("-"));
    if let Some(ending) = path.extension() {
        name = format!("{name}.{}", ending.to_string_lossy());
    }
    path.with_file_name(name)
}

/// Returns the number of characters in a line on stdout: from `COLUMNS`, else from the terminal, else 100. In both
/// sources 0 means unknown.
pub fn terminal_width() -> usize {
    let said = std::env::var("COLUMNS")
        .ok()
        .and_then(|columns| columns.parse().ok())
        .filter(|columns| *columns > 0);
    let own = || {
        console::Term::stdout()
            .size_checked()
            .map(|(_, columns)| columns.into())
            .filter(|columns| *columns > 0)
    };
    said.or_else(own).unwrap_or(100)
}

/// Checks that every named output can be written, and refuses two outputs to one file.
pub fn check<'p>(outputs: impl IntoIterator<Item = &'p Option<PathBuf>>) -> Result<()> {
    let paths: Vec<&PathBuf> = outputs.into_iter().flatten().collect();
    for (i, path) in paths.iter().enumerate() {
        check_writable(path)?;
        if paths[..i].contains(path) && !is_special(path) {
            return Err(Error::Config {
                config: super::PROGRAM,
                field: "outputs",
                expected: "files of their own".into(),
                got: format!("one file for two outputs, {}", path.display()),
                hint: "the second would replace the first: name another".into(),
            });
        }
    }
    Ok(())
}

/// Refuses a path that cannot be written: opens the file, or creates and removes it. No content is changed.
pub fn check_writable(path: &Path) -> Result<()> {
    let refused = |error| Error::io("write", path, error);
    let tried = match std::fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(ErrorKind::IsADirectory.into()),
        Ok(there) if there.is_file() => try_file(path),
        Ok(_) => try_device(path),
        Err(error) if error.kind() == ErrorKind::NotFound => try_new(path),
        Err(error) => Err(error),
    };
    tried.map_err(refused)
}

/// Checks an existing file. Writing replaces it by a new file in the same folder, so both must be writable.
fn try_file(path: &Path) -> std::io::Result<()> {
    OpenOptions::new().append(true).open(path)?;
    try_folder(&path.canonicalize()?)
}

/// Checks a path without a file: creates and removes it, then checks its folder.
fn try_new(path: &Path) -> std::io::Result<()> {
    if path.is_symlink() {
        let problem = "a link to a file that is not there";
        return Err(IoError::new(ErrorKind::NotFound, problem));
    }
    OpenOptions::new().write(true).create_new(true).open(path)?;
    std::fs::remove_file(path)?;
    try_folder(path)
}

/// Writes a temporary file to the folder of `path`.
fn try_folder(path: &Path) -> std::io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new();
    let mut file = file.prefix(".tallow-").tempfile_in(folder)?;
    file.write_all(&[0; 1024])
}

/// Checks a device, which is written in place: a full one fails a write of no bytes. A pipe is not opened, because that
/// would wait for its reader.
fn try_device(path: &Path) -> std::io::Result<()> {
    if is_pipe(path) {
        return Ok(());
    }
    let mut device = OpenOptions::new().write(true).open(path)?;
    device.write(&[]).map(|_| ())
}

#[cfg(unix)]
fn is_pipe(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|there| there.file_type().is_fifo())
}

#[cfg(not(unix))]
fn is_pipe(_path: &Path) -> bool {
    false
}

/// Returns whether the path exists and is not a regular file.
fn is_special(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|there| !there.is_file())
}
