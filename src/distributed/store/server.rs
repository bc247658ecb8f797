//! Rank 0's side of the store: a thread that accepts, and one for each connection.

use super::connection::Connection;
use super::failure::Failure;
use super::locked;
use super::protocol::{Hello, MAGIC, Purpose, REFUSED, Reply, Request, WELCOME, escaped};
use super::roll::Roll;
use super::values::Values;
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::hint::black_box;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a stranger may take for its first line.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections without a first line, in addition to those that the ranks themselves may just be making.
const STRANGERS: usize = 64;
/// How long rank 0 waits, when it ends, for the others to hear of it.
const LINGER: Duration = Duration::from_secs(1);
const WRITE: Duration = Duration::from_secs(60);
/// What serves a connection needs little, and there are two for each rank.
const STACK_BYTES: usize = 256 << 10;

/// The store while it is served. Dropping it tells the ranks, for a second at most, and closes the port.
pub(crate) struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    token: String,
    world_size: usize,
    state: Mutex<State>,
    /// Connections that have not said who they are.
    strangers: AtomicUsize,
    /// Rank 0 ends: heartbeats are told so.
    is_ending: AtomicBool,
    is_closed: AtomicBool,
}

struct State {
    values: Values,
    /// The ranks whose store connection is open.
    stores: BTreeSet<usize>,
    roll: Roll,
}

impl Server {
    /// Serves until it is dropped. A heartbeat older than `silence` is a sign of trouble where ranks wait too long.
    ///
    /// # Errors
    /// [`Error::Order`] if the system gives no address or thread.
    pub(crate) fn start(
        listener: TcpListener,
        token: &str,
        world_size: usize,
        silence: Duration,
    ) -> Result<Self> {
        let state = State {
            values: Values::default(),
            stores: BTreeSet::new(),
            roll: Roll::new(world_size, silence),
        };
        let shared = Arc::new(Shared {
            token: escaped(token),
            world_size,
            state: Mutex::new(state),
            strangers: AtomicUsize::new(0),
            is_ending: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        });
        let start = || {
            let mut address = listener.local_addr()?;
            match address.ip() {
                IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
                IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
                _ => {}
            }
            let accepting = shared.clone();
            let acceptor = thread::Builder::new().name("tallow-store".into());
            Ok((
                address,
                acceptor.spawn(move || accept(&listener, &accepting))?,
            ))
        };
        let (address, acceptor) = start().map_err(|error: std::io::Error| Error::Order {
            op: "rendezvous",
            problem: format!("rank 0 cannot serve its store: {error}"),
            hint: "are there limits on the process's threads?".into(),
        })?;
        Ok(Self {
            shared,
            address,
            acceptor: Some(acceptor),
        })
    }

    /// Where rank 0 itself reaches it.
    pub(crate) fn master(&self) -> (String, u16) {
        (self.address.ip().to_string(), self.address.port())
    }

    /// Declares a failure, and waits for a second at most until all ranks have heard of it. Returns the first that was
    /// declared, which may be another.
    pub(crate) fn declare(&self, failure: Failure) -> Failure {
        let first = locked(&self.shared.state).roll.declare(failure).clone();
        self.linger();
        first
    }

    fn linger(&self) {
        let began = Instant::now();
        while !locked(&self.shared.state).roll.all_told() && began.elapsed() < LINGER {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.is_ending.store(true, Ordering::Release);
        self.linger();
        self.shared.is_closed.store(true, Ordering::Release);
        // Wakes the acceptor. If the system refuses, the thread stays, and nobody waits for it.
        let woken = TcpStream::connect_timeout(&self.address, LINGER);
        if let (Ok(_), Some(acceptor)) = (woken, self.acceptor.take()) {
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.is_closed() {
            return;
        }
        let Ok(stream) = stream else {
            thread::sleep(Duration::from_millis(50)); // out of file descriptors, say
            continue;
        };
        let stranger = Stranger::new(shared.clone());
        if shared.strangers.load(Ordering::Relaxed) <= STRANGERS + 2 * shared.world_size {
            let thread = thread::Builder::new()
                .name("tallow-store".into())
                .stack_size(STACK_BYTES);
            // Without a thread the connection is closed; ranks try again.
            let _ = thread.spawn(move || serve(stream, stranger));
        }
    }
}

/// Counts a connection as long as it is nobody's.
struct Stranger(Arc<Shared>);

impl Stranger {
    fn new(shared: Arc<Shared>) -> Self {
        shared.strangers.fetch_add(1, Ordering::Relaxed);
        Self(shared)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.strangers.fetch_sub(1, Ordering::Relaxed);
    }
}

fn serve(stream: TcpStream, stranger: Stranger) {
    let shared = stranger.0.clone();
    let Ok(mut connection) = Connection::new(stream, WRITE) else {
        return;
    };
    let began = Instant::now();
    let Ok(line) = connection.line(|| began.elapsed() < HANDSHAKE) else {
        return;
    };
    let Some(hello) = Hello::parse(&line) else {
        // A tallow of another protocol can read why. To others nothing is said.
        let magic = line.split(' ').next().unwrap_or_default();
        if magic.starts_with("tallow-store/") && magic != MAGIC {
            let _ = connection.send_line(&format!("{REFUSED}rank 0 speaks {MAGIC}, not this\n"));
        }
        return;
    };
    if let Err(problem) = shared.admit(&hello) {
        let _ = connection.send_line(&format!("{REFUSED}{problem}\n"));
        return;
    }
    drop(stranger);
    // What cannot be written shows at the next read.
    let _ = connection.send_line(&format!("{WELCOME}\n"));
    match hello.purpose {
        Purpose::Store => shared.serve_store(&mut connection, hello.rank),
        Purpose::Heartbeat => shared.serve_heartbeat(&mut connection, hello.rank),
    }
}

impl Shared {
    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Gives the rank its place, or says why not.
    fn admit(&self, hello: &Hello) -> std::result::Result<(), String> {
        let Hello {
            rank, world_size, ..
        } = *hello;
        // First of all: one who does not know the token learns nothing else.
        if !is_same(&hello.token, &self.token) {
            return Err("the job's token is another".into());
        }
        let version = env!("CARGO_PKG_VERSION");
        if hello.version != version {
            return Err(format!(
                "rank 0 runs tallow {version}, and this rank {}",
                hello.version.escape_default()
            ));
        }
        if world_size != self.world_size || rank >= world_size {
            return Err(format!(
                "rank 0 has a world size of {}, and this rank {world_size}",
                self.world_size
            ));
        }
        let mut state = locked(&self.state);
        let is_free = match hello.purpose {
            Purpose::Store => state.stores.insert(rank),
            Purpose::Heartbeat => state.roll.come(rank, Instant::now()),
        };
        is_free
            .then_some(())
            .ok_or_else(|| format!("rank {rank} is already there"))
    }

    fn serve_store(&self, connection: &mut Connection, rank: usize) {
        while let Ok(frame) = connection.frame(|| !self.is_closed()) {
            let mut state = locked(&self.state);
            let reply = match Request::decode(&frame) {
                Some(Request::Set { key, value }) => match state.values.set(rank, key, value) {
                    Ok(()) => Reply::Done,
                    Err(bound) => Reply::Full(bound),
                },
                Some(Request::Get { key }) => {
                    let value = state.values.get(&key).map(<[u8]>::to_vec);
                    value.map_or(Reply::Absent, Reply::Value)
                }
                Some(Request::Take { key }) => {
                    let value = state.values.take(&key);
                    value.map_or(Reply::Absent, Reply::Value)
                }
                Some(Request::Missing) => Reply::Missing(state.roll.missing()),
                _ => break,
            };
            drop(state);
            if connection.send(&reply.encode()).is_err() {
                break;
            }
        }
        locked(&self.state).stores.remove(&rank);
    }

    fn serve_heartbeat(&self, connection: &mut Connection, rank: usize) {
        loop {
            let frame = connection.frame(|| !(self.is_closed() || self.has_news_for(rank)));
            let mut state = locked(&self.state);
            match frame.as_ref().map(|frame| Request::decode(frame)) {
                Ok(Some(Request::Beat { doing, overdue })) => {
                    state.roll.beat(rank, doing, overdue, Instant::now());
                }
                Ok(Some(Request::Fail(failure))) => {
                    state.roll.declare(failure);
                }
                Ok(Some(Request::Goodbye(doing))) => return state.roll.leave(rank, doing),
                Ok(_) => return state.roll.end(rank, "sends what is no heartbeat"),
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    if self.is_closed() {
                        return;
                    }
                }
                Err(_) => return state.roll.end(rank, "its process has ended"),
            }
            let reply = self.end(&state).unwrap_or(Reply::Done);
            drop(state);
            // A rank that does not read has ended, or said goodbye meanwhile: the next read says.
            let _ = connection.send(&reply.encode());
            if reply != Reply::Done {
                locked(&self.state).roll.told(rank);
            }
        }
    }

    /// How the job ends, if it does.
    fn end(&self, state: &State) -> Option<Reply> {
        let entered = state.roll.entered(0);
        match state.roll.failure() {
            Some(failure) => Some(Reply::Failed(failure.clone())),
            None if self.is_ending.load(Ordering::Acquire) => Some(Reply::Left { entered }),
            None => None,
        }
    }

    /// Whether the job ends, and the rank has not been told how.
    fn has_news_for(&self, rank: usize) -> bool {
        let state = locked(&self.state);
        self.end(&state).is_some() && !state.roll.is_told(rank)
    }
}

/// Compares tokens in a time that does not depend on how much of them is right.
fn is_same(token: &str, other: &str) -> bool {
    let pairs = token.bytes().zip(other.bytes());
    let difference = pairs.fold(0, |difference, (a, b)| black_box(difference | (a ^ b)));
    token.len() == other.len() && difference == 0
}
