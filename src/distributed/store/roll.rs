//! Who is there, what each rank is doing, and whose failure it is when ranks wait.

use super::failure::{Doing, Failure};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub(crate) const ENDED: &str =
    "its own output or the system's log says why (killed for want of memory?); start the job again";
pub(crate) const LEFT: &str =
    "do all ranks take the same number of steps? one that ends early says why in its output";
pub(crate) const SILENT: &str =
    "is the process stopped, or its host out of reach? start the job again";
const BEHIND: &str =
    "do all ranks take the same steps, and is this one only slow? then set a longer timeout";
const STUCK: &str = "is a network between the hosts stuck, or a GPU? if an operation may take so long, set a longer \
                     timeout";

/// A rank that came. Its place is never free again: a process that comes later would know nothing of the job.
struct Member {
    doing: Doing,
    /// When its last two heartbeats came.
    heard: [Instant; 2],
    /// How many heartbeats in a row said that it has waited for too long.
    overdue: usize,
    has_left: bool,
    /// Whether it knows how the job ends.
    is_told: bool,
}

pub(crate) struct Roll {
    world_size: usize,
    /// A heartbeat older than this is a sign of trouble, where there is other trouble. So is it to wait for so long
    /// for one that has left.
    silence: Duration,
    members: BTreeMap<usize, Member>,
    failure: Option<Failure>,
}

impl Roll {
    pub(crate) fn new(world_size: usize, silence: Duration) -> Self {
        let (members, failure) = (BTreeMap::new(), None);
        Self {
            world_size,
            silence,
            members,
            failure,
        }
    }

    /// Whether the rank's place was free.
    pub(crate) fn come(&mut self, rank: usize, now: Instant) -> bool {
        let member = Member {
            doing: Doing::default(),
            heard: [now; 2],
            overdue: 0,
            has_left: false,
            is_told: false,
        };
        let is_free = !self.members.contains_key(&rank);
        if is_free {
            self.members.insert(rank, member);
        }
        is_free
    }

    pub(crate) fn missing(&self) -> Vec<usize> {
        (0..self.world_size)
            .filter(|rank| !self.members.contains_key(rank))
            .collect()
    }

    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// The first failure counts: others follow from it.
    pub(crate) fn declare(&mut self, failure: Failure) -> &Failure {
        self.failure.get_or_insert(failure)
    }

    /// A heartbeat. The second in a row that is overdue has a failure declared: if rank 0 was stopped, it learns
    /// between them of ranks that have ended or gone on meanwhile, and judges by what is true now.
    pub(crate) fn beat(&mut self, rank: usize, doing: Doing, overdue: bool, now: Instant) {
        let Some(member) = self.members.get_mut(&rank) else {
            return;
        };
        let was_stopped = now.saturating_duration_since(member.heard[0]) > self.silence;
        member.overdue = match overdue {
            true if was_stopped => 1,
            true => member.overdue + 1,
            false => 0,
        };
        member.doing = doing;
        member.heard = [now, member.heard[0]];
        let is_certain = member.overdue > 1;
        let failure = self
            .waits_for_left(rank)
            .or_else(|| is_certain.then(|| self.culprit(rank, now))?);
        if let Some(failure) = failure {
            self.declare(failure);
        }
    }

    /// A goodbye.
    pub(crate) fn leave(&mut self, rank: usize, doing: Doing) {
        if let Some(member) = self.members.get_mut(&rank) {
            member.doing = doing;
            member.has_left = true;
        }
    }

    /// The end of its connection. Without a goodbye it is a failure.
    pub(crate) fn end(&mut self, rank: usize, problem: &str) {
        if let Some(member) = self.members.get_mut(&rank)
            && !member.has_left
        {
            member.is_told = true; // nobody is there to tell
            let failure = Failure::new(rank, &member.doing, problem, ENDED);
            self.declare(failure);
        }
    }

    /// The rank has been told how the job ends.
    pub(crate) fn told(&mut self, rank: usize) {
        if let Some(member) = self.members.get_mut(&rank) {
            member.is_told = true;
        }
    }

    pub(crate) fn is_told(&self, rank: usize) -> bool {
        let member = self.members.get(&rank);
        member.is_none_or(|member| member.is_told)
    }

    /// Whether all ranks but 0 know how the job ends, or are gone.
    pub(crate) fn all_told(&self) -> bool {
        let mut others = self.members.iter().filter(|(rank, _)| **rank != 0);
        others.all(|(_, member)| member.is_told || member.has_left)
    }

    /// How many operations of all ranks the rank has begun.
    pub(crate) fn entered(&self, rank: usize) -> u64 {
        self.members
            .get(&rank)
            .map_or(0, |member| member.doing.entered)
    }

    /// An operation that a rank has left before never ends: known some seconds after, without a timeout.
    fn waits_for_left(&self, rank: usize) -> Option<Failure> {
        let waiting = &self.members.get(&rank)?.doing;
        let is_waiting = waiting.inside? > self.silence;
        self.left(rank, |left| {
            is_waiting && left.doing.entered < waiting.entered
        })
    }

    /// Whose fault it is that `asker` waits too long.
    fn culprit(&self, asker: usize, now: Instant) -> Option<Failure> {
        let asking = self.members.get(&asker)?;
        let there = || self.members.iter().filter(|(_, member)| !member.has_left);
        // Against the asker's last heartbeat but one, not against now: rank 0 itself may just have slept.
        let is_silent = |member: &Member| {
            asking.heard[1].saturating_duration_since(member.heard[0]) > self.silence
        };
        let silent = there()
            .filter(|(_, member)| is_silent(member))
            .min_by_key(|(_, member)| member.heard[0]);
        if let Some((rank, member)) = silent {
            let problem = format!(
                "has not been heard of for {}",
                seconds(now - member.heard[0])
            );
            return Some(Failure::new(*rank, &member.doing, problem, SILENT));
        }
        let (rank, behind) = there().min_by_key(|(_, member)| member.doing.entered)?;
        // The asker, unless it is behind itself.
        let ahead = there().max_by_key(|(rank, member)| (member.doing.entered, **rank == asker))?;
        let ahead = if asking.doing.entered > behind.doing.entered {
            (&asker, asking)
        } else {
            ahead
        };
        if behind.doing.entered < ahead.1.doing.entered {
            let here = behind
                .doing
                .inside
                .map(|time| format!("has been there for {}; ", seconds(time)));
            let problem = format!("{}{}", here.unwrap_or_default(), waits(*ahead.0, ahead.1));
            return Some(Failure::new(*rank, &behind.doing, problem, BEHIND));
        }
        // The same operation by its number, under another name.
        let differs = |doing: &Doing| {
            let same =
                doing.inside.is_some() && doing.number > 0 && doing.number == asking.doing.number;
            same && doing.what != asking.doing.what
        };
        let other = there().find(|(_, member)| differs(&member.doing));
        if let Some((rank, member)) = other {
            let problem = waits(asker, asking);
            return Some(Failure::new(*rank, &member.doing, problem, BEHIND));
        }
        let stuck = || {
            Failure::new(
                asker,
                &asking.doing,
                "has waited too long, though no rank is behind",
                STUCK,
            )
        };
        self.left(asker, |_| true).or_else(|| Some(stuck()))
    }

    /// The failure of a rank that has left, one that `is_missed` by `waiting`.
    fn left(&self, waiting: usize, is_missed: impl Fn(&Member) -> bool) -> Option<Failure> {
        let mut left = self.members.iter().filter(|(_, member)| member.has_left);
        let (rank, member) = left.find(|(_, member)| is_missed(member))?;
        let problem = format!("has left; {}", waits(waiting, self.members.get(&waiting)?));
        Some(Failure::new(*rank, &member.doing, problem, LEFT))
    }
}

fn waits(rank: usize, member: &Member) -> String {
    match member.doing.inside {
        Some(time) => format!(
            "rank {rank} has waited for {} in {}",
            seconds(time),
            member.doing
        ),
        None => format!("rank {rank} is in {}", member.doing),
    }
}

pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_secs(5);

    fn doing(operation: u64, inside: Option<u64>) -> Doing {
        Doing {
            entered: operation,
            what: "all_reduce".into(),
            number: operation,
            inside: inside.map(Duration::from_secs),
        }
    }

    /// Ranks 0, 1 and 2, of which rank 1 has begun an operation.
    fn roll(now: Instant) -> Roll {
        let mut roll = Roll::new(3, SILENCE);
        for rank in 0..3 {
            assert!(roll.come(rank, now));
            roll.beat(rank, doing(1, None), false, now);
        }
        roll.beat(1, doing(2, Some(0)), false, now);
        roll
    }

    /// Rank 0, which keeps the roll, was stopped while rank 2 died. Rank 1's heartbeat may be read first.
    #[test]
    fn a_rank_0_that_was_stopped_is_not_blamed_for_the_one_that_died() {
        let began = Instant::now();
        for stopped in [4, 60] {
            let mut roll = roll(began);
            let resumed = began + Duration::from_secs(stopped);
            roll.beat(1, doing(2, Some(stopped)), true, resumed);
            assert_eq!(roll.failure(), None);
            roll.end(2, "its process has ended");
            roll.beat(1, doing(2, Some(stopped)), true, resumed + SILENCE / 20);
            let failure = roll.failure().unwrap();
            assert_eq!(
                (failure.rank, failure.problem.as_str()),
                (2, "its process has ended")
            );
        }
    }

    #[test]
    fn a_rank_that_is_behind_is_declared_at_the_second_heartbeat() {
        let began = Instant::now();
        let mut roll = roll(began);
        roll.beat(0, doing(2, Some(0)), false, began);
        let second = |seconds| began + Duration::from_secs(seconds);
        for (seconds, rank) in [(3, None), (4, Some(2))] {
            roll.beat(1, doing(2, Some(seconds)), true, second(seconds));
            assert_eq!(roll.failure().map(|failure| failure.rank), rank);
        }
    }
}
