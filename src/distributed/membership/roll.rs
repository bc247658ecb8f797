//! The roll of a job: the activity of each rank, and the choice of the rank that failed when others wait.

use super::wire::SEPARATOR;
use crate::Error;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// The most characters of a failure's text.
const MAX_TEXT: usize = 4 << 10;

pub(super) const ENDED: &str = "see its own output or the system's log (killed by the out-of-memory killer?); start the job again";
pub(super) const LEFT: &str =
    "do all ranks take the same number of steps? see the output of one that ends early";
pub(super) const SILENT: &str =
    "is the process stopped, or its host out of reach? start the job again";
const MISSING: &str = "are all processes started, with this WORLD_SIZE? see their own output";
const BEHIND: &str =
    "do all ranks take the same steps, and is this one only slow? then set a longer timeout";
const STUCK: &str = "is a network between the hosts stuck, or a GPU? if an operation may take so long, set a longer \
                     timeout";

/// Time limits, which tests shorten.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// The longest time that a rank may be in an operation.
    pub timeout: Duration,
    /// Time between two heartbeats.
    pub interval: Duration,
    /// The age from which a heartbeat is suspicious if ranks wait for too long; also the longest wait for a rank that
    /// has left.
    pub silence: Duration,
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

/// The operation that a rank is in, and its progress.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Number of operations of all ranks that it has begun.
    pub entered: u64,
    /// The oldest operation that it is in; outside of operations, its last one.
    pub what: String,
    /// Its number among the operations of all ranks, from 1; 0 for an operation of some ranks only.
    pub number: u64,
    /// Time since its begin; `None` outside of operations.
    pub inside: Option<Duration>,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.inside, self.what.as_str()) {
            (None, "") => return f.write_str("its own work"),
            (None, _) => f.write_str("its own work after ")?,
            (Some(_), _) => {}
        }
        f.write_str(&self.what)?;
        match self.number {
            0 => Ok(()),
            number => write!(f, " (operation {number})"),
        }
    }
}

/// The reason why the job cannot continue, and the rank that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub rank: usize,
    /// The operation, the problem, and a hint.
    pub texts: [String; 3],
}

impl Failure {
    pub(super) fn new(
        rank: usize,
        during: impl ToString,
        problem: impl ToString,
        hint: impl ToString,
    ) -> Self {
        let cut = |text: String| match text.char_indices().nth(MAX_TEXT) {
            Some((end, _)) => format!("{}...", &text[..end]),
            None => text,
        };
        let texts = [during.to_string(), problem.to_string(), hint.to_string()];
        let texts = texts.map(|text| cut(text.replace(SEPARATOR, " ")));
        Self { rank, texts }
    }
}

impl From<Failure> for Error {
    fn from(Failure { rank, texts }: Failure) -> Self {
        let [during, problem, hint] = texts;
        Self::Rank {
            rank,
            during,
            problem,
            hint,
        }
    }
}

/// A rank that joined. Its place is never free again: a process that joins later would not know the job's state.
struct Member {
    progress: Progress,
    /// Time of its last heartbeat.
    last_beat: Instant,
    /// Whether its last heartbeat reported an overdue wait.
    is_overdue: bool,
    has_left: bool,
}

/// The hub's knowledge of all ranks.
pub(super) struct Roll {
    world_size: usize,
    pace: Pace,
    members: BTreeMap<usize, Member>,
    failure: Option<Failure>,
}

impl Roll {
    pub(super) fn new(world_size: usize, pace: Pace) -> Self {
        let (members, failure) = (BTreeMap::new(), None);
        Self {
            world_size,
            pace,
            members,
            failure,
        }
    }

    /// Admits a rank; returns whether its place was free.
    pub(super) fn admit(&mut self, rank: usize, now: Instant) -> bool {
        let is_free = !self.members.contains_key(&rank);
        self.members.entry(rank).or_insert(Member {
            progress: Progress::default(),
            last_beat: now,
            is_overdue: false,
            has_left: false,
        });
        is_free
    }

    pub(super) fn is_complete(&self) -> bool {
        self.members.len() == self.world_size
    }

    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Records a failure, unless there is one: later failures follow from the first.
    pub(super) fn declare(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    /// Records a heartbeat. The second overdue one in a row declares a failure. If rank 0 was stopped, it learns
    /// between the two of ranks that ended or continued meanwhile, and judges by the current state.
    pub(super) fn beat(&mut self, rank: usize, progress: Progress, now: Instant) {
        let Some(member) = self.members.get_mut(&rank) else {
            return;
        };
        let was_stopped = now.saturating_duration_since(member.last_beat) > self.pace.silence;
        let was_overdue = member.is_overdue && !was_stopped;
        member.is_overdue = progress.inside > Some(self.pace.timeout);
        member.last_beat = now;
        member.progress = progress;
        let is_certain = was_overdue && member.is_overdue;
        let failure = self.waits_for_left(rank);
        let failure = failure.or_else(|| is_certain.then(|| self.culprit(rank, now))?);
        failure
            .into_iter()
            .for_each(|failure| self.declare(failure));
    }

    pub(super) fn leave(&mut self, rank: usize, progress: Progress) {
        if let Some(member) = self.members.get_mut(&rank) {
            member.progress = progress;
            member.has_left = true;
        }
    }

    /// Records the end of a rank's connection without a goodbye, which is a failure.
    pub(super) fn end(&mut self, rank: usize, problem: &str) {
        let progress = self
            .members
            .get(&rank)
            .map(|member| member.progress.clone());
        self.declare(Failure::new(
            rank,
            progress.unwrap_or_default(),
            problem,
            ENDED,
        ));
    }

    /// Returns the number of operations of all ranks that the rank has begun.
    pub(super) fn entered(&self, rank: usize) -> u64 {
        let member = self.members.get(&rank);
        member.map_or(0, |member| member.progress.entered)
    }

    /// Returns the failure of a rank that left before an operation that `rank` waits in, which therefore never ends.
    /// This is known after some seconds, before the timeout.
    fn waits_for_left(&self, rank: usize) -> Option<Failure> {
        let waiting = &self.members.get(&rank)?.progress;
        let is_waiting = waiting.inside? > self.pace.silence;
        self.left(rank, |left| {
            is_waiting && left.progress.entered < waiting.entered
        })
    }

    /// Finds the rank that `asker` waits for too long.
    fn culprit(&self, asker: usize, now: Instant) -> Option<Failure> {
        let mut missing = (0..self.world_size).filter(|rank| !self.members.contains_key(rank));
        if let Some(first) = missing.next() {
            let mut problem = format!("has not joined within {}", seconds(self.pace.timeout));
            let others: Vec<_> = missing.take(16).map(|rank| rank.to_string()).collect();
            if !others.is_empty() {
                problem += &format!(", nor has {} of {}", others.join(", "), self.world_size);
            }
            return Some(Failure::new(first, "rendezvous", problem, MISSING));
        }
        let asking = self.members.get(&asker)?;
        let present = || self.members.iter().filter(|(_, member)| !member.has_left);
        let silence = |member: &Member| now.saturating_duration_since(member.last_beat);
        let (rank, silent) = present().max_by_key(|(_, member)| silence(member))?;
        if silence(silent) > self.pace.silence {
            let problem = format!("has not been heard of for {}", seconds(silence(silent)));
            return Some(Failure::new(*rank, &silent.progress, problem, SILENT));
        }
        let (rank, behind) = present().min_by_key(|(_, member)| member.progress.entered)?;
        let (first, ahead) =
            present().max_by_key(|(rank, member)| (member.progress.entered, **rank == asker))?;
        if behind.progress.entered < ahead.progress.entered {
            let here = behind
                .progress
                .inside
                .map(|time| format!("has been in it for {}; ", seconds(time)));
            let problem = here.unwrap_or_default() + &waits(*first, ahead);
            return Some(Failure::new(*rank, &behind.progress, problem, BEHIND));
        }
        // The same operation by number, under another name.
        let differs = |progress: &Progress| {
            let same = progress.inside.is_some()
                && progress.number > 0
                && progress.number == asking.progress.number;
            same && progress.what != asking.progress.what
        };
        if let Some((rank, member)) = present().find(|(_, member)| differs(&member.progress)) {
            return Some(Failure::new(
                *rank,
                &member.progress,
                waits(asker, asking),
                BEHIND,
            ));
        }
        let stuck = "has waited too long, though no rank is behind";
        self.left(asker, |_| true)
            .or_else(|| Some(Failure::new(asker, &asking.progress, stuck, STUCK)))
    }

    /// Returns the failure of a rank that has left and `is_missed` by `waiting`.
    fn left(&self, waiting: usize, is_missed: impl Fn(&Member) -> bool) -> Option<Failure> {
        let mut left = self.members.iter().filter(|(_, member)| member.has_left);
        let (rank, member) = left.find(|(_, member)| is_missed(member))?;
        let problem = format!("has left; {}", waits(waiting, self.members.get(&waiting)?));
        Some(Failure::new(*rank, &member.progress, problem, LEFT))
    }
}

fn waits(rank: usize, member: &Member) -> String {
    let progress = &member.progress;
    match progress.inside {
        Some(time) => format!("rank {rank} has waited for {} in {progress}", seconds(time)),
        None => format!("rank {rank} is in {progress}"),
    }
}

pub(super) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_secs(5);

    fn progress(operation: u64, inside: Option<u64>) -> Progress {
        Progress {
            entered: operation,
            what: "all_reduce".into(),
            number: operation,
            inside: inside.map(Duration::from_secs),
        }
    }

    /// Ranks 0, 1 and 2, of which rank 1 has begun an operation. The timeout is two seconds.
    fn roll(now: Instant) -> Roll {
        let mut roll = Roll::new(3, Pace::new(Duration::from_secs(2)));
        for rank in 0..3 {
            assert!(roll.admit(rank, now));
            roll.beat(rank, progress(1, None), now);
        }
        roll.beat(1, progress(2, Some(0)), now);
        roll
    }

    /// Rank 0, which keeps the roll, was stopped while rank 2 died. Rank 1's heartbeat may be read first.
    #[test]
    fn a_rank_0_that_was_stopped_is_not_blamed_for_the_one_that_died() {
        let began = Instant::now();
        for stopped in [4, 60] {
            let mut roll = roll(began);
            let resumed = began + Duration::from_secs(stopped);
            roll.beat(1, progress(2, Some(stopped)), resumed);
            assert_eq!(roll.failure(), None);
            roll.end(2, "its process has ended");
            roll.beat(1, progress(2, Some(stopped)), resumed + SILENCE / 20);
            let failure = roll.failure().unwrap();
            assert_eq!(
                (failure.rank, failure.texts[1].as_str()),
                (2, "its process has ended")
            );
        }
    }

    #[test]
    fn a_rank_that_is_behind_is_declared_at_the_second_heartbeat() {
        let began = Instant::now();
        let mut roll = roll(began);
        roll.beat(0, progress(2, Some(0)), began);
        for (seconds, rank) in [(3, None), (4, Some(2))] {
            roll.beat(
                1,
                progress(2, Some(seconds)),
                began + Duration::from_secs(seconds),
            );
            assert_eq!(roll.failure().map(|failure| failure.rank), rank);
        }
    }
}
