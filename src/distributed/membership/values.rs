//! What ranks tell each other: values by key, and facts that must be the same.

use super::{Membership, Store};
use crate::distributed::store::{Failure, Fields, Message, locked, seconds};
use crate::{Error, Result};
use std::borrow::Cow;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Membership {
    /// Gives `key` a value that other ranks [`get`](Self::get).
    ///
    /// # Errors
    /// [`Error::Data`] if it is too long (64 KiB, 16 MiB), or one too many; [`Error::Rank`] for a failure that was
    /// declared.
    pub(crate) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        match &self.store {
            Store::Alone(values) => {
                locked(values).insert(key.into(), value.into());
                Ok(())
            }
            Store::Joined { client, .. } => {
                self.or_failure(client.set(key, value, &|| self.check()))
            }
        }
    }

    /// The value that rank `from` sets for `key`. Not to set it within the timeout is that rank's failure.
    ///
    /// # Errors
    /// [`Error::Rank`] naming `from` and the key after the timeout, or another failure that was declared.
    pub(crate) fn get(&self, key: &str, from: usize) -> Result<Vec<u8>> {
        let (began, timeout) = (Instant::now(), self.shared.pace.timeout);
        self.wait_for(key, &|| {
            if began.elapsed() > timeout {
                let problem = format!("has not set {key:?} within {}", seconds(timeout));
                let hint = "do all ranks take the same steps?";
                self.declare(Failure::new(from, "rendezvous", problem, hint));
            }
            self.check()
        })
    }

    /// As [`wait_for`](Self::wait_for), and the key has no value any more.
    fn take(&self, key: &str) -> Result<Vec<u8>> {
        match &self.store {
            Store::Alone(values) => Ok(locked(values).remove(key).unwrap_or_default()),
            Store::Joined { client, .. } => self.or_failure(client.take(key, &|| self.check())),
        }
    }

    fn wait_for(&self, key: &str, go_on: &dyn Fn() -> Result<()>) -> Result<Vec<u8>> {
        match &self.store {
            Store::Alone(values) => locked(values)
                .get(key)
                .cloned()
                .ok_or_else(|| Error::Order {
                    op: "store",
                    problem: format!("{key:?} is not set, and there is no other rank that could"),
                    hint: "set it first".into(),
                }),
            Store::Joined { client, .. } => self.or_failure(client.get(key, go_on)),
        }
    }

    /// What ended the store's connection, if that is heard of: a rank 0 that fails.
    pub(super) fn or_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(Error::Rank { .. }) = result {
            self.wait_for_failure();
            self.check()?;
        }
        result
    }

    /// Compares what all ranks know: `what` is for (`"configuration"`), name and value of each fact.
    ///
    /// # Errors
    /// On all ranks [`Error::Rank`] naming the first rank that differs from rank 0, the fact and both values; a failure
    /// that was declared, also because a rank does not come.
    pub(crate) fn agree(&self, what: &str, facts: &[(&str, String)]) -> Result<()> {
        // While this is open a rank that does not come is declared after the timeout: no other is needed below.
        let _watch = self.enter("agree");
        let number = self.agreements.fetch_add(1, Ordering::Relaxed);
        let key_of = |number: u64, rank: usize| format!("agree/{number}/{rank}");
        let key = |rank: usize| key_of(number, rank);
        let mine = encoded(what, facts);
        if self.rank != 0 {
            self.set(&key(self.rank), &mine)?;
            return self.wait_for(&key(0), &|| self.check()).map(drop);
        }
        for rank in 1..self.world_size {
            let theirs = self.take(&key(rank))?;
            self.compare(what, &mine, (rank, &theirs))?;
        }
        // All have read the last answer: they are here. So the store does not grow with the agreements.
        if let Some(last) = number.checked_sub(1) {
            self.take(&key_of(last, 0))?;
        }
        self.set(&key(0), &[])
    }

    /// Compares a rank's [`encoded`] facts with those of rank 0.
    ///
    /// # Errors
    /// [`Error::Rank`] for a difference, which is declared, or for a failure that was declared before.
    pub(crate) fn compare(
        &self,
        what: &str,
        rank_0: &[u8],
        (rank, facts): (usize, &[u8]),
    ) -> Result<()> {
        if let Some(problem) = difference(rank_0, facts) {
            let hint = "start all ranks with the same program, arguments and files";
            self.declare(Failure::new(rank, what, problem, hint));
        }
        self.check()
    }
}

/// Facts as bytes, in order: what they are for, then name and value of each.
pub(crate) fn encoded(what: &str, facts: &[(&str, String)]) -> Vec<u8> {
    let about = [("agreement", what)].into_iter();
    let facts = about.chain(facts.iter().map(|(name, value)| (*name, value.as_str())));
    let message = facts.fold(Message::default(), |message, (name, value)| {
        message.bytes(name.as_bytes()).bytes(value.as_bytes())
    });
    message.0
}

/// The first fact that is not rank 0's.
fn difference(rank_0: &[u8], other: &[u8]) -> Option<String> {
    fn next<'a>(fields: &mut Fields<'a>) -> Option<[Cow<'a, str>; 2]> {
        Some([fields.bytes()?, fields.bytes()?].map(String::from_utf8_lossy))
    }
    let (mut rank_0, mut other) = (Fields(rank_0), Fields(other));
    loop {
        return match (next(&mut rank_0), next(&mut other)) {
            (None, None) => None,
            (ours, theirs) if ours == theirs => continue,
            (Some([name, ours]), Some([same, theirs])) if name == same => {
                Some(format!("{name} is {theirs}, and {ours} on rank 0"))
            }
            (ours, theirs) => {
                let name = |fact: Option<[_; 2]>| fact.map_or("nothing".into(), |[name, _]| name);
                Some(format!(
                    "compares {}, and rank 0 {}",
                    name(theirs),
                    name(ours)
                ))
            }
        };
    }
}
