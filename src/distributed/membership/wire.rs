//! Messages between ranks and rank 0's hub: lines of fields over TCP.

use super::roll::{Failure, Progress, seconds};
use crate::{Error, Result};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a rank waits for a message before it does other work, and the interval at which the hub reads.
pub(super) const TICK: Duration = Duration::from_millis(25);
/// Time limit for a host that does not answer a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// The first pause between attempts to connect, and the last; it doubles in between.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];
const MAX_LINE: usize = 64 << 10;
/// The separator of fields, which no text contains, and the character that replaces a newline.
pub(super) const SEPARATOR: &str = "\u{1f}";
const NEWLINE: &str = "\u{1e}";

/// A message. Ranks begin with `Hello`, then send `Beat`, `Failure` and `Goodbye`. The hub answers `Hello` with
/// `Refused` or `Ack`, and each `Beat` with `Ack`; it sends the others once, unasked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Hello(Hello),
    Refused(String),
    Ack,
    /// All ranks have joined. The text is from rank 0.
    Welcome(String),
    Beat(Progress),
    /// The job cannot continue.
    Failure(Failure),
    Goodbye(Progress),
    /// Rank 0 ends normally, after it has entered this many operations of all ranks.
    Left(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// The crate's version.
    pub version: String,
    pub rank: usize,
    pub world_size: usize,
    pub token: String,
}

impl Hello {
    pub(super) fn new(rank: usize, world_size: usize, token: &str) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            rank,
            world_size,
            token: token.into(),
        }
    }
}

impl Message {
    pub(super) fn line(&self) -> String {
        let s = SEPARATOR;
        let progress = |kind: &str, progress: &Progress| {
            let inside = progress.inside.map(|time| time.as_millis().to_string());
            let (inside, what) = (inside.unwrap_or_default(), &progress.what);
            format!(
                "{kind}{s}{}{s}{}{s}{inside}{s}{what}",
                progress.entered, progress.number
            )
        };
        let fields = match self {
            Self::Hello(hello) => {
                let (version, rank, token) = (&hello.version, hello.rank, &hello.token);
                format!(
                    "tallow{s}{version}{s}{rank}{s}{}{s}{token}",
                    hello.world_size
                )
            }
            Self::Refused(problem) => format!("refused{s}{problem}"),
            Self::Ack => "heard".into(),
            Self::Welcome(text) => format!("welcome{s}{text}"),
            Self::Beat(own) => progress("beat", own),
            Self::Goodbye(own) => progress("goodbye", own),
            Self::Failure(failure) => {
                format!("failure{s}{}{s}{}", failure.rank, failure.texts.join(s))
            }
            Self::Left(entered) => format!("left{s}{entered}"),
        };
        fields.replace('\n', NEWLINE) + "\n"
    }

    /// Parses a [`line`](Self::line) without its newline. `None` for a line that is not a message.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let line = line.replace(NEWLINE, "\n");
        let fields: Vec<&str> = line.split(SEPARATOR).collect();
        Some(match fields[..] {
            ["tallow", version, rank, world_size, token] => Self::Hello(Hello {
                version: version.into(),
                rank: rank.parse().ok()?,
                world_size: world_size.parse().ok()?,
                token: token.into(),
            }),
            ["refused", problem] => Self::Refused(problem.into()),
            ["heard"] => Self::Ack,
            ["welcome", text] => Self::Welcome(text.into()),
            [kind @ ("beat" | "goodbye"), entered, number, inside, what] => {
                let inside =
                    (!inside.is_empty()).then(|| inside.parse().map(Duration::from_millis));
                let progress = Progress {
                    entered: entered.parse().ok()?,
                    what: what.into(),
                    number: number.parse().ok()?,
                    inside: inside.transpose().ok()?,
                };
                let message = if kind == "beat" {
                    Self::Beat
                } else {
                    Self::Goodbye
                };
                message(progress)
            }
            ["failure", rank, during, problem, hint] => {
                Self::Failure(Failure::new(rank.parse().ok()?, during, problem, hint))
            }
            ["left", entered] => Self::Left(entered.parse().ok()?),
            _ => return None,
        })
    }
}

pub(super) struct Connection {
    stream: TcpStream,
    /// Received bytes of the next messages.
    received: Vec<u8>,
    /// Bytes that could not be sent yet.
    unsent: Vec<u8>,
}

impl Connection {
    /// Wraps a stream. [`receive`](Self::receive) waits `wait` for a message; with `None` it never blocks.
    pub(super) fn new(stream: TcpStream, wait: Option<Duration>) -> io::Result<Self> {
        stream.set_nonblocking(wait.is_none())?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(wait)?;
        stream.set_write_timeout(Some(CONNECT))?;
        Ok(Self {
            stream,
            received: Vec::new(),
            unsent: Vec::new(),
        })
    }

    /// Sends a message, or as much as the system accepts now; [`receive`](Self::receive) sends the rest.
    pub(super) fn send(&mut self, message: &Message) -> io::Result<()> {
        self.unsent.extend(message.line().as_bytes());
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => {}
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => return Ok(()),
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Returns the next message; `None` if none has arrived.
    ///
    /// # Errors
    /// `UnexpectedEof` if the other side has closed the connection, `InvalidData` for a line that is not a message, or
    /// the system's error.
    pub(super) fn receive(&mut self) -> io::Result<Option<Message>> {
        let mut chunk = [0; 4 << 10];
        let _ = self.flush(); // an ended connection shows below, after received data
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                let message = Message::parse(String::from_utf8_lossy(&line[..end]).as_ref());
                return message
                    .map(Some)
                    .ok_or_else(|| ErrorKind::InvalidData.into());
            }
            if self.received.len() > MAX_LINE {
                return Err(ErrorKind::InvalidData.into());
            }
            match self
                .stream
                .read(&mut chunk)
                .map_err(|error| (error.kind(), error))
            {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend(&chunk[..count]),
                Err((ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted, _)) => {
                    return Ok(None);
                }
                Err((_, error)) => return Err(error),
            }
        }
    }
}

/// Connects to rank 0's hub, as soon as it listens.
///
/// # Errors
/// [`Error::Order`] if it refuses this rank, [`Error::Rank`] if it does not answer within `timeout`.
pub(super) fn connect(
    master: &(String, u16),
    hello: Hello,
    timeout: Duration,
) -> Result<Connection> {
    let began = Instant::now();
    let at = format!("{}:{}", master.0, master.1);
    let rank = hello.rank;
    let hello = Message::Hello(hello);
    let [mut pause, last_pause] = PAUSES;
    loop {
        let left = timeout.saturating_sub(began.elapsed());
        let problem = match attempt(master, &hello, left) {
            Ok((connection, Message::Ack)) => return Ok(connection),
            Ok((_, Message::Refused(problem))) => {
                return Err(Error::order(
                    "rendezvous",
                    format!("rank 0 at {at} refuses rank {rank}: {problem}"),
                    "give each job a MASTER_PORT of its own, and all its ranks the same program, WORLD_SIZE and \
                           TALLOW_JOB_TOKEN",
                ));
            }
            Ok(_) => "another program answers there".into(),
            Err(error) => match error.kind() {
                ErrorKind::InvalidData => "another program answers there".into(),
                ErrorKind::UnexpectedEof => "it closed the connection".into(),
                _ => error.to_string(),
            },
        };
        if began.elapsed() >= timeout {
            let waited = seconds(timeout);
            return Err(Error::Rank {
                rank: 0,
                during: "rendezvous".into(),
                problem: format!("has not answered at {at} for {waited}: {problem}"),
                hint: "is rank 0 started, on that host, and its port open to this one?".into(),
            });
        }
        sleep(pause);
        pause = last_pause.min(pause * 2);
    }
}

fn attempt(
    master: &(String, u16),
    hello: &Message,
    left: Duration,
) -> io::Result<(Connection, Message)> {
    let began = Instant::now();
    let mut connection = Connection::new(open(master, left)?, Some(TICK))?;
    connection.send(hello)?;
    loop {
        if let Some(answer) = connection.receive()? {
            return Ok((connection, answer));
        }
        if began.elapsed() > left {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}

/// Connects to the first of the host's addresses that accepts.
fn open(master: &(String, u16), left: Duration) -> io::Result<TcpStream> {
    let wait = left.clamp(PAUSES[0], CONNECT);
    let mut last = ErrorKind::AddrNotAvailable.into();
    for address in (master.0.as_str(), master.1).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, wait) {
            // A connection to a port of this host where nobody listens may get that very port, and connect to itself.
            Ok(stream) if stream.local_addr().is_ok_and(|own| own == address) => {
                last = ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Opens the socket at which rank 0's hub listens.
///
/// If `master` is loopback by name, the socket listens only there, so that other hosts cannot reach a job of one host.
/// Otherwise it listens on all interfaces: the name by which others reach rank 0 is not always one of its addresses (in
/// a container), and on some hosts it resolves to loopback locally.
///
/// # Errors
/// [`Error::Order`] with the system's error.
pub(super) fn listen(master: &(String, u16)) -> Result<TcpListener> {
    let (host, port) = (master.0.as_str(), master.1);
    let bind = || {
        let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
        let address = addresses
            .iter()
            .find(|address| address.is_ipv4())
            .or(addresses.first());
        match (is_loopback(host), address) {
            (true, Some(address)) if address.ip().is_loopback() => TcpListener::bind(address),
            (false, Some(SocketAddr::V4(_))) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
            (false, Some(SocketAddr::V6(_))) => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)),
            _ => Err(ErrorKind::AddrNotAvailable.into()), // an unusual /etc/hosts
        }
    };
    bind().map_err(|error| Error::Order {
        op: "rendezvous",
        problem: format!("rank 0 cannot listen at {host}:{port}: {error}"),
        hint: "MASTER_ADDR must be rank 0's host, and MASTER_PORT a port that is free there".into(),
    })
}

/// Returns whether a host name is this host's loopback by name, which other hosts cannot reach.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}
