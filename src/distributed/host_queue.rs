//! Collectives on host memory: a thread runs them in order.

use super::host::{HostBackend, HostBuffer};
use super::membership::Membership;
use super::{Collective, Shard, spawn};
use crate::inplace::with_mut_bytes;
use crate::{Error, Result, probe};
use candle_core::Tensor;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// The queue of the thread that runs collectives.
pub(super) struct HostQueue {
    /// `None` to end the thread.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

struct Job {
    collective: Collective,
    exchanged: Exchanged,
    membership: Arc<Membership>,
    done: Sender<Result<()>>,
}

/// The memory of a collective, which runs in place.
pub(super) enum Exchanged {
    Tensor(Tensor),
    /// Memory that the caller does not touch until it has waited for the collective.
    Memory(HostBuffer),
}

impl HostQueue {
    /// Starts a thread that creates the backend, and is the only one to use it.
    pub(super) fn new<B: HostBackend>(
        make: impl FnOnce() -> Result<B> + Send + 'static,
    ) -> Result<(Self, Shard)> {
        let (jobs, orders) = channel::<Job>();
        let (made, place) = channel();
        let thread = spawn("tallow collectives", move || {
            let mut backend = match make() {
                Ok(backend) => backend,
                Err(error) => return drop(made.send(Err(error))),
            };
            drop(made.send(Ok(backend.place())));
            for job in orders {
                let result = job.run(&mut backend);
                drop(job.done.send(result)); // the receiver is gone if nobody waits
            }
        })?;
        let place = place.recv().unwrap_or_else(|_| Err(ended()))?;
        let queue = Self {
            jobs: Some(jobs),
            thread: Some(thread),
        };
        Ok((queue, place))
    }

    /// Starts a collective after earlier ones; the result is sent when it is done.
    pub(super) fn start(
        &self,
        membership: Arc<Membership>,
        collective: Collective,
        exchanged: Exchanged,
    ) -> Receiver<Result<()>> {
        let (done, answer) = channel();
        let job = Job {
            collective,
            exchanged,
            membership,
            done,
        };
        if let Some(jobs) = &self.jobs {
            drop(jobs.send(job)); // if the thread has ended, the result's sender is dropped with the job
        }
        answer
    }

    pub(super) fn wait(done: Receiver<Result<()>>) -> Result<()> {
        done.recv().unwrap_or_else(|_| Err(ended()))
    }
}

fn ended() -> Error {
    Error::Order {
        op: "distributed::Communicator",
        problem: "the thread that runs collectives has ended".into(),
        hint: "look for the first error, which ended it".into(),
    }
}

impl Job {
    fn run(&self, backend: &mut dyn HostBackend) -> Result<()> {
        let result = self.run_on(backend);
        if let Err(Error::Rank { problem, .. }) = &result {
            // A connection that ends is a failure of its own, or a consequence of one that is reported soon.
            let during = self.collective.name();
            self.membership.fail_unless_known(during, problem);
            self.membership.check()?;
        }
        result
    }

    fn run_on(&self, backend: &mut dyn HostBackend) -> Result<()> {
        let _timeout = self.membership.enter(self.collective.name());
        let _range = probe::range(self.collective.name()); // on this thread, concurrent with computation on others
        let check = || self.membership.check();
        match &self.exchanged {
            Exchanged::Memory(buffer) => backend.run(self.collective, *buffer, &check),
            Exchanged::Tensor(tensor) => with_mut_bytes(tensor, |dtype, bytes| {
                let buffer = HostBuffer {
                    start: bytes.cast(),
                    elements: bytes.len() / dtype.size_in_bytes(),
                    dtype,
                };
                backend.run(self.collective, buffer, &check)
            })?,
        }
    }
}

impl Drop for HostQueue {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join()); // the panic has been printed
        }
    }
}
