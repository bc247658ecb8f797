//! The heartbeat: a thread that tells rank 0 what this rank is in, and hears of failures.

use crate::Result;
use crate::distributed::store::{
    Connection, Doing, ENDED, Failure, LEFT, Reply, Request, SILENT, locked, seconds,
};
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the last words of a rank may take: that it fails, or leaves.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);

/// Times, which tests shorten.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// For how long a rank may be in an operation.
    pub(super) timeout: Duration,
    /// From one heartbeat to the next.
    pub(super) interval: Duration,
    /// A heartbeat older than this is a sign of trouble, where ranks wait for too long.
    pub(super) silence: Duration,
}

impl Pace {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            interval: Duration::from_millis(250),
            silence: Duration::from_secs(5),
        }
    }
}

/// What the heartbeat's thread and the others look at.
pub(super) struct Shared {
    rank: usize,
    pub(super) pace: Pace,
    has_failed: AtomicBool,
    pub(super) state: Mutex<State>,
    changed: Condvar,
}

type Hook = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(super) struct State {
    pub(super) failure: Option<Failure>,
    /// The failure, while rank 0 does not know of it.
    untold: Option<Failure>,
    pub(super) hooks: Vec<Hook>,
    /// How many operations of all ranks, and how many of any, this rank has begun.
    entered: u64,
    opened: u64,
    /// What it is in, the oldest first.
    open: Vec<Open>,
    last: Option<Open>,
    /// When the heartbeat's thread ran last.
    ran: Option<Instant>,
    is_leaving: bool,
    /// The heartbeat's thread has ended, or there is none.
    pub(super) has_ended: bool,
}

#[derive(Clone)]
struct Open {
    id: u64,
    what: String,
    /// Among the operations of all ranks, from 1; 0 if it is of some ranks only.
    number: u64,
    since: Instant,
}

/// A rank is in an operation while this lives, and the time counts against the timeout.
#[must_use = "the time counts while it lives"]
pub struct Watch<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        locked(&self.shared.state)
            .open
            .retain(|open| open.id != self.id);
    }
}

impl State {
    pub(super) fn doing(&self) -> Doing {
        let open = self.open.first();
        let shown = open.or(self.last.as_ref());
        Doing {
            entered: self.entered,
            what: shown.map_or_else(String::new, |open| open.what.clone()),
            number: shown.map_or(0, |open| open.number),
            inside: open.map(|open| open.since.elapsed()),
        }
    }
}

impl State {
    /// When the operation began that this rank is in.
    #[cfg(test)]
    pub(super) fn doing_since(&self) -> Option<Instant> {
        self.open.first().map(|open| open.since)
    }

    /// Notes that this process runs. Time in which it was stopped does not count as waiting for others: they may have
    /// been stopped with it, and done nothing wrong.
    pub(super) fn run(&mut self, now: Instant, silence: Duration) {
        let gap = self.ran.map(|ran| now.saturating_duration_since(ran));
        self.ran = Some(now);
        if let Some(gap) = gap.filter(|gap| *gap > silence) {
            for open in &mut self.open {
                open.since = (open.since + gap).min(now);
            }
        }
    }
}

impl Shared {
    pub(super) fn new(rank: usize, pace: Pace) -> Self {
        let (has_failed, changed) = (AtomicBool::new(false), Condvar::new());
        Self {
            rank,
            pace,
            has_failed,
            state: Mutex::default(),
            changed,
        }
    }

    pub(super) fn enter(&self, what: &str, is_of_all: bool) -> Watch<'_> {
        let mut state = locked(&self.state);
        state.entered += u64::from(is_of_all);
        state.opened += 1;
        let (id, number) = (state.opened, if is_of_all { state.entered } else { 0 });
        let (what, since) = (what.to_owned(), Instant::now());
        let open = Open {
            id,
            what,
            number,
            since,
        };
        state.open.push(open.clone());
        state.last = Some(open);
        Watch { shared: self, id }
    }

    pub(super) fn check(&self) -> Result<()> {
        if !self.has_failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let failure = locked(&self.state).failure.clone();
        failure.map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Has a failure kept, if it is the first here. Returns what is to be called then, outside the lock.
    pub(super) fn keep(&self, failure: &Failure) -> Option<Vec<Hook>> {
        let mut state = locked(&self.state);
        if state.failure.is_some() {
            return None;
        }
        state.failure = Some(failure.clone());
        self.has_failed.store(true, Ordering::Release);
        Some(std::mem::take(&mut state.hooks))
    }

    /// The job's first failure, which may not be this rank's.
    pub(super) fn replace(&self, first: Failure) {
        locked(&self.state).failure = Some(first);
    }

    /// Has the heartbeat's thread tell rank 0 of a failure.
    pub(super) fn tell(&self, failure: Failure) {
        locked(&self.state).untold = Some(failure);
        self.wait(LAST_WORDS, |state| state.untold.is_some());
    }

    /// Has the heartbeat's thread say goodbye. It is not joined: a hook may hang there, and a process must end.
    pub(super) fn leave(&self) {
        locked(&self.state).is_leaving = true;
        self.wait(2 * LAST_WORDS, |_| true);
    }

    /// Wakes the heartbeat's thread, and waits while it lives and has not done what it is to do.
    fn wait(&self, most: Duration, is_undone: impl Fn(&State) -> bool) {
        self.changed.notify_all();
        let goes_on = |state: &mut State| !state.has_ended && is_undone(state);
        drop(
            self.changed
                .wait_timeout_while(locked(&self.state), most, goes_on),
        );
    }

    fn hear(&self, failure: Failure) {
        for hook in self.keep(&failure).into_iter().flatten() {
            hook();
        }
    }

    /// What the heartbeat's thread does until this rank leaves.
    pub(super) fn beat(&self, mut connection: Connection) {
        let mut rank_0_left = None;
        loop {
            let sleeps = |state: &mut State| !state.is_leaving && state.untold.is_none();
            let woken =
                self.changed
                    .wait_timeout_while(locked(&self.state), self.pace.interval, sleeps);
            let (mut state, _) = woken.unwrap_or_else(PoisonError::into_inner);
            state.run(Instant::now(), self.pace.silence);
            let untold = state.untold.clone();
            let (is_leaving, has_failed, doing) =
                (state.is_leaving, state.failure.is_some(), state.doing());
            drop(state);
            if let Some(failure) = untold {
                if let Some(first) = tell(&mut connection, failure) {
                    self.replace(first);
                }
                locked(&self.state).untold = None;
                self.changed.notify_all();
            } else if is_leaving {
                break say_goodbye(connection, doing);
            } else if has_failed {
                // There is nothing more to say but goodbye.
            } else if let Some(entered) = rank_0_left {
                self.beat_alone(entered, &doing);
            } else {
                rank_0_left = self.beat_once(&mut connection, doing);
            }
        }
        locked(&self.state).has_ended = true;
        self.changed.notify_all();
    }

    /// Has rank 0 know what this one is doing. Returns how many operations rank 0 has begun, if it has left.
    fn beat_once(&self, connection: &mut Connection, doing: Doing) -> Option<u64> {
        let asked = Instant::now();
        let overdue = self.is_overdue(&doing);
        let beat = Request::Beat { doing, overdue }.encode();
        // What cannot be sent shows when the answer is read, behind what rank 0 said before it ended.
        let _ = connection.send(&beat);
        let answer = connection.frame(|| {
            let mut state = locked(&self.state);
            state.run(Instant::now(), self.pace.silence);
            let is_lost = asked.elapsed() > self.pace.silence && self.is_overdue(&state.doing());
            !(is_lost || state.is_leaving || state.failure.is_some())
        });
        let (problem, hint) = match answer.as_ref().map(|frame| Reply::decode(frame)) {
            Ok(Some(Reply::Done)) => return None,
            Ok(Some(Reply::Left { entered })) => return Some(entered),
            Ok(Some(Reply::Failed(failure))) => {
                self.hear(failure);
                return None;
            }
            // If it was given up for another reason, this is not kept: there is a failure, or nobody to hear of it.
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                let time = seconds(asked.elapsed());
                (format!("has not been heard of for {time}"), SILENT)
            }
            Ok(_) => ("answers a heartbeat as no store does".into(), ENDED),
            Err(_) => ("its process has ended".into(), ENDED),
        };
        if !locked(&self.state).is_leaving {
            self.hear(Failure::new(0, "its own work", problem, hint));
        }
        None
    }

    /// Without rank 0 what it has not begun never ends.
    fn beat_alone(&self, rank_0_entered: u64, doing: &Doing) {
        let is_missed = rank_0_entered < doing.entered && doing.inside > Some(self.pace.silence);
        if is_missed || self.is_overdue(doing) {
            let problem = format!("has left; rank {} waits in {doing}", self.rank);
            self.hear(Failure::new(0, "its own work", problem, LEFT));
        }
    }

    fn is_overdue(&self, doing: &Doing) -> bool {
        doing.inside > Some(self.pace.timeout)
    }
}

/// Tells rank 0 of a failure. Returns the job's first, unless rank 0 does not answer.
fn tell(connection: &mut Connection, failure: Failure) -> Option<Failure> {
    let began = Instant::now();
    let _ = connection.send(&Request::Fail(failure).encode()); // as in `beat_once`
    loop {
        let frame = connection.frame(|| began.elapsed() < LAST_WORDS).ok()?;
        if let Reply::Failed(first) = Reply::decode(&frame)? {
            return Some(first);
        }
        // The answer to a heartbeat before.
    }
}

/// Without it the connection's end is a failure. Waits for rank 0 to read it.
fn say_goodbye(mut connection: Connection, doing: Doing) {
    let began = Instant::now();
    if connection.send(&Request::Goodbye(doing).encode()).is_ok() {
        while connection.frame(|| began.elapsed() < LAST_WORDS).is_ok() {}
    }
}
