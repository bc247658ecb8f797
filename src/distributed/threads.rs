//! Ranks that are threads of one process: for tests and documentation, and for jobs without a network.

#[cfg(test)]
mod tests;

use super::collective::{Collective, Reduce};
use super::host::{HostBackend, HostBuffer, reduce_range};
use super::{Shard, locked};
use crate::{Error, Result};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How often a waiting rank checks for failures.
const POLL: Duration = Duration::from_millis(3);

/// Creates the ranks of a job, in order. Each is for a separate thread.
///
/// One of the ranks adds numbers in the order of ranks: the bits are the same on all ranks, and in every run.
pub(crate) fn group(world_size: usize) -> Vec<ThreadBackend> {
    let shared = Arc::new(Shared {
        slots: Mutex::new(vec![Slot::Idle; world_size]),
        changed: Condvar::new(),
    });
    let rank = |rank| ThreadBackend {
        place: Shard { rank, world_size },
        shared: Arc::clone(&shared),
    };
    (0..world_size).map(rank).collect()
}

/// One rank of a [`group`].
#[derive(Debug)]
pub(crate) struct ThreadBackend {
    place: Shard,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    slots: Mutex<Vec<Slot>>,
    changed: Condvar,
}

#[derive(Clone, Debug)]
enum Slot {
    Idle,
    Waiting(Call),
    /// Its call is done, unless another rank made a different call: then that rank, and both calls.
    Done(std::result::Result<(), (usize, String)>),
    /// The rank has ended.
    Gone,
}

/// A rank's call. While it is in a slot, its caller waits in `run`, and the holder of the lock may use the buffer.
#[derive(Clone, Copy, Debug)]
struct Call {
    collective: Collective,
    buffer: HostBuffer,
}

impl HostBackend for ThreadBackend {
    fn place(&self) -> Shard {
        self.place
    }

    fn run(
        &mut self,
        collective: Collective,
        buffer: HostBuffer,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let rank = self.place.rank;
        let failure = |rank, problem, hint: &str| Error::Rank {
            rank,
            during: collective.name().into(),
            problem,
            hint: hint.into(),
        };
        let _posted_call = PostedCall::new(self, Call { collective, buffer });
        let mut slots = locked(&self.shared.slots);
        loop {
            if let Slot::Done(outcome) = &slots[rank] {
                let hint = "all ranks have to make the same calls in the same order";
                let outcome = outcome.clone();
                return outcome.map_err(|(rank, problem)| failure(rank, problem, hint));
            }
            if let Some(gone) = slots.iter().position(|slot| matches!(slot, Slot::Gone)) {
                let problem = format!("has ended, and rank {rank} waits for it");
                return Err(failure(gone, problem, "see its own error"));
            }
            (slots, _) = (self.shared.changed)
                .wait_timeout(slots, POLL)
                .unwrap_or_else(PoisonError::into_inner);
            drop(slots);
            check()?;
            slots = locked(&self.shared.slots);
        }
    }
}

impl Drop for ThreadBackend {
    fn drop(&mut self) {
        locked(&self.shared.slots)[self.place.rank] = Slot::Gone;
        self.shared.changed.notify_all();
    }
}

/// A call in its slot. It is withdrawn however the caller leaves, since its buffer must not be used afterwards.
struct PostedCall<'a>(&'a ThreadBackend);

impl<'a> PostedCall<'a> {
    /// Posts a call. The last rank to call does the work of all, under the lock.
    fn new(backend: &'a ThreadBackend, call: Call) -> Self {
        let mut slots = locked(&backend.shared.slots);
        slots[backend.place.rank] = Slot::Waiting(call);
        settle(&mut slots);
        backend.shared.changed.notify_all();
        Self(backend)
    }
}

impl Drop for PostedCall<'_> {
    fn drop(&mut self) {
        locked(&self.0.shared.slots)[self.0.place.rank] = Slot::Idle;
    }
}

/// Runs all ranks' calls once every rank waits.
fn settle(slots: &mut [Slot]) {
    let waiting = slots.iter().map(|slot| match slot {
        Slot::Waiting(call) => Some(*call),
        _ => None,
    });
    let Some(calls) = waiting.collect::<Option<Vec<_>>>() else {
        return;
    };
    let first = calls[0];
    let key = |call: &Call| (call.collective, call.buffer.elements, call.buffer.dtype);
    let outcome = match calls.iter().position(|call| key(call) != key(&first)) {
        Some(rank) => Err((
            rank,
            format!("calls {}, while rank 0 calls {first}", calls[rank]),
        )),
        None => {
            let buffers: Vec<_> = calls.iter().map(|call| call.buffer).collect();
            // SAFETY: the buffers' owners wait, and the lock is held; they have one size and dtype.
            unsafe { exchange(first.collective, &buffers) }
            Ok(())
        }
    };
    slots.fill(Slot::Done(outcome));
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostBuffer {
            elements, dtype, ..
        } = self.buffer;
        write!(f, "{:?} of {elements} {}", self.collective, dtype.as_str())
    }
}

/// Runs the collective on the buffers of all ranks, in order.
///
/// # Safety
/// Nobody else may use the buffers. They must have one size, divisible by the number of ranks if the collective has
/// parts, and one dtype, which can be reduced if the collective reduces.
unsafe fn exchange(collective: Collective, buffers: &[HostBuffer]) {
    let (world_size, elements) = (buffers.len(), buffers[0].elements);
    let reduced = |reduce, range, into: &[HostBuffer]| {
        let divisor = if reduce == Reduce::Mean {
            world_size
        } else {
            1
        };
        // SAFETY: a range of the buffers. Their dtype can be reduced.
        let _ = unsafe { reduce_range(reduce, buffers, range, into, divisor) };
    };
    // SAFETY: parts of the buffers, which have one size and dtype.
    let copy = |from: HostBuffer, into: HostBuffer| unsafe { into.copy_from(from.start) };
    match collective {
        Collective::AllReduce(reduce) => reduced(reduce, 0..elements, buffers),
        Collective::Reduce { reduce, root } => reduced(reduce, 0..elements, &[buffers[root]]),
        Collective::ReduceScatter(reduce) => {
            let part = elements / world_size;
            for (rank, buffer) in buffers.iter().enumerate() {
                reduced(reduce, rank * part..(rank + 1) * part, &[*buffer]);
            }
        }
        Collective::AllGather => {
            for (rank, from) in buffers.iter().enumerate() {
                let part = |buffer: &HostBuffer| buffer.part(rank, world_size);
                buffers.iter().for_each(|into| copy(part(from), part(into)));
            }
        }
        Collective::Broadcast { root } => {
            buffers.iter().for_each(|into| copy(buffers[root], *into))
        }
    }
}
