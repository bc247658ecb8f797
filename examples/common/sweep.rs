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

/// The runs of a benchmark, with their progress.
pub struct Sweep {
    runs: usize,
    begun: usize,
    start: Instant,
    is_shown: bool,
    is_interrupted: Arc<AtomicBool>,
}

impl Sweep {
    /// Creates a sweep of `runs` runs, starting now. The first Ctrl-C ends it after the current run, the second ends
    /// the program.
    ///
    /// # Errors
    /// [`Error::Io`] if no signal handler can be installed.
    pub fn new(runs: usize) -> Result<Self> {
        let sweep = Self::of_rank(runs, true);
        let is_interrupted = &sweep.is_interrupted;
        flag::register_conditional_shutdown(SIGINT, 130, is_interrupted.clone())
            .and_then(|_| flag::register(SIGINT, is_interrupted.clone()))
            .map_err(|e| Error::io("listen to", "Ctrl-C", e))?;
        Ok(sweep)
    }

    /// Creates the sweep of a rank, which Ctrl-C ends at once. One rank of a job shows its progress.
    pub fn of_rank(runs: usize, is_shown: bool) -> Self {
        Self {
            runs,
            is_shown,
            begun: 0,
            start: Instant::now(),
            is_interrupted: Arc::default(),
        }
    }

    /// Begins the next run. Its number, `title` and the time left are printed if stderr is a terminal; the estimate is
    /// the mean time of the runs so far. Returns `false` once Ctrl-C was pressed: the caller then leaves its loop and
    /// prints the rows so far.
    pub fn begins(&mut self, title: impl Display) -> bool {
        if self.is_interrupted.load(Ordering::SeqCst) {
            IS_STOPPED.store(true, Ordering::SeqCst);
            return false;
        }
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
        true
    }

    /// Returns the note for the report of a sweep that was stopped.
    pub fn note(&self) -> Option<String> {
        let (begun, runs) = (self.begun, self.runs);
        is_stopped().then(|| format!("Stopped by Ctrl-C after {begun} of {runs} runs."))
    }
}

/// Returns whether Ctrl-C stopped a sweep of this program.
pub fn is_stopped() -> bool {
    IS_STOPPED.load(Ordering::SeqCst)
}
