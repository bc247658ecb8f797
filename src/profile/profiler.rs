//! The profiler, which records ranges as they are entered and left.

use super::gpu;
use super::recording::{Kernel, OperandShape, Recording, Span};
use crate::memory::tracker;
use crate::probe::{self, Event, Kind, Listener, ListenerGuard};
use crate::{Error, Result};
use candle_core::Device;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

static RUNNING: AtomicBool = AtomicBool::new(false);

/// A running profiler: it records every range of the process, or of one thread, until it is [finished](Self::finish).
///
/// Only one can run at a time. Each range then costs about a microsecond, and a few hundred bytes. A step of a model of
/// a dozen layers has a few hundred ranges, so record a handful of steps, not a day.
///
/// Start it after the warm-up; otherwise the warm-up's steps are in the recording.
#[must_use = "nothing is recorded once it is dropped"]
pub struct Profiler {
    recorder: Arc<Recorder>,
    listening: ListenerGuard,
    _running: Running,
}

struct Running;

impl Running {
    fn new() -> Result<Self> {
        match RUNNING.swap(true, Ordering::AcqRel) {
            false => Ok(Self),
            true => Err(Error::order(
                "Profiler::start",
                "another profiler is running",
                "finish or drop that one first; one recording can be reported in many ways",
            )),
        }
    }
}

impl Drop for Running {
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
        Ok(Self::started(Running::new()?, None, None, None))
    }

    /// Starts to record all threads, and the kernels that run on `device`. On the CPU it is the same as
    /// [`start`](Self::start), on GPUs other than NVIDIA's as [`start_waiting_for`](Self::start_waiting_for).
    ///
    /// On an NVIDIA GPU [`Recording::kernels`] has every kernel with the range that launched it, as CUPTI reports
    /// afterwards. Launches overlap with work as they do without a profiler, but the host needs longer for a launch: a
    /// GPU that waits for the host is idle for longer than without a profiler. The
    /// profiler waits for the GPU where phases and steps begin and end, as stopwatches do, so that each has its own
    /// kernels. CUPTI is a library of the CUDA toolkit and is loaded here.
    ///
    /// Without a profiler a planned step is one CUDA graph. With it, every sequence of calls in the same phase is a
    /// graph; a phase has several of them if calls of another phase come between. The first step with a profiler
    /// captures these graphs, which takes longer. [`Step::time_phases`](crate::compile::Step::time_phases) uses the
    /// same graphs: a warm-up with it captures them before the profile begins.
    ///
    /// # Errors
    /// [`Error::Order`] if another profiler runs, or if CUPTI is not found, or another tool in this process uses it.
    pub fn start_on(device: &Device) -> Result<Self> {
        if device.is_metal() {
            return Self::start_waiting_for(device);
        }
        let running = Running::new()?;
        Ok(Self::started(running, None, None, gpu::start(device)?))
    }

    /// Starts to record all threads, and waits for `device` where a range begins and ends, so that the time of work
    /// launched in a range counts for that range. Each range then costs a wait, and launches no longer overlap with
    /// work. On the CPU it is the same as [`start`](Self::start).
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn start_waiting_for(device: &Device) -> Result<Self> {
        let synchronized = Some(device.clone()).filter(|device| !device.is_cpu());
        Ok(Self::started(Running::new()?, None, synchronized, None))
    }

    /// Starts to record the calling thread only.
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn start_on_this_thread() -> Result<Self> {
        let only = Some(thread::current().id());
        Ok(Self::started(Running::new()?, only, None, None))
    }

    fn started(
        running: Running,
        only: Option<ThreadId>,
        synchronized: Option<Device>,
        gpu: Option<gpu::Collector>,
    ) -> Self {
        let recorder = Arc::new(Recorder {
            start: Instant::now(),
            only,
            synchronized,
            gpu,
            state: Mutex::default(),
        });
        Self {
            listening: probe::listen(recorder.clone()),
            recorder,
            _running: running,
        }
    }

    /// Stops and returns the recording. Ranges that are still open end here.
    ///
    /// # Errors
    /// [`Error::Order`], with both names, if a range ended before one inside of it, which makes sums of times
    /// meaningless. On a GPU also the errors of CUDA and CUPTI.
    pub fn finish(self) -> Result<Recording> {
        drop(self.listening);
        let Some(recorder) = Arc::into_inner(self.recorder) else {
            unreachable!("no listener is left");
        };
        if let Some(gpu) = &recorder.gpu {
            gpu.wait();
        }
        let duration_ns = nanoseconds(recorder.start, Instant::now());
        let mut state = recorder
            .state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let mut kernels = match recorder.gpu {
            None => Vec::new(),
            Some(gpu) => gpu.finish(recorder.start)?,
        };
        if let Some([ended, inside]) = state.disorder {
            return Err(Error::order(
                "Profiler::finish",
                format!("range {ended} ended while {inside}, inside of it, was still open"),
                "drop ranges in the opposite order of opening them; a block around each does it",
            ));
        }
        for thread in &state.threads {
            for &open in &thread.open {
                state.spans[open].end_ns = duration_ns;
            }
        }
        let names = state.threads.into_iter().map(|thread| thread.name);
        assign_replayed(&mut kernels, &state.replayed)?;
        assign_unknown(&mut kernels, &state.spans);
        Ok(Recording {
            spans: state.spans,
            kernels,
            threads: names.collect(),
            duration_ns,
        })
    }
}

/// Assigns kernels of unknown launch to the innermost phase or step in which they ran: the profiler waits for the GPU
/// where phases and steps begin and end.
fn assign_unknown(kernels: &mut [Kernel], spans: &[Span]) {
    for kernel in kernels.iter_mut().filter(|kernel| kernel.span.is_none()) {
        let holds = |span: &Span| {
            matches!(span.kind, Kind::Phase | Kind::Step)
                && (span.start_ns..span.end_ns).contains(&kernel.start_ns)
        };
        kernel.span = spans.iter().rposition(holds);
    }
}

/// Assigns the kernels of a replay to its ops: they ran in the order in which they were recorded.
fn assign_replayed(kernels: &mut [Kernel], replayed: &BTreeMap<usize, Vec<usize>>) -> Result<()> {
    for (around, ops) in replayed {
        let launched = kernels.iter_mut();
        let launched = launched.filter(|kernel| kernel.span == Some(*around));
        let launched: Vec<&mut Kernel> = launched.collect();
        if launched.len() != ops.len() {
            return Err(Error::Order {
                op: "Profiler::finish",
                problem: format!(
                    "expected {} kernels of a replay from CUPTI, got {}",
                    ops.len(),
                    launched.len()
                ),
                hint: "use Profiler::start_waiting_for, which has ops launched one by one".into(),
            });
        }
        for (kernel, op) in launched.into_iter().zip(ops) {
            kernel.span = Some(*op);
        }
    }
    Ok(())
}

struct Recorder {
    start: Instant,
    only: Option<ThreadId>,
    /// The device to wait for at every range.
    synchronized: Option<Device>,
    gpu: Option<gpu::Collector>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    spans: Vec<Span>,
    threads: Vec<Thread>,
    numbers: HashMap<ThreadId, usize>,
    /// By the number of the replaying range: the op of each kernel.
    replayed: BTreeMap<usize, Vec<usize>>,
    /// The first range that ended too early, and the range inside of it.
    disorder: Option<[String; 2]>,
}

struct Thread {
    name: String,
    /// Spans that have not ended, the innermost last.
    open: Vec<usize>,
}

impl State {
    fn thread(&mut self) -> usize {
        let thread = thread::current();
        *self.numbers.entry(thread.id()).or_insert_with(|| {
            let number = self.threads.len();
            let name = match thread.name() {
                Some(name) => name.to_string(),
                None => format!("thread {number}"),
            };
            self.threads.push(Thread {
                name,
                open: Vec::new(),
            });
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

    /// Returns the time of an event in ns from the start, after waiting for the device where required.
    fn event_ns(&self, event: &Event<'_>) -> u64 {
        let is_frame = matches!(event.kind, Kind::Phase | Kind::Step);
        let at = match (&self.synchronized, &self.gpu) {
            (Some(device), _) => {
                let _ = device.synchronize(); // errors are reported by the next op
                Instant::now()
            }
            (None, Some(gpu)) if is_frame => {
                gpu.wait();
                Instant::now()
            }
            _ => event.at,
        };
        nanoseconds(self.start, at)
    }

    fn is_recorded_thread(&self) -> bool {
        self.only.is_none_or(|only| thread::current().id() == only)
    }
}

impl Listener for Recorder {
    fn on_enter(&self, event: &Event<'_>) {
        if !self.is_recorded_thread() {
            return;
        }
        let at_ns = self.event_ns(event);
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
            parts: event.parts,
            allocated_bytes: None,
        };
        let number = state.spans.len();
        state.spans.push(span);
        state.threads[thread].open.push(number);
        drop(state);
        if let Some(gpu) = &self.gpu {
            gpu.enter(number);
        }
    }

    fn on_leave(&self, event: &Event<'_>) {
        if !self.is_recorded_thread() {
            return;
        }
        let at_ns = self.event_ns(event);
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
        if let Some(gpu) = &self.gpu {
            gpu.leave();
        }
        let inside = open.get(place + 1).copied();
        let number = open.remove(place);
        if let (Some(inside), None) = (inside, &state.disorder) {
            state.disorder = Some([number, inside].map(|i| state.spans[i].title()));
        }
        let span = &mut state.spans[number];
        span.end_ns = at_ns;
        span.allocated_bytes = tracker::current_bytes();
        if let Some(operands) = &event.operands {
            span.inputs = operands.inputs.iter().map(OperandShape::of).collect();
            span.output = Some(OperandShape::of(&operands.output));
        }
        span.cost = event.cost;
        span.parts = event.parts;
    }

    fn accepts_replays(&self) -> bool {
        self.gpu.is_some()
    }

    fn on_replay(&self, ops: usize, kernels: &[usize]) {
        let mut state = self.state();
        let thread = state.thread();
        let Some(&around) = state.threads[thread].open.last() else {
            return;
        };
        let spans = state.spans.iter().enumerate().skip(around);
        let inside = spans.filter(|(_, span)| span.parent == Some(around));
        let inside: Vec<usize> = inside.map(|(number, _)| number).collect();
        let Some(first) = inside.len().checked_sub(ops) else {
            return; // some ran before the recording
        };
        let of_kernels = kernels.iter().map(|op| inside[first + op]);
        state.replayed.entry(around).or_default().extend(of_kernels);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replayed_kernels_go_to_their_ops_in_order() {
        let kernel = |name: &str, span| Kernel {
            name: name.into(),
            span,
            ..Default::default()
        };
        let recorded = [
            kernel("before", None),
            kernel("a", Some(1)),
            kernel("launched by an op", Some(9)),
            kernel("b", Some(1)),
            kernel("c", Some(4)),
        ];
        let replayed = |first: &[usize]| BTreeMap::from([(1, first.to_vec()), (4, vec![6])]);
        let mut kernels = recorded.clone();
        assign_replayed(&mut kernels, &replayed(&[3, 2])).unwrap();
        let spans = kernels.map(|kernel| kernel.span);
        assert_eq!(spans, [None, Some(3), Some(9), Some(2), Some(6)]);
        let error = assign_replayed(&mut recorded.clone(), &replayed(&[3, 2, 2])).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("expected 3 kernels of a replay from CUPTI, got 2"),
            "{text}"
        );
    }
}
