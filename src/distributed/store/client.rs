//! A rank's side of the store.

use super::connection::Connection;
use super::locked;
use super::protocol::{Hello, MAX_KEY, MAX_VALUE, REFUSED, Reply, Request, WELCOME};
use super::roll::seconds;
use crate::{Error, Result};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Between tries, doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(50);
/// For a host that does not answer at all.
const CONNECT: Duration = Duration::from_secs(5);

/// A connection to rank 0's store, tried until it listens.
///
/// # Errors
/// [`Error::Order`] if it refuses this rank, [`Error::Rank`] if there is none within `timeout`.
pub(crate) fn connect(
    master: &(String, u16),
    hello: &Hello,
    timeout: Duration,
) -> Result<Connection> {
    let began = Instant::now();
    let mut pause = FIRST_PAUSE;
    let at = || format!("{}:{}", master.0, master.1);
    loop {
        let left = timeout.saturating_sub(began.elapsed());
        let problem = match attempt(master, hello, left) {
            Ok(Answer::Welcome(connection)) => return Ok(connection),
            Ok(Answer::Refused(problem)) => {
                return Err(Error::Order {
                    op: "rendezvous",
                    problem: format!("the store at {} refuses rank {}: {problem}", at(), hello.rank),
                    hint: "give each job a MASTER_PORT of its own, and all its ranks the same program, WORLD_SIZE and \
                           TALLOW_JOB_TOKEN"
                        .into(),
                });
            }
            Ok(Answer::Strange) => "what answers there is no store of tallow's".into(),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                "it closed the connection".into()
            }
            Err(error) => error.to_string(),
        };
        if began.elapsed() >= timeout {
            let waited = seconds(timeout);
            return Err(Error::Rank {
                rank: 0,
                during: "rendezvous".into(),
                problem: format!(
                    "its store does not answer at {} for {waited}: {problem}",
                    at()
                ),
                hint: "is rank 0 started, on that host, and its port open to this one?".into(),
            });
        }
        sleep(pause);
        pause = LAST_PAUSE.min(pause * 2);
    }
}

enum Answer {
    Welcome(Connection),
    Refused(String),
    Strange,
}

fn attempt(master: &(String, u16), hello: &Hello, left: Duration) -> io::Result<Answer> {
    let began = Instant::now();
    let mut connection = Connection::new(open(master, left)?, left)?;
    connection.send_line(&hello.line())?;
    let answer = connection.line(|| began.elapsed() < left)?;
    Ok(match answer.strip_prefix(REFUSED) {
        Some(problem) => Answer::Refused(problem.into()),
        None if answer == WELCOME => Answer::Welcome(connection),
        None => Answer::Strange,
    })
}

/// The first of the host's addresses that takes the connection.
fn open(master: &(String, u16), left: Duration) -> io::Result<TcpStream> {
    let wait = left.clamp(FIRST_PAUSE, CONNECT);
    let mut last = ErrorKind::AddrNotAvailable.into();
    for address in (master.0.as_str(), master.1).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, wait) {
            Ok(stream) if is_own(&stream, address) => last = ErrorKind::ConnectionRefused.into(),
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A connection to a port of this host where nobody listens may get that very port for its own end, and meet itself.
fn is_own(stream: &TcpStream, address: SocketAddr) -> bool {
    stream.local_addr().is_ok_and(|own| own == address)
}

/// Keys and values of all ranks.
pub(crate) struct Client {
    /// `None` once an answer has not come: what comes later would be taken for another's.
    connection: Mutex<Option<Connection>>,
}

impl Client {
    /// Over a connection made for [`Purpose::Store`](super::protocol::Purpose).
    pub(crate) fn new(connection: Connection) -> Self {
        let connection = Mutex::new(Some(connection));
        Self { connection }
    }

    /// Gives `key` a value, or another one. `go_on` is asked while it waits, and its error is returned.
    ///
    /// # Errors
    /// [`Error::Data`] for a key or value that is too long, or one too many; [`Error::Rank`] if rank 0's process has
    /// ended.
    pub(crate) fn set(
        &self,
        key: &str,
        value: &[u8],
        go_on: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let refused = |what: &str, expected: String, length: usize| {
            let key: String = key.chars().take(80).collect();
            Err(Error::Data {
                what: format!("store, {what} of {key:?}"),
                expected,
                got: format!("{length} bytes"),
                hint: "the store is for what ranks need to meet; send data with a collective"
                    .into(),
            })
        };
        for (what, length, most) in [
            ("key", key.len(), MAX_KEY),
            ("value", value.len(), MAX_VALUE),
        ] {
            if length > most {
                return refused(what, format!("at most {most} bytes"), length);
            }
        }
        let set = Request::Set {
            key: key.into(),
            value: value.to_vec(),
        };
        match self.ask(&set, go_on)? {
            Reply::Done => Ok(()),
            Reply::Full(bound) => refused("value", bound, value.len()),
            _ => Err(lost("does not answer as a store does")),
        }
    }

    /// The value of `key`, waited for until a rank sets it. `go_on` as for [`set`](Self::set).
    ///
    /// # Errors
    /// [`Error::Rank`] if rank 0's process has ended.
    pub(crate) fn get(&self, key: &str, go_on: &dyn Fn() -> Result<()>) -> Result<Vec<u8>> {
        self.wait_for(&Request::Get { key: key.into() }, go_on)
    }

    /// As [`get`](Self::get), and the key has no value any more.
    ///
    /// # Errors
    /// [`Error::Rank`] if rank 0's process has ended.
    pub(crate) fn take(&self, key: &str, go_on: &dyn Fn() -> Result<()>) -> Result<Vec<u8>> {
        self.wait_for(&Request::Take { key: key.into() }, go_on)
    }

    fn wait_for(&self, request: &Request, go_on: &dyn Fn() -> Result<()>) -> Result<Vec<u8>> {
        let mut pause = FIRST_PAUSE;
        loop {
            match self.ask(request, go_on)? {
                Reply::Value(value) => return Ok(value),
                Reply::Absent => go_on()?,
                _ => return Err(lost("does not answer as a store does")),
            }
            // Not while the connection is held: other threads of this rank use it too.
            sleep(pause);
            pause = LAST_PAUSE.min(pause * 2);
        }
    }

    /// The ranks that have not come yet.
    ///
    /// # Errors
    /// [`Error::Rank`] if rank 0's process has ended.
    pub(crate) fn missing(&self, go_on: &dyn Fn() -> Result<()>) -> Result<Vec<usize>> {
        match self.ask(&Request::Missing, go_on)? {
            Reply::Missing(ranks) => Ok(ranks),
            _ => Err(lost("does not answer as a store does")),
        }
    }

    fn ask(&self, request: &Request, go_on: &dyn Fn() -> Result<()>) -> Result<Reply> {
        let mut held = locked(&self.connection);
        let mut connection = held.take().ok_or_else(|| lost("has not answered before"))?;
        let mut refusal = Ok(());
        let sent = connection.send(&request.encode());
        let answer = sent.and_then(|()| {
            connection.frame(|| {
                refusal = go_on();
                refusal.is_ok()
            })
        });
        refusal?;
        match answer.as_ref().map(|frame| Reply::decode(frame)) {
            Ok(Some(reply)) => {
                *held = Some(connection);
                Ok(reply)
            }
            Ok(None) => Err(lost("does not answer as a store does")),
            Err(error) => Err(lost(&format!("its connection has ended: {error}"))),
        }
    }
}

fn lost(problem: &str) -> Error {
    Error::Rank {
        rank: 0,
        during: "its store".into(),
        problem: problem.into(),
        hint: "its own output says more; start the job again".into(),
    }
}
