//! Rank 0's hub: a thread that admits ranks, keeps the roll, and reports the job's end to all ranks.

use super::roll::{Pace, Roll};
use super::wire::{Connection, Hello, Message, TICK};
use crate::Result;
use crate::distributed::spawn;
use std::hint::black_box;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time for a new connection to send its first line.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long the hub reads after its last message.
const LINGER: Duration = Duration::from_millis(250);
/// Limit of connections without a first line, in addition to those that the ranks themselves may be opening.
const MAX_PENDING: usize = 64;

/// The running hub. Dropping it notifies the ranks, and closes the port.
pub(super) struct Hub {
    address: SocketAddr,
    is_ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Serving {
    listener: TcpListener,
    token: String,
    world_size: usize,
    welcome: Message,
    roll: Roll,
    peers: Vec<Peer>,
}

struct Peer {
    connection: Connection,
    /// `None` before its first message.
    rank: Option<usize>,
    since: Instant,
    is_welcome: bool,
    /// Whether it knows how the job ends.
    is_notified: bool,
}

impl Hub {
    /// Serves until it is dropped. Once all ranks have joined, each receives `welcome`.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) if the socket cannot be set up; [`Error::Order`](crate::Error::Order) if no
    /// thread can be started.
    pub(super) fn start(
        listener: TcpListener,
        token: &str,
        world_size: usize,
        pace: Pace,
        welcome: String,
    ) -> Result<Self> {
        let address = listener
            .set_nonblocking(true)
            .and_then(|()| listener.local_addr());
        let mut address =
            address.map_err(|error| crate::Error::io("listen", "rank 0's port", error))?;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        let serving = Serving {
            listener,
            token: token.into(),
            world_size,
            welcome: Message::Welcome(welcome),
            roll: Roll::new(world_size, pace),
            peers: Vec::new(),
        };
        let is_ending = Arc::new(AtomicBool::new(false));
        let ends = is_ending.clone();
        let thread = Some(spawn("tallow-hub", move || serving.run(&ends))?);
        Ok(Self {
            address,
            is_ending,
            thread,
        })
    }

    /// Returns the address at which rank 0 itself reaches it.
    pub(super) fn master(&self) -> (String, u16) {
        (self.address.ip().to_string(), self.address.port())
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Serving {
    fn run(mut self, is_ending: &AtomicBool) {
        loop {
            let is_last = is_ending.load(Ordering::Acquire);
            self.accept();
            let mut peers = std::mem::take(&mut self.peers);
            peers.retain_mut(|peer| self.serve(peer));
            self.peers = peers;
            self.notify_all(is_last);
            if is_last {
                return self.drain_peers();
            }
            thread::sleep(TICK);
        }
    }

    /// Reads what the ranks still send until they have closed; those that run do so within a few heartbeats. Closing a
    /// connection with unread data may lose what was sent.
    fn drain_peers(mut self) {
        let began = Instant::now();
        while began.elapsed() < LINGER && !self.peers.is_empty() {
            self.peers.retain_mut(|peer| {
                let is_open = loop {
                    match peer.connection.receive() {
                        Ok(Some(_)) => {}
                        Ok(None) => break true,
                        Err(_) => break false,
                    }
                };
                is_open && peer.rank.is_some()
            });
            thread::sleep(TICK / 5);
        }
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let pending = self.peers.iter().filter(|peer| peer.rank.is_none()).count();
            if pending <= MAX_PENDING + self.world_size
                && let Ok(connection) = Connection::new(stream, None)
            {
                self.peers.push(Peer {
                    connection,
                    rank: None,
                    since: Instant::now(),
                    is_welcome: false,
                    is_notified: false,
                });
            }
        }
    }

    /// Reads all messages of a peer. Returns whether its connection stays open.
    fn serve(&mut self, peer: &mut Peer) -> bool {
        loop {
            let message = match peer.connection.receive() {
                Ok(Some(message)) => message,
                Ok(None) => return peer.rank.is_some() || peer.since.elapsed() < HANDSHAKE,
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    return self.end(peer, "sent an unexpected message");
                }
                Err(_) => return self.end(peer, "its process has ended"),
            };
            // Unsent data is sent before the next read, which shows whether the connection has ended.
            let _: io::Result<()> = match (message, peer.rank) {
                (Message::Hello(hello), None) => {
                    if let Err(problem) = self.admit(&hello) {
                        let _ = peer.connection.send(&Message::Refused(problem));
                        return false;
                    }
                    peer.rank = Some(hello.rank);
                    peer.connection.send(&Message::Ack)
                }
                (Message::Beat(progress), Some(rank)) => {
                    self.roll.beat(rank, progress, Instant::now());
                    peer.connection.send(&Message::Ack)
                }
                (Message::Failure(failure), Some(_)) => {
                    self.roll.declare(failure);
                    Ok(())
                }
                (Message::Goodbye(progress), Some(rank)) => {
                    self.roll.leave(rank, progress);
                    return false;
                }
                _ => return self.end(peer, "sent an unexpected message"),
            };
        }
    }

    /// Closes a connection that ends without a goodbye.
    fn end(&mut self, peer: &Peer, problem: &str) -> bool {
        if let Some(rank) = peer.rank {
            self.roll.end(rank, problem);
        }
        false
    }

    /// Admits a rank to its place, or returns the reason for a refusal.
    fn admit(&mut self, hello: &Hello) -> std::result::Result<(), String> {
        let Hello {
            version,
            rank,
            world_size,
            token,
        } = hello;
        // Checked first: without the token a stranger learns nothing else.
        if !is_same(token, &self.token) {
            return Err("the job's token differs".into());
        }
        let own = env!("CARGO_PKG_VERSION");
        if version != own {
            return Err(format!(
                "rank 0 runs tallow {own}, and this rank {}",
                version.escape_default()
            ));
        }
        if *world_size != self.world_size || rank >= world_size {
            return Err(format!(
                "rank 0 has a world size of {}, and this rank {world_size}",
                self.world_size
            ));
        }
        match self.roll.admit(*rank, Instant::now()) {
            true => Ok(()),
            false => Err(format!("rank {rank} has already joined")),
        }
    }

    /// Notifies each rank once that all have joined, and once how the job ends.
    fn notify_all(&mut self, is_last: bool) {
        let is_complete = self.roll.is_complete();
        let end = match self.roll.failure() {
            Some(failure) => Some(Message::Failure(failure.clone())),
            None => is_last.then(|| Message::Left(self.roll.entered(0))),
        };
        self.peers.sort_by_key(|peer| peer.rank == Some(0)); // last: its process may end as soon as it is notified
        for peer in self.peers.iter_mut().filter(|peer| peer.rank.is_some()) {
            if is_complete && !std::mem::replace(&mut peer.is_welcome, true) {
                let _ = peer.connection.send(&self.welcome);
            }
            if let Some(end) = &end
                && !std::mem::replace(&mut peer.is_notified, true)
            {
                let _ = peer.connection.send(end);
            }
        }
    }
}

/// Compares tokens in constant time.
fn is_same(token: &str, other: &str) -> bool {
    let pairs = token.bytes().zip(other.bytes());
    let difference = pairs.fold(0, |difference, (a, b)| black_box(difference | (a ^ b)));
    token.len() == other.len() && difference == 0
}
