//! Examples run as processes.

use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Flags of a model with steps of a few milliseconds.
pub const SMALL: &str =
    "--d-model 16 --d-ff 32 --num-layers 1 --num-heads 2 --context-length 8 --batch-size 1";

/// Longer than any of these commands runs; the work that refusals must prevent would run longer.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The exit status and the output of a process.
#[derive(Debug)]
pub struct Outcome {
    /// `None` if a signal ended the process.
    pub status: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Returns the path of an example, built next to this test.
pub fn executable(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let path = profile.join("examples").join(name);
    assert!(
        path.is_file(),
        "{} is missing: run cargo build --examples",
        path.display()
    );
    path
}

/// Returns the command of an example's command line, with `SMALL` and `DATA` expanded.
pub fn example(line: &str) -> Command {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/LICENSE-APACHE");
    let line = line.replace("SMALL", SMALL).replace("DATA", data);
    let mut words = line.split_whitespace();
    let mut command = Command::new(executable(words.next().unwrap()));
    command.args(words).stdin(Stdio::null());
    command
}

/// Runs a command to its end, with its stdout written to `out`.
pub fn run_into(mut command: Command, out: Stdio) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let err = folder.path().join("err");
    command.stdout(out).stderr(File::create(&err).unwrap());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take()); // if stdout is a pipe, nobody reads it
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{command:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let err = String::from_utf8_lossy(&fs::read(err).unwrap()).into_owned();
    assert!(!err.contains("panicked"), "{command:?}: {err}");
    Outcome {
        status: status.code(),
        out: String::new(),
        err,
    }
}

pub fn run(command: Command) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let ended = run_into(command, File::create(&out).unwrap().into());
    let out = String::from_utf8_lossy(&fs::read(out).unwrap()).into_owned();
    Outcome { out, ..ended }
}

/// Runs an example with `--format json` and returns its report.
#[track_caller]
pub fn report(line: &str) -> Value {
    let ended = run(example(&format!("{line} --format json")));
    assert_eq!(ended.status, Some(0), "{line}: {ended:?}");
    serde_json::from_str(&ended.out).unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// Checks the exit status, and that the error message contains `words`.
#[track_caller]
pub fn assert_refused(line: &str, ended: &Outcome, status: i32, words: &str) {
    assert_eq!(ended.status, Some(status), "{line}: {ended:?}");
    let is_message = ended.err.starts_with("error: ") && ended.err.contains(words);
    assert!(is_message, "{line}: {words} is not in {}", ended.err);
}
