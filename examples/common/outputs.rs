//! The files that a run leaves: tried before hours are spent on their content.

use super::stdout;
use clap::Args;
use std::fs::OpenOptions;
use std::io::{Error as IoError, ErrorKind, Write};
use std::path::{Path, PathBuf};
use tallow::report::{Column, Format, Layout, Report};
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

    /// Columns by heading or field, or all [default: what fits]
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "NAME")]
    columns: Vec<String>,
}

impl Output {
    /// Tries this output and others.
    pub fn check_with<const N: usize>(&self, others: [&Option<PathBuf>; N]) -> Result<()> {
        check([&self.output].into_iter().chain(others))
    }

    /// Refuses names that no table has, before the work.
    pub fn check_columns(&self, tables: impl IntoIterator<Item = Vec<Column>>) -> Result<()> {
        let of = |columns| Report {
            columns,
            ..Default::default()
        };
        let mut tables = Report {
            details: tables.into_iter().map(of).collect(),
            ..Default::default()
        };
        self.select(&mut tables)
    }

    /// Writes what there is so far where `--output` names a file, so that a sweep that is stopped leaves its rows.
    pub fn save_so_far(&self, report: &Report) -> Result<()> {
        let path = self.output.as_deref();
        path.map_or(Ok(()), |path| self.save(report, path))
    }

    /// Writes the finished report.
    pub fn publish(&self, report: &Report) -> Result<()> {
        match &self.output {
            Some(path) => {
                self.save(report, path)?;
                super::wrote(path);
                Ok(())
            }
            None => {
                if self.format == Format::Csv && !report.details.is_empty() {
                    let titles: Vec<&str> =
                        report.details.iter().map(|d| d.title.as_str()).collect();
                    let titles = titles.join("; ");
                    super::say_aside(format_args!(
                        "not in one CSV: {titles}; --output FILE.csv writes these too"
                    ));
                }
                stdout::write(&self.document(report)?)
            }
        }
    }

    /// The report for stdout, in the format and the columns that the flags name.
    pub fn document(&self, report: &Report) -> Result<Vec<u8>> {
        let mut report = report.clone();
        self.select(&mut report)?;
        if self.format != Format::Text {
            let mut bytes = Vec::new();
            report.write_to(self.format, &mut bytes)?;
            return Ok(bytes);
        }
        let mut layout = terminal_layout();
        if self.columns == ["all"] {
            layout.width = None;
            layout.every_column = true;
        }
        Ok(report.to_text(&layout).into_bytes())
    }

    /// Keeps the columns that were chosen; all of them where none was, or `all`.
    fn select(&self, report: &mut Report) -> Result<()> {
        match self.columns.is_empty() || self.columns == ["all"] {
            true => Ok(()),
            false => report.select(&self.columns),
        }
    }

    /// Into a file. Where that fails, onto stdout: what was measured is not lost.
    fn save(&self, report: &Report, path: &Path) -> Result<()> {
        let mut report = report.clone();
        self.select(&mut report)?;
        let saved = report.save(self.format, path);
        if saved.is_err() {
            let _ = self.document(&report).and_then(|text| stdout::write(&text)); // what is reported is `saved`
        }
        saved
    }
}

/// `step.svg`, or `step-tiny-B4-T128-forward-naive-f32.svg` if it is one of several.
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

/// Text as wide as the terminal.
pub fn terminal_layout() -> Layout {
    Layout {
        width: Some(terminal_width()),
        every_column: false,
        hint: " (--columns all shows them)".into(),
    }
}

/// Characters of a line on stdout: what `COLUMNS` says, else the terminal, else 100. A width of 0 is an unknown one, in
/// the variable and from the terminal.
fn terminal_width() -> usize {
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

/// Tries every output that is named, and refuses one file for two of them.
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

/// Refuses a path that no file can be written to: opens it, or creates it and removes it again. Nothing that a file
/// holds is lost.
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

/// A file is replaced by another, written beside it.
fn try_file(path: &Path) -> std::io::Result<()> {
    OpenOptions::new().append(true).open(path)?;
    try_folder(&path.canonicalize()?)
}

/// The name itself, and then the folder.
fn try_new(path: &Path) -> std::io::Result<()> {
    if path.is_symlink() {
        let problem = "a link to a file that is not there";
        return Err(IoError::new(ErrorKind::NotFound, problem));
    }
    OpenOptions::new().write(true).create_new(true).open(path)?;
    std::fs::remove_file(path)?;
    try_folder(path)
}

/// Writes a temporary file beside `path`.
fn try_folder(path: &Path) -> std::io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new();
    let mut file = file.prefix(".tallow-").tempfile_in(folder)?;
    file.write_all(&[0; 1024])
}

/// A device is written to as it is: nothing, to try it, which a full one refuses too. A pipe is not opened before there
/// is something to write, for that waits for its reader.
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

/// Whether it is there, and no file.
fn is_special(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|there| !there.is_file())
}
