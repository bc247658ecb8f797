//! Membership: what each rank is doing, and failures reported to all.
//!
//! Each rank keeps one connection to rank 0's [`hub`], and sends it a heartbeat four times a second, which says what
//! the rank is in. A process that ends closes its connection, so the others know at once. A rank that is merely slow is
//! no failure: nobody is declared before some rank has been in an operation for longer than the timeout. Then rank 0
//! looks at the [`roll`] and names whose failure it is.

mod heartbeat;
mod hub;
mod roll;
#[cfg(test)]
mod tests;
mod wire;

pub use heartbeat::Watch;
pub(crate) use wire::is_loopback;

use super::ranks::Ranks;
use super::{locked, spawn};
use crate::Result;
use heartbeat::{LAST_WORDS, Shared};
use hub::Hub;
use roll::{Failure, Pace};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use wire::{Hello, connect, listen};

/// This process's part in its job. Dropping it says goodbye.
pub(crate) struct Membership {
    rank: usize,
    shared: Arc<Shared>,
    /// Whether nobody is there to tell: a job of one rank, or ranks that are threads.
    is_alone: bool,
    /// Rank 0's. Dropped after the goodbye.
    _hub: Option<Hub>,
}

impl Membership {
    /// Joins the job whose rank 0 listens, or will listen, at `master`, and returns when all ranks are there, with rank
    /// 0's `welcome`. `timeout` is for this, and for every operation later.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank) naming the ranks that are not there after `timeout`, or rank 0 if nothing
    /// answers at `master`; [`Error::Order`](crate::Error::Order) if this rank is refused (another token, world size or
    /// version, a rank that is there already), or if rank 0 cannot listen; [`Error::Config`](crate::Error::Config) if
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
            is_alone: false,
            _hub: hub,
        };
        let watch = membership.enter_some("rendezvous");
        let shared = &membership.shared;
        shared.wait(Duration::MAX, |state| {
            state.welcome.is_some() || state.failure.is_some()
        });
        drop(watch);
        membership.check()?;
        let welcome = locked(&membership.shared.state).welcome.take();
        Ok((membership, welcome.unwrap_or_default()))
    }

    /// A world of one rank: no hub, no thread.
    pub(crate) fn alone() -> Self {
        let shared = Shared::new(0, Pace::new(Duration::MAX));
        locked(&shared.state).has_ended = true;
        Self {
            rank: 0,
            shared: Arc::new(shared),
            is_alone: true,
            _hub: None,
        }
    }

    /// Begins something that all ranks take part in, each as its operation of the same number. While the watch lives
    /// the timeout runs. Costs no I/O.
    pub(crate) fn enter(&self, what: &str) -> Watch<'_> {
        self.shared.enter(what, true)
    }

    /// Begins something that only some ranks take part in, or that has operations of all ranks in it: the timeout runs,
    /// and the number of operations stays.
    pub(crate) fn enter_some(&self, what: &str) -> Watch<'_> {
        self.shared.enter(what, false)
    }

    /// Costs a load of an atomic while all is well.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank): the failure that was declared.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared.check()
    }

    /// Declares a rank's failure, and tells the others, for a second at most. If there is one already, that one counts
    /// on all ranks: [`check`](Self::check) says which.
    pub(crate) fn fail(&self, rank: usize, during: &str, problem: &str, hint: &str) {
        self.shared
            .declare(Failure::new(rank, during, problem, hint));
    }

    /// Declares this rank's failure, which may well follow from another rank's (a connection between ranks that has
    /// ended): waits for a second whether that is heard of first.
    pub(crate) fn fail_unless_known(&self, during: &str, problem: &str) {
        if !self.is_alone {
            self.await_failure();
            self.fail(self.rank, during, problem, OWN_OUTPUT);
        }
    }

    /// Waits for a failure to be heard of, for a second at most.
    pub(crate) fn await_failure(&self) {
        self.shared
            .wait(LAST_WORDS, |state| state.failure.is_some());
    }

    /// Has `hook` called once when a failure is declared, by the thread that declares it or hears of it (at once if
    /// there is one): what ends a collective that would wait for ever. It may check the membership, and do
    /// nothing else with it.
    pub(crate) fn on_failure(&self, hook: impl FnOnce() + Send + 'static) {
        let mut state = locked(&self.shared.state);
        if state.failure.is_none() {
            return state.hooks.push(Box::new(hook));
        }
        drop(state);
        hook();
    }
}

/// What to do about a rank that has failed by itself.
pub(crate) const OWN_OUTPUT: &str = "the rank's own output says more";

impl Drop for Membership {
    fn drop(&mut self) {
        if thread::panicking() {
            let doing = locked(&self.shared.state).doing();
            self.fail(self.rank, &doing.to_string(), "panicked", OWN_OUTPUT);
        }
        self.shared.leave();
    }
}
