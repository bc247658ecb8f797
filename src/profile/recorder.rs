//! Ranges as they come.

use super::gpu;
use super::recording::{OperandShape, Span};
use crate::memory::tracker;
use crate::probe::{Event, Kind, Listener};
use candle_core::Device;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

/// What listens.
pub(super) struct Recorder {
    pub start: Instant,
    pub only: Option<ThreadId>,
    /// The device that is waited for at every range.
    pub awaited: Option<Device>,
    /// The one whose kernels are recorded.
    pub gpu: Option<gpu::Watch>,
    pub state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub spans: Vec<Span>,
    pub threads: Vec<Thread>,
    pub numbers: HashMap<ThreadId, usize>,
    /// By the range that replays: the op of each kernel.
    pub replayed: BTreeMap<usize, Vec<usize>>,
    /// The first range that ended too early, and the one inside of it.
    pub disorder: Option<(String, String)>,
}

pub(super) struct Thread {
    pub name: String,
    /// Spans that have not ended, the innermost last.
    pub open: Vec<usize>,
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

pub(super) fn nanoseconds(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(u64::MAX)
}

impl Recorder {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When a range begins or ends, in ns from the start: once the device has come that far, where it is waited for.
    fn moment_ns(&self, event: &Event<'_>) -> u64 {
        let is_frame = matches!(event.kind, Kind::Phase | Kind::Step);
        let at = match (&self.awaited, &self.gpu) {
            (Some(device), _) => {
                let _ = device.synchronize(); // an error there is the next op's to report
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
        if let Some(gpu) = &self.gpu {
            gpu.leave();
        }
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
        span.parts = event.parts;
    }

    fn takes_replays(&self) -> bool {
        self.gpu.is_some()
    }

    fn replayed(&self, ops: usize, kernels: &[usize]) {
        let mut state = self.state();
        let thread = state.thread();
        let Some(&around) = state.threads[thread].open.last() else {
            return;
        };
        let spans = state.spans.iter().enumerate().skip(around);
        let inside = spans.filter(|(_, span)| span.parent == Some(around));
        let inside: Vec<usize> = inside.map(|(number, _)| number).collect();
        let Some(first) = inside.len().checked_sub(ops) else {
            return; // some were before the recording
        };
        let of_kernels = kernels.iter().map(|op| inside[first + op]);
        state.replayed.entry(around).or_default().extend(of_kernels);
    }
}
