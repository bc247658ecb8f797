//! Sweeps of runs: progress with the estimated time left, and Ctrl-C, which keeps the rows measured so far.

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
    is_shown: bool,
}

impl Progress {
    /// Creates the progress of `runs` runs, starting now. One rank of a job shows it.
    pub fn new(runs: usize, is_shown: bool) -> Self {
        Self {
            runs,
            is_shown,
            begun: 0,
            start: Instant::now(),
        }
    }

    /// Prints the next run's number, `title` and the time left, if stderr is a terminal. The estimate is the mean time
    /// of the runs so far, for each that is left.
    pub fn begin(&mut self, title: impl Display) {
        let (ended, runs) = (self.begun, self.runs);
        let seconds = self.start.elapsed().as_secs_f64() * (runs as f64 / ended as f64 - 1.0);
        let left = match ended {
            0 => String::new(),
            _ => format!(", about {seconds:.0} s left"),
        };
        self.begun += 1;
        if self.is_shown {
            super::progress(format_args!("[{}/{runs}] {title}{left}", self.begun));
        }
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
        flag::register_conditional_shutdown(SIGINT, 130, is_interrupted.clone())
            .and_then(|_| flag::register(SIGINT, is_interrupted.clone()))
            .map_err(|e| Error::io("listen to", "Ctrl-C", e))?;
        Ok(Self {
            progress: Progress::new(runs, true),
            is_interrupted,
        })
    }

    /// Begins the next run, and prints `title` as progress. Returns `false` once Ctrl-C was pressed: the caller then
    /// leaves its loop and prints the rows so far.
    pub fn begins(&mut self, title: impl Display) -> bool {
        let is_interrupted = self.is_interrupted.load(Ordering::SeqCst);
        match is_interrupted {
            true => IS_STOPPED.store(true, Ordering::SeqCst),
            false => self.progress.begin(title),
        }
        !is_interrupted
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
