//! Taking ranges down as they come.

use super::recording::{OperandShape, Recording, Span};
use crate::memory::tracker;
use crate::probe::{self, Event, Kind, Listener, Listening};
use crate::{Error, Result};
use candle_core::Device;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

/// Whether a profiler runs.
static RUNNING: AtomicBool = AtomicBool::new(false);

/// A profiler at work: it takes down every range of the process, or of one thread, until it is
/// [finished](Self::finish).
///
/// One runs at a time. Each range costs about a microsecond while it does, and a few hundred bytes: a step of a model
/// of a dozen layers is some hundred ranges, so record a handful of steps, not a day.
///
/// Start it after the warm-up, or the warm-up's steps are in the recording.
#[must_use = "nothing is recorded once it is dropped"]
pub struct Profiler {
    recorder: Arc<Recorder>,
    listening: Listening,
    _alone: Alone,
}

/// The right to be the only one.
struct Alone;

impl Drop for Alone {
    fn drop(&mut self) {
        RUNNING.store(false, Ordering::Release);
    }
}

impl Profiler {
    /// Starts to record all threads.
    ///
    /// # Errors
    /// [`Error::Order`] if another profiler runs.
    pub fn start() -> Result<Self> {
        Self::start_for(None, None)
    }

    /// Starts to record all threads, and waits for `device` where a range begins and where it ends: what is launched in
    /// a range counts as its time, not as the next one's that waits. Steps take longer so, by a wait for each range,
    /// and launches no longer overlap with work. On the CPU, as [`start`](Self::start).
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_on(device: &Device) -> Result<Self> {
        Self::start_for(None, Some(device).filter(|device| !device.is_cpu()))
    }

    /// Starts to record the calling thread alone, whatever others do meanwhile.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_on_this_thread() -> Result<Self> {
        Self::start_for(Some(thread::current().id()), None)
    }

    fn start_for(only: Option<ThreadId>, awaited: Option<&Device>) -> Result<Self> {
        if RUNNING.swap(true, Ordering::AcqRel) {
            return Err(Error::Order {
                op: "Profiler::start",
                problem: "another profiler is running".into(),
                hint: "finish or drop that one first; one recording can be reported in many ways"
                    .into(),
            });
        }
        let alone = Alone;
        let recorder = Arc::new(Recorder {
            start: Instant::now(),
            only,
            awaited: awaited.cloned(),
            state: Mutex::default(),
        });
        Ok(Self {
            listening: probe::listen(recorder.clone()),
            recorder,
            _alone: alone,
        })
    }

    /// Stops, and gives what was recorded. Ranges that are still open end here.
    ///
    /// # Errors
    /// [`Error::Order`], naming both, if a range ended before one inside of it: no sum of times would mean anything.
    pub fn finish(self) -> Result<Recording> {
        drop(self.listening);
        let duration_ns = nanoseconds(self.recorder.start, Instant::now());
        let mut state = std::mem::take(&mut *self.recorder.state());
        if let Some((ended, inside)) = state.disorder {
            return Err(Error::Order {
                op: "Profiler::finish",
                problem: format!(
                    "range {ended} ended while {inside}, inside of it, was still open"
                ),
                hint:
                    "drop ranges in the opposite order of opening them; a block around each does it"
                        .into(),
            });
        }
        for thread in &state.threads {
            for &open in &thread.open {
                state.spans[open].end_ns = duration_ns;
            }
        }
        let names = state.threads.into_iter().map(|thread| thread.name);
        Ok(Recording {
            spans: state.spans,
            threads: names.collect(),
            duration_ns,
        })
    }
}

/// What listens.
struct Recorder {
    start: Instant,
    only: Option<ThreadId>,
    /// The device that is waited for.
    awaited: Option<Device>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    spans: Vec<Span>,
    threads: Vec<Thread>,
    numbers: HashMap<ThreadId, usize>,
    /// The first range that ended too early, and the one inside of it.
    disorder: Option<(String, String)>,
}

struct Thread {
    name: String,
    /// Spans that have not ended, the innermost last.
    open: Vec<usize>,
}

impl State {
    /// The calling thread's number.
    fn thread(&mut self) -> usize {
        let thread = thread::current();
        *self.numbers.entry(thread.id()).or_insert_with(|| {
            let number = self.threads.len();
            let name = match thread.name() {
                Some(name) => name.to_string(),
                None => format!("thread {number}"),
            };
            let open = Vec::new();
            self.threads.push(Thread { name, open });
            number
        })
    }
}

fn nanoseconds(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(u64::MAX)
}

impl Recorder {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When a range begins or ends, in ns from the start: once the device has come that far.
    fn moment_ns(&self, event: &Event<'_>) -> u64 {
        let at = match &self.awaited {
            None => event.at,
            Some(device) => {
                let _ = device.synchronize(); // an error there is the next op's to report
                Instant::now()
            }
        };
        nanoseconds(self.start, at)
    }

    fn hears(&self) -> bool {
        self.only.is_none_or(|only| thread::current().id() == only)
    }
}

impl Listener for Recorder {
    fn entered(&self, event: &Event<'_>) {
        if !self.hears() {
            return;
        }
        let at_ns = self.moment_ns(event);
        let mut state = self.state();
        let thread = state.thread();
        let span = Span {
            kind: event.kind,
            path: event.path,
            phase: event.phase,
            thread,
            start_ns: at_ns,
            end_ns: at_ns,
            parent: state.threads[thread].open.last().copied(),
            inputs: Vec::new(),
            output: None,
            cost: None,
            allocated_bytes: None,
        };
        let number = state.spans.len();
        state.spans.push(span);
        state.threads[thread].open.push(number);
    }

    fn left(&self, event: &Event<'_>) {
        if !self.hears() {
            return;
        }
        let at_ns = self.moment_ns(event);
        let mut state = self.state();
        let thread = state.thread();
        let state = &mut *state;
        let open = &mut state.threads[thread].open;
        let is_it = |span: &Span| {
            let same = span.kind == event.kind && span.path == event.path;
            same && (event.kind != Kind::Phase || span.phase == event.name)
        };
        let Some(place) = open.iter().rposition(|&i| is_it(&state.spans[i])) else {
            return; // it began before the recording
        };
        let inside = open.get(place + 1).copied();
        let number = open.remove(place);
        if let (Some(inside), None) = (inside, &state.disorder) {
            let names = [number, inside].map(|i| state.spans[i].title());
            let [ended, inside] = names;
            state.disorder = Some((ended, inside));
        }
        let span = &mut state.spans[number];
        span.end_ns = at_ns;
        span.allocated_bytes = tracker::current_bytes();
        if let Some(operands) = &event.operands {
            span.inputs = operands.inputs.iter().map(OperandShape::of).collect();
            span.output = Some(OperandShape::of(&operands.output));
        }
        span.cost = event.cost;
    }
}
