//! Ranks that are threads of one process: for tests and documentation, and for jobs without a network.

mod exchange;
#[cfg(test)]
mod tests;

use super::collective::Collective;
use super::host::{HostBackend, HostBuffer, of_dtype, validate};
use crate::{Error, Result};
use exchange::{ReduceRange, exchange, reduce_range};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a rank that waits asks whether it still should.
const POLL: Duration = Duration::from_millis(3);

/// The ranks of a job, in order. Each is for a thread of its own.
///
/// Numbers are added in the order of ranks, by one of them: the bits are the same on all, and in every run.
pub(crate) fn group(world_size: usize) -> Vec<ThreadBackend> {
    let slots = (0..world_size).map(|_| Slot::Idle).collect();
    let shared = Arc::new(Shared {
        slots: Mutex::new(slots),
        changed: Condvar::new(),
    });
    let rank = |rank| ThreadBackend {
        rank,
        world_size,
        shared: Arc::clone(&shared),
    };
    (0..world_size).map(rank).collect()
}

/// One rank of a [`group`].
#[derive(Debug)]
pub(crate) struct ThreadBackend {
    rank: usize,
    world_size: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// One for each rank.
    slots: Mutex<Vec<Slot>>,
    changed: Condvar,
}

/// What a rank is in.
#[derive(Debug)]
enum Slot {
    Idle,
    Waiting(Call),
    /// Its call is over.
    Done(std::result::Result<(), Disagreement>),
    /// It does not come again.
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    collective: Collective,
    buffer: HostBuffer,
    reduce_range: Option<ReduceRange>,
}

// SAFETY: while a call is in its slot, its caller waits in `run` and leaves the buffer to whoever has the lock.
unsafe impl Send for Call {}

#[derive(Clone, Debug)]
struct Disagreement {
    rank: usize,
    problem: String,
}

impl HostBackend for ThreadBackend {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn run(
        &mut self,
        collective: Collective,
        buffer: HostBuffer,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let place = (self.rank, self.world_size);
        validate(collective, buffer.elements, buffer.dtype, place)?;
        let partners = collective.partners(self.rank, self.world_size);
        let reduce_range = match collective.reduce() {
            Some(_) => Some(of_dtype!(reduce_range as ReduceRange, buffer.dtype)?),
            None => None,
        };
        let call = Call {
            collective,
            buffer,
            reduce_range,
        };
        let _posted = Posted::new(self, call);
        let mut slots = self.shared.lock();
        loop {
            if let Slot::Done(outcome) = &slots[self.rank] {
                return outcome.clone().map_err(|Disagreement { rank, problem }| {
                    let hint = "all ranks have to make the same calls in the same order";
                    failure(rank, collective, problem, hint)
                });
            }
            let is_gone = |rank: &&usize| matches!(slots[**rank], Slot::Gone);
            if let Some(rank) = partners.iter().find(is_gone) {
                let problem = format!("has ended, and rank {} waits for it", self.rank);
                return Err(failure(
                    *rank,
                    collective,
                    problem,
                    "its own error says why",
                ));
            }
            (slots, _) = (self.shared.changed)
                .wait_timeout(slots, POLL)
                .unwrap_or_else(PoisonError::into_inner);
            drop(slots);
            check()?;
            slots = self.shared.lock();
        }
    }
}

fn failure(rank: usize, collective: Collective, problem: String, hint: &str) -> Error {
    Error::Rank {
        rank,
        during: collective.name().into(),
        problem,
        hint: hint.into(),
    }
}

impl Drop for ThreadBackend {
    fn drop(&mut self) {
        self.shared.lock()[self.rank] = Slot::Gone;
        self.shared.changed.notify_all();
    }
}

/// A call in its slot, which is withdrawn however the caller leaves: its buffer must not be used any more then.
struct Posted<'a>(&'a ThreadBackend);

impl<'a> Posted<'a> {
    /// The last of those who wait for each other does the work, under the lock.
    fn new(backend: &'a ThreadBackend, call: Call) -> Self {
        let mut slots = backend.shared.lock();
        slots[backend.rank] = Slot::Waiting(call);
        for rank in 0..slots.len() {
            settle(&mut slots, rank);
        }
        backend.shared.changed.notify_all();
        Self(backend)
    }
}

impl Drop for Posted<'_> {
    fn drop(&mut self) {
        self.0.shared.lock()[self.0.rank] = Slot::Idle;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective {
    /// Who takes part, `rank` among them, in order.
    fn partners(self, rank: usize, world_size: usize) -> Vec<usize> {
        match self {
            Self::Send { to: other } | Self::Receive { from: other } => {
                vec![rank.min(other), rank.max(other)]
            }
            _ => (0..world_size).collect(),
        }
    }

    /// What a partner of `rank` has to call.
    fn counterpart(self, rank: usize) -> Self {
        match self {
            Self::Send { .. } => Self::Receive { from: rank },
            Self::Receive { .. } => Self::Send { to: rank },
            same => same,
        }
    }
}

/// Ends a rank's call if all that it waits for wait for it.
fn settle(slots: &mut [Slot], rank: usize) {
    let Slot::Waiting(call) = slots[rank] else {
        return;
    };
    let world_size = slots.len();
    let partners = call.collective.partners(rank, world_size);
    let waiting = partners.iter().map(|partner| match slots[*partner] {
        Slot::Waiting(call) => {
            let waits_for = call.collective.partners(*partner, world_size);
            waits_for.contains(&rank).then_some((*partner, call))
        }
        _ => None,
    });
    let Some(calls) = waiting.collect::<Option<Vec<_>>>() else {
        return;
    };
    let outcome = agreed(&calls).inspect(|()| {
        let buffers: Vec<_> = calls.iter().map(|(_, call)| call.buffer).collect();
        let (_, first) = calls[0];
        // SAFETY: the buffers' owners wait, and the lock is held; they have one size, and the dtype.
        unsafe { exchange(first.collective, first.reduce_range, &buffers) }
    });
    for partner in partners {
        slots[partner] = Slot::Done(outcome.clone());
    }
}

/// An error that names the first rank whose call does not go with the first one's.
fn agreed(calls: &[(usize, Call)]) -> std::result::Result<(), Disagreement> {
    let [(first, call), others @ ..] = calls else {
        return Ok(());
    };
    let counterpart = call.collective.counterpart(*first);
    let is_other = |(_, other): &&(usize, Call)| {
        let (own, other_own) = (call.buffer, other.buffer);
        let same_buffer = (own.elements, own.dtype) == (other_own.elements, other_own.dtype);
        other.collective != counterpart || !(same_buffer || counterpart == Collective::Barrier)
    };
    match others.iter().find(is_other) {
        None => Ok(()),
        Some((rank, other)) => Err(Disagreement {
            rank: *rank,
            problem: format!("calls {other}, while rank {first} calls {call}"),
        }),
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let HostBuffer {
            elements, dtype, ..
        } = self.buffer;
        write!(f, "{:?} of {elements} {}", self.collective, dtype.as_str())
    }
}
