//! Who is there of a job, what each rank is doing, and failures told to all.
//!
//! Each rank sends rank 0 a heartbeat four times a second, which says what the rank is in; the answer says whether the
//! job has failed. A process that ends closes its connection, so the others know within that time. A rank that is
//! merely slow is no failure: nobody is declared before some rank has been in an operation for longer than the timeout.
//! Then rank 0 looks at the roll and names whose fault it is.

mod heartbeat;
#[cfg(test)]
mod tests;
mod values;

pub use heartbeat::Watch;
pub(crate) use values::encoded;

use super::Collective;
use super::ranks::Ranks;
use super::store::{Client, Failure, Hello, Purpose, Server, connect, listen, locked, seconds};
use crate::{Error, Result};
use heartbeat::{LAST_WORDS, Pace, Shared};
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// This process's part in its job. Dropping it says goodbye.
pub(crate) struct Membership {
    rank: usize,
    world_size: usize,
    shared: Arc<Shared>,
    /// How many agreements have been begun: their keys.
    agreements: AtomicU64,
    store: Store,
}

enum Store {
    /// A world of one rank has its own.
    Alone(Mutex<HashMap<String, Vec<u8>>>),
    /// Rank 0 serves it.
    Joined {
        client: Client,
        server: Option<Server>,
    },
}

impl Membership {
    /// Joins the job whose rank 0 listens, or will listen, at `master`, and returns when all ranks are there. Rank 0
    /// serves. `timeout` is for this, and for every operation later.
    ///
    /// # Errors
    /// [`Error::Rank`] naming the ranks that are not there after `timeout`, or rank 0 if nothing answers at `master`;
    /// [`Error::Order`] if this rank is refused (another token, world size or version, a rank that is there already),
    /// or if rank 0 cannot listen; [`Error::Config`] if other hosts could reach the store, and there is no secret.
    pub(crate) fn join(ranks: &Ranks, master: (String, u16), timeout: Duration) -> Result<Self> {
        ranks.check_secret(&master)?;
        let pace = Pace::new(timeout);
        let (token, world_size) = (ranks.token.as_str(), ranks.world_size);
        let start = || Server::start(listen(&master)?, token, world_size, pace.silence);
        let server = (ranks.rank == 0).then(start).transpose()?;
        Self::join_at(ranks, &master, server, timeout, pace)
    }

    fn join_at(
        ranks: &Ranks,
        master: &(String, u16),
        server: Option<Server>,
        timeout: Duration,
        pace: Pace,
    ) -> Result<Self> {
        let Ranks {
            rank,
            world_size,
            ref token,
            ..
        } = *ranks;
        let own = server.as_ref().map(Server::master);
        let master = own.as_ref().unwrap_or(master);
        let began = Instant::now();
        let connect = |purpose| {
            let hello = Hello::new(purpose, rank, world_size, token.as_str());
            connect(master, &hello, timeout.saturating_sub(began.elapsed()))
        };
        let client = Client::new(connect(Purpose::Store)?);
        let heartbeat = connect(Purpose::Heartbeat)?;
        let shared = Arc::new(Shared::new(rank, pace));
        let beating = shared.clone();
        let thread = thread::Builder::new().name("tallow-heartbeat".into());
        thread
            .spawn(move || beating.beat(heartbeat))
            .map_err(|error| Error::Order {
                op: "rendezvous",
                problem: format!("rank {rank} gets no thread for its heartbeat: {error}"),
                hint: "are there limits on the process's threads?".into(),
            })?;
        let store = Store::Joined { client, server };
        let agreements = AtomicU64::new(0);
        let membership = Self {
            rank,
            world_size,
            shared,
            agreements,
            store,
        };
        membership.wait_for_all(began, timeout)?;
        Ok(membership)
    }

    /// A world of one rank: no server, no thread.
    pub(crate) fn alone() -> Self {
        let shared = Shared::new(0, Pace::new(Duration::MAX));
        locked(&shared.state).has_ended = true;
        Self {
            rank: 0,
            world_size: 1,
            shared: Arc::new(shared),
            agreements: AtomicU64::new(0),
            store: Store::Alone(Mutex::default()),
        }
    }

    /// Whether this membership has no store of the job: a job of one, or ranks that are threads.
    pub(crate) fn is_alone(&self) -> bool {
        matches!(self.store, Store::Alone(_))
    }

    fn wait_for_all(&self, began: Instant, timeout: Duration) -> Result<()> {
        let Store::Joined { client, .. } = &self.store else {
            return Ok(());
        };
        loop {
            let missing = self.or_failure(client.missing(&|| self.check()))?;
            let Some((first, others)) = missing.split_first() else {
                return Ok(());
            };
            if began.elapsed() >= timeout {
                let mut problem = format!("has not come within {}", seconds(timeout));
                if !others.is_empty() {
                    let others: Vec<_> = others.iter().take(16).map(usize::to_string).collect();
                    problem += &format!(", nor has {} of {}", others.join(", "), self.world_size);
                }
                let hint =
                    "are all processes started, with this WORLD_SIZE? their own output says more";
                self.declare(Failure::new(*first, "rendezvous", problem, hint));
            }
            self.check()?;
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Begins something that all ranks take part in, each as its operation of the same number. While the watch lives
    /// the timeout runs. Costs no I/O.
    pub(crate) fn enter(&self, what: &str) -> Watch<'_> {
        self.shared.enter(what, true)
    }

    /// Begins a collective.
    pub(crate) fn enter_for(&self, collective: Collective) -> Watch<'_> {
        use Collective::{Receive, Send};
        let is_of_all = !matches!(collective, Send { .. } | Receive { .. });
        self.shared.enter(collective.name(), is_of_all)
    }

    /// Begins something that only some ranks take part in, or that has operations of all ranks in it: the timeout runs,
    /// and the number of operations stays.
    pub(crate) fn enter_some(&self, what: &str) -> Watch<'_> {
        self.shared.enter(what, false)
    }

    /// Costs a load of an atomic while all is well.
    ///
    /// # Errors
    /// [`Error::Rank`]: the failure that was declared.
    pub(crate) fn check(&self) -> Result<()> {
        self.shared.check()
    }

    /// Declares this rank's own failure, and tells the others, for a second at most. If there is one already, that one
    /// counts on all ranks: [`check`](Self::check) says which.
    pub(crate) fn fail(&self, during: &str, problem: &str) {
        let hint = "the rank's own output says more";
        self.declare(Failure::new(self.rank, during, problem, hint));
    }

    /// As [`fail`](Self::fail), for what may well follow from another rank's failure (a connection between ranks that
    /// has ended): waits for a second whether that is heard of first.
    pub(crate) fn fail_unless_known(&self, during: &str, problem: &str) {
        if self.is_alone() {
            return; // there is nobody to tell
        }
        self.wait_for_failure();
        self.fail(during, problem);
    }

    /// Returns when a failure is heard of, or after a second, in which this process runs: time in which it is stopped
    /// does not count, since it hears of nothing then.
    fn wait_for_failure(&self) {
        const POLL: Duration = Duration::from_millis(5);
        let mut left = LAST_WORDS;
        while self.check().is_ok() && !left.is_zero() {
            thread::sleep(POLL);
            left = left.saturating_sub(POLL);
        }
    }

    fn declare(&self, failure: Failure) {
        let Some(hooks) = self.shared.keep(&failure) else {
            return;
        };
        match &self.store {
            Store::Alone(_) => {}
            Store::Joined {
                server: Some(server),
                ..
            } => self.shared.replace(server.declare(failure)),
            Store::Joined { server: None, .. } => self.shared.tell(failure),
        }
        hooks.into_iter().for_each(|hook| hook());
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

impl Drop for Membership {
    fn drop(&mut self) {
        if thread::panicking() {
            let doing = locked(&self.shared.state).doing();
            self.fail(&doing.to_string(), "panicked");
        }
        self.shared.leave();
    }
}
