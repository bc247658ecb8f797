//! The store: keys and values that rank 0 keeps for all ranks, and the roll of who is there, over TCP.
//!
//! What lives here: the server ([`Server`]), a rank's connections to it ([`Client`], [`connect`]), what they say to
//! each other ([`protocol`]), and whose failure it is when ranks wait ([`roll`]). What does not: when heartbeats are
//! sent, and what becomes of a failure, which is [`membership`](super::membership)'s.

mod client;
mod connection;
mod failure;
mod fields;
mod listen;
mod protocol;
mod roll;
mod server;
#[cfg(test)]
mod tests;
mod values;

pub(crate) use client::{Client, connect};
pub(crate) use connection::Connection;
pub(crate) use failure::{Doing, Failure};
pub(crate) use fields::{Fields, Message};
pub(crate) use listen::{is_loopback, listen};
pub(crate) use protocol::{Hello, Purpose, Reply, Request};
pub(crate) use roll::{ENDED, LEFT, SILENT, seconds};
pub(crate) use server::Server;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locked, whoever panicked with it: what is kept under our locks is whole at any time.
pub(crate) fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
