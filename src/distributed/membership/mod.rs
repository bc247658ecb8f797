//! Membership: the activity of each rank, and failures reported to all.
//!
//! Each rank keeps one connection to rank 0's [`hub`], and sends it a heartbeat four times a second with the operation
//! that it is in. A process that ends closes its connection, so the others know immediately. A slow rank is not a
//! failure: no failure is declared before some rank has been in an operation for longer than the timeout. Then rank 0
//! checks the [`roll`] and names the rank that failed.

mod heartbeat;
mod hub;
mod roll;
#[cfg(test)]
mod tests;
mod wire;

pub use heartbeat::TimeoutGuard;
pub(crate) use wire::is_loopback;

use super::ranks::Ranks;
use super::{locked, spawn};
use crate::Result;
use heartbeat::{LAST_MESSAGE, Shared};
use hub::Hub;
use roll::{Failure, Pace};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use wire::{Hello, connect, listen};

/// This process's membership in its job. Dropping it says goodbye.
pub(crate) struct Membership {
    rank: usize,
    shared: Arc<Shared>,
    /// Whether there is nobody to notify: a job of one rank, or ranks that are threads.
    is_single_rank: bool,
    /// The hub of rank 0. Dropped after the goodbye.
    _hub: Option<Hub>,
}

impl Membership {
    /// Joins the job whose rank 0 listens, or will listen, at `master`. Returns when all ranks have joined, with rank
    /// 0's `welcome`. `timeout` applies to this and to every later operation.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank) naming the ranks that have not joined after `timeout`, or rank 0 if nothing
    /// answers at `master`; [`Error::Order`](crate::Error::Order) if this rank is refused (another token, world size or
    /// version, a rank that has joined already), or if rank 0 cannot listen; [`Error::Config`](crate::Error::Config) if
    /// other hosts could reach rank 0, and there is no secret.
    pub(crate) fn join(
        ranks: &Ranks,
        master: (String, u16),
        timeout: Duration,
        welcome: String,
    ) -> Result<(Self, String)> {
        ranks.check_secret(&master)?;
        let pace = Pace::new(timeout);
        let (token, world_size) = (ranks.token.as_str(), ranks.world_size);
        let start = || Hub::start(listen(&master)?, token, world_size, pace, welcome);
        let hub = (ranks.rank == 0).then(start).transpose()?;
        Self::join_at(ranks, &master, hub, pace)
    }

    fn join_at(
        ranks: &Ranks,
        master: &(String, u16),
        hub: Option<Hub>,
        pace: Pace,
    ) -> Result<(Self, String)> {
        let own = hub.as_ref().map(Hub::master);
        let hello = Hello::new(ranks.rank, ranks.world_size, ranks.token.as_str());
        let connection = connect(own.as_ref().unwrap_or(master), hello, pace.timeout)?;
        let shared = Arc::new(Shared::new(ranks.rank, pace));
        let beating = shared.clone();
        spawn("tallow-heartbeat", move || beating.beat(connection))?;
        let membership = Self {
            rank: ranks.rank,
            shared,
            is_single_rank: false,
            _hub: hub,
        };
        let timeout_guard = membership.enter_some("rendezvous");
        let shared = &membership.shared;
        shared.wait(Duration::MAX, |state| {
            state.welcome.is_some() || state.failure.is_some()
        });
        drop(timeout_guard);
        membership.check()?;
        let welcome = locked(&membership.shared.state).welcome.take();
        Ok((membership, welcome.unwrap_or_default()))
    }

    /// Creates a job of one rank, without hub or thread.
    pub(crate) fn single_rank() -> Self {
        let shared = Shared::new(0, Pace::new(Duration::MAX));
        locked(&shared.state).has_ended = true;
        Self {
            rank: 0,
            shared: Arc::new(shared),
            is_single_rank: true,
            _hub: None,
        }
    }

    /// Begins an operation of all ranks, each of which counts it under the same number. The timeout applies while the
    /// guard is alive. It does no I/O.
    pub(crate) fn enter(&self, what: &str) -> TimeoutGuard<'_> {
        self.shared.enter(what, true)
    }

    /// Begins an operation of some ranks, or one that contains operations of all ranks. The timeout applies, and the
    /// number of operations does not change.
    pub(crate) fn enter_some(&self, what: &str) -> TimeoutGuard<'_> {
        self.shared.enter(what, false)
    }

    /// Checks for a failure, at the cost of one atomic load.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank): the failure that was declared.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared.check()
    }

    /// Declares a rank's failure, and notifies the others, for at most a second. If there is an earlier failure, it
    /// counts on all ranks; [`check`](Self::check) returns it.
    pub(crate) fn fail(&self, rank: usize, during: &str, problem: &str, hint: &str) {
        self.shared
            .declare(Failure::new(rank, during, problem, hint));
    }

    /// Declares a failure of this rank that may be a consequence of another rank's (a closed connection between ranks).
    /// It first waits a second for that failure to be reported.
    pub(crate) fn fail_unless_known(&self, during: &str, problem: &str) {
        if !self.is_single_rank {
            self.await_failure();
            self.fail(self.rank, during, problem, OWN_OUTPUT);
        }
    }

    /// Waits for a failure to be reported, for at most a second.
    pub(crate) fn await_failure(&self) {
        self.shared
            .wait(LAST_MESSAGE, |state| state.failure.is_some());
    }

    /// Calls `hook` once when a failure is declared, on the thread that declares or receives it (immediately if there
    /// is one). Use it to abort a collective that would wait forever. It may check the membership, but must not use it
    /// otherwise.
    pub(crate) fn on_failure(&self, hook: impl FnOnce() + Send + 'static) {
        let mut state = locked(&self.shared.state);
        if state.failure.is_none() {
            return state.hooks.push(Box::new(hook));
        }
        drop(state);
        hook();
    }
}

/// The hint for a rank that failed by itself.
pub(crate) const OWN_OUTPUT: &str = "see the rank's own output";

impl Drop for Membership {
    fn drop(&mut self) {
        if thread::panicking() {
            let progress = locked(&self.shared.state).progress();
            self.fail(self.rank, &progress.to_string(), "panicked", OWN_OUTPUT);
        }
        self.shared.leave();
    }
}
