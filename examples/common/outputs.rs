//! Output files, which are checked for writing before hours are spent on their content.

use super::{print_progress, refusal, stdout, wrote};
use clap::Args;
use std::fs::OpenOptions;
use std::io::ErrorKind;
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
    /// Checks that this output and others can be written, and refuses two outputs to one file.
    pub fn check_with<const N: usize>(&self, others: [&Option<PathBuf>; N]) -> Result<()> {
        let mut files = Vec::new();
        for path in [&self.output].into_iter().chain(others).flatten() {
            check_writable(path)?;
            if files.contains(&path) {
                let got = format!("one file for two outputs, {}", path.display());
                let hint = "the second would replace the first: name another";
                return Err(refusal("outputs", "files of their own", got, hint));
            }
            let is_special = std::fs::metadata(path).is_ok_and(|there| !there.is_file());
            files.extend((!is_special).then_some(path)); // a device takes any number of outputs
        }
        Ok(())
    }

    /// Writes the rows so far if `--output` names a file, so that a sweep that is stopped leaves them.
    pub fn save_so_far(&self, report: &Report) -> Result<()> {
        let path = self.output.as_deref();
        path.map_or(Ok(()), |path| self.save(report, path).map(drop))
    }

    /// Writes the finished report to the file of `--output`, or to stdout.
    pub fn publish(&self, report: &Report) -> Result<()> {
        if let Some(path) = &self.output {
            let written = self.save(report, path)?;
            written.iter().for_each(|path| wrote(path));
            return Ok(());
        }
        if self.format == Format::Csv && !report.details.is_empty() {
            let titles: Vec<&str> = report.details.iter().map(|d| d.title.as_str()).collect();
            let titles = titles.join("; ");
            let hint = "--output FILE.csv writes these too";
            print_progress(format_args!("not in one CSV: {titles}; {hint}"));
        }
        stdout::write(&self.document(report)?)
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
    let words = title.split([' ', ',', '/']);
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
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
    let of_environment = std::env::var("COLUMNS").ok();
    let of_environment = of_environment.and_then(|columns| columns.parse().ok());
    let of_terminal = console::Term::stdout().size_checked();
    let of_terminal = of_terminal.map(|(_, columns)| columns.into());
    let mut known = [of_environment, of_terminal].into_iter().flatten();
    known.find(|columns| *columns > 0).unwrap_or(100)
}

/// Refuses a folder, a file that cannot be opened for writing, and a path at which none can be created; a file created
/// for this check is removed. Pipes and devices are not tried. No content is changed.
pub fn check_writable(path: &Path) -> Result<()> {
    let mut file = OpenOptions::new();
    let tried = match std::fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(ErrorKind::IsADirectory.into()),
        Ok(there) if there.is_file() => file.append(true).open(path).map(drop),
        Ok(_) => Ok(()),
        Err(_) => {
            let created = file.write(true).create_new(true).open(path);
            created.and_then(|_| std::fs::remove_file(path))
        }
    };
    tried.map_err(|error| Error::io("write", path, error))
}
