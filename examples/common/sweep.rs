//! Sweeps of runs: progress with the estimated time left, and Ctrl-C, which keeps the rows measured so far.

use super::print_progress;
use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tallow::{Error, Result};

/// Whether a sweep was stopped: the program then ends with 130, as shells expect after Ctrl-C.
static IS_STOPPED: AtomicBool = AtomicBool::new(false);

/// Counts runs and estimates the time left.
pub struct Progress {
    runs: usize,
    begun: usize,
    start: Instant,
    is_silent: bool,
}

impl Progress {
    /// Creates the progress of `runs` runs, starting now.
    pub fn new(runs: usize) -> Self {
        Self {
            runs,
            begun: 0,
            start: Instant::now(),
            is_silent: false,
        }
    }

    /// Creates progress that only rank 0 of a job prints.
    pub fn of_rank(rank: usize, runs: usize) -> Self {
        Self {
            is_silent: rank > 0,
            ..Self::new(runs)
        }
    }

    /// Prints the next run's number, `title` and the time left, if stderr is a terminal.
    pub fn begin(&mut self, title: impl Display) {
        let left = self.seconds_left();
        let left = left.map_or(String::new(), |s| format!(", about {s:.0} s left"));
        self.begun += 1;
        let (run, runs) = (self.begun, self.runs);
        if !self.is_silent {
            super::progress(format_args!("[{run}/{runs}] {title}{left}"));
        }
    }

    /// Estimates the seconds left from the mean time of the runs so far; `None` before the first has ended.
    fn seconds_left(&self) -> Option<f64> {
        let mean = self.start.elapsed().as_secs_f64() / self.begun as f64;
        (self.begun > 0).then(|| mean * self.runs.saturating_sub(self.begun) as f64)
    }
}

/// The runs of a benchmark. The first Ctrl-C ends the sweep after the current run, the second ends the program.
pub struct Sweep {
    progress: Progress,
    is_interrupted: Arc<AtomicBool>,
}

impl Sweep {
    /// Creates a sweep of `runs` runs, starting now.
    ///
    /// # Errors
    /// [`Error::Io`] if no signal handler can be installed.
    pub fn new(runs: usize) -> Result<Self> {
        let is_interrupted = Arc::<AtomicBool>::default();
        let registered = flag::register_conditional_shutdown(SIGINT, 130, is_interrupted.clone())
            .and_then(|_| flag::register(SIGINT, is_interrupted.clone()));
        registered.map_err(|e| Error::io("listen to", "Ctrl-C", e))?;
        Ok(Self {
            progress: Progress::new(runs),
            is_interrupted,
        })
    }

    /// Begins the next run, and prints `title` as progress. Returns `false` once Ctrl-C was pressed: the caller then
    /// leaves its loop and prints the rows so far.
    pub fn begins(&mut self, title: impl Display) -> bool {
        if self.is_interrupted.load(Ordering::SeqCst) {
            IS_STOPPED.store(true, Ordering::SeqCst);
            return false;
        }
        self.progress.begin(title);
        true
    }

    /// Returns the note for the report of a sweep that was stopped.
    pub fn note(&self) -> Option<String> {
        let Progress { begun, runs, .. } = self.progress;
        is_stopped().then(|| format!("Stopped by Ctrl-C after {begun} of {runs} runs."))
    }
}

/// Returns whether Ctrl-C stopped a sweep of this program.
pub fn is_stopped() -> bool {
    IS_STOPPED.load(Ordering::SeqCst)
}

/// Prints that a file was written.
pub fn wrote(path: &std::path::Path) {
    print_progress(format_args!("wrote {}", path.display()));
}
