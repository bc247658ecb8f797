//! The heartbeat: a thread that reports this rank's activity to rank 0, and receives failures.

use super::roll::{ENDED, Failure, LEFT, Pace, Progress, SILENT, seconds};
use super::wire::{Connection, Message, TICK};
use crate::Result;
use crate::distributed::locked;
use std::io::ErrorKind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time for a rank's last message: that it fails, or leaves.
pub(super) const LAST_MESSAGE: Duration = Duration::from_secs(1);

/// State shared by the heartbeat thread and the other threads.
pub(super) struct Shared {
    rank: usize,
    pub(super) pace: Pace,
    has_failed: AtomicBool,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) failure: Option<Failure>,
    /// Whether the failure is the job's first, as reported by rank 0, or rank 0's own.
    pub(super) is_known: bool,
    /// Called when a failure becomes known.
    pub(super) hooks: Vec<Box<dyn FnOnce() + Send>>,
    /// The text that rank 0 sends to all ranks once they have joined.
    pub(super) welcome: Option<String>,
    /// Number of operations of all ranks, and of operations of any kind, that this rank has begun.
    entered: u64,
    opened: u64,
    /// The operations that this rank is in, the oldest first.
    open: Vec<Open>,
    last: Option<Open>,
    /// The last time at which the heartbeat thread ran.
    ran: Option<Instant>,
    pub(super) is_leaving: bool,
    /// Whether the heartbeat thread has ended or never started.
    pub(super) has_ended: bool,
}

#[derive(Clone)]
struct Open {
    id: u64,
    what: String,
    /// Number among the operations of all ranks, from 1; 0 for an operation of some ranks only.
    number: u64,
    since: Instant,
}

/// Guard: while it is alive, the job's timeout applies to what this rank waits for.
///
/// [`Communicator::apply_timeout`](crate::distributed::Communicator::apply_timeout) creates it and lists the calls that
/// need none.
#[must_use = "the timeout applies until this is dropped"]
pub struct TimeoutGuard<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for TimeoutGuard<'_> {
    fn drop(&mut self) {
        let mut state = locked(&self.shared.state);
        state.open.retain(|open| open.id != self.id);
    }
}

impl State {
    pub(super) fn progress(&self) -> Progress {
        let open = self.open.first();
        let shown = open.or(self.last.as_ref());
        Progress {
            entered: self.entered,
            what: shown.map_or_else(String::new, |open| open.what.clone()),
            number: shown.map_or(0, |open| open.number),
            inside: open.map(|open| open.since.elapsed()),
        }
    }

    /// Records that this process is running. Time in which it was stopped does not count as waiting for others, which
    /// may have been stopped with it.
    pub(super) fn run(&mut self, now: Instant, silence: Duration) {
        let ran = self.ran.replace(now);
        let gap = ran.map_or(Duration::ZERO, |ran| now.saturating_duration_since(ran));
        if gap > silence {
            for open in &mut self.open {
                open.since = (open.since + gap).min(now);
            }
        }
    }

    /// Returns the time at which the oldest open operation began.
    #[cfg(test)]
    pub(super) fn oldest_since(&self) -> Option<Instant> {
        self.open.first().map(|open| open.since)
    }
}

impl Shared {
    pub(super) fn new(rank: usize, pace: Pace) -> Self {
        Self {
            rank,
            pace,
            has_failed: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    pub(super) fn enter(&self, what: &str, is_of_all: bool) -> TimeoutGuard<'_> {
        let mut state = locked(&self.state);
        state.entered += u64::from(is_of_all);
        state.opened += 1;
        let open = Open {
            id: state.opened,
            what: as_field(what),
            number: if is_of_all { state.entered } else { 0 },
            since: Instant::now(),
        };
        state.open.push(open.clone());
        state.last = Some(open);
        TimeoutGuard {
            shared: self,
            id: state.opened,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        if !self.has_failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let failure = locked(&self.state).failure.clone();
        failure.map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Records a failure of this rank, unless there is one already, and waits until rank 0 knows of it. The heartbeat
    /// thread reports it to rank 0, which answers with the job's first failure.
    pub(super) fn declare(&self, failure: Failure) {
        let hooks = {
            let mut state = locked(&self.state);
            if state.failure.is_some() {
                return;
            }
            state.failure = Some(failure);
            std::mem::take(&mut state.hooks)
        };
        self.has_failed.store(true, Ordering::Release);
        self.wait(LAST_MESSAGE, |state| state.is_known);
        hooks.into_iter().for_each(|hook| hook());
    }

    /// Records the job's first failure.
    fn receive_failure(&self, failure: Failure) {
        let hooks = {
            let mut state = locked(&self.state);
            if std::mem::replace(&mut state.is_known, true) {
                return;
            }
            state.failure = Some(failure);
            std::mem::take(&mut state.hooks)
        };
        self.has_failed.store(true, Ordering::Release);
        hooks.into_iter().for_each(|hook| hook());
    }

    /// Waits until `is_done` or the end of the heartbeat thread, for at most `left`. Only time in which this process
    /// runs counts: while it is stopped it receives nothing.
    pub(super) fn wait(&self, mut left: Duration, is_done: impl Fn(&State) -> bool) {
        const POLL: Duration = Duration::from_millis(5);
        let is_over = || {
            let state = locked(&self.state);
            state.has_ended || is_done(&state)
        };
        while !left.is_zero() && !is_over() {
            thread::sleep(POLL);
            left = left.saturating_sub(POLL);
        }
    }

    /// Makes the heartbeat thread say goodbye. It is not joined, since a hook may hang there and a process must end.
    pub(super) fn leave(&self) {
        locked(&self.state).is_leaving = true;
        self.wait(2 * LAST_MESSAGE, |_| false);
    }

    pub(super) fn beat(&self, connection: Connection) {
        let mut hub = Some(connection);
        let mut rank_0_left = None;
        let (mut asked, mut is_answered, mut is_declared) = (Instant::now(), true, false);
        loop {
            let (progress, has_failed, unknown, is_leaving) = {
                let mut state = locked(&self.state);
                state.run(Instant::now(), self.pace.silence);
                let unknown = state.failure.clone().filter(|_| !state.is_known);
                (
                    state.progress(),
                    state.failure.is_some(),
                    unknown,
                    state.is_leaving,
                )
            };
            let Some(connection) = hub.as_mut().filter(|_| !is_leaving) else {
                if is_leaving {
                    break;
                }
                self.beat_without_hub(rank_0_left, &progress);
                thread::sleep(TICK);
                continue;
            };
            // A failed send shows at the next read, after the last messages of rank 0.
            if let Some(failure) = unknown.filter(|_| !std::mem::replace(&mut is_declared, true)) {
                let _ = connection.send(&Message::Failure(failure));
            } else if !has_failed && is_answered && asked.elapsed() >= self.pace.interval {
                (asked, is_answered) = (Instant::now(), false);
                let _ = connection.send(&Message::Beat(progress.clone()));
            }
            let is_silent = !is_answered && asked.elapsed() > self.pace.silence;
            let mut lost = None;
            match connection.receive() {
                Ok(Some(Message::Ack)) => is_answered = true,
                Ok(Some(Message::Welcome(welcome))) => locked(&self.state).welcome = Some(welcome),
                Ok(Some(Message::Failure(failure))) => self.receive_failure(failure),
                Ok(Some(Message::Left(entered))) => (rank_0_left, hub) = (Some(entered), None),
                Ok(None) if is_silent && self.is_overdue(&progress) => {
                    let time = seconds(asked.elapsed());
                    lost = Some((format!("has not been heard of for {time}"), SILENT));
                }
                Ok(None) => {}
                Err(error) if error.kind() != ErrorKind::InvalidData => {
                    lost = Some(("its process has ended".into(), ENDED));
                }
                _ => lost = Some(("sent an unexpected message".into(), ENDED)),
            }
            if let Some((problem, hint)) = lost {
                hub = None;
                self.receive_failure(Failure::new(0, "its own work", problem, hint));
            }
        }
        if let Some(connection) = hub {
            say_goodbye(connection, locked(&self.state).progress());
        }
        locked(&self.state).has_ended = true;
    }

    /// Fails operations that rank 0 can no longer end, after it has left: those with a number that rank 0 had not
    /// begun, and overdue ones.
    fn beat_without_hub(&self, rank_0_left: Option<u64>, progress: &Progress) {
        let is_missed =
            rank_0_left < Some(progress.entered) && progress.inside > Some(self.pace.silence);
        if rank_0_left.is_some() && (is_missed || self.is_overdue(progress)) {
            let problem = format!("has left; rank {} waits in {progress}", self.rank);
            self.receive_failure(Failure::new(0, "its own work", problem, LEFT));
        }
    }

    fn is_overdue(&self, progress: &Progress) -> bool {
        progress.inside > Some(self.pace.timeout)
    }
}

/// Returns the beginning of a text, without the separators of messages.
fn as_field(text: &str) -> String {
    let letters = text.chars().take(256);
    letters
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Sends the goodbye, without which the connection's end is a failure, and waits for rank 0 to read it.
fn say_goodbye(mut connection: Connection, progress: Progress) {
    let began = Instant::now();
    let _ = connection.send(&Message::Goodbye(progress));
    while began.elapsed() < LAST_MESSAGE && connection.receive().is_ok() {}
}
