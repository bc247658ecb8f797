//! Launcher of a job's ranks on this host: it relays their output and ends them together.
#![cfg(unix)]

mod children;
#[cfg(test)]
mod tests;

use super::ranks::{free_port, made_token, outer_variables};
use super::{locked, spawn};
use crate::{Error, Result};
use children::{Children, GRACE, Grace, Signals, end_with_parent};
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The first rank that ended with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedRank {
    /// Its rank.
    pub rank: usize,
    /// Its exit status.
    pub status: ExitStatus,
}

impl FailedRank {
    /// Returns the exit code for the launcher: the rank's own or, as in shells, 128 plus the number of its signal.
    pub fn exit_code(&self) -> u8 {
        let signal = self.status.signal().map(|signal| 128 + signal);
        let code = self.status.code().or(signal);
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
    }
}

impl fmt::Display for FailedRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {} was the first to fail, with {}",
            self.rank, self.status
        )
    }
}

/// Runs this program `world_size` times, with the same arguments and each rank's place in the environment
/// ([`Ranks::from_env`](super::ranks::Ranks::from_env) reads it). Waits until all have ended. Returns the first rank
/// that failed, or `None` if all succeeded.
///
/// Lines that ranks print stay whole. Each begins with its rank (`[1] `), except on rank 0's standard output, which is
/// unchanged. Rank 0 has this process's standard input, the others have none. Once a rank has ended with an error, the
/// others get SIGTERM after 10 seconds, and SIGKILL 5 seconds later. They also end with this process (on Linux, for
/// whatever reason it ends). SIGINT and SIGTERM are forwarded to them, and this process waits for them to end.
///
/// The ranks meet on a free port of 127.0.0.1, chosen at the start (another process could take it meanwhile). They
/// share this host's cores: each rank starts `RAYON_NUM_THREADS` threads or, if that is not set, one for each core.
/// With several ranks on CPUs set it to the number of cores divided by that of ranks.
///
/// The program starts two ranks of itself, each of which joins the job:
///
/// ```no_run
/// use tallow::distributed::{self, DistConfig, Ranks};
///
/// # fn main() -> tallow::Result<()> {
/// if Ranks::from_env()?.is_none() {
///     let failed = distributed::launch(2)?;
///     std::process::exit(failed.map_or(0, |failed| failed.exit_code().into()));
/// }
/// let config = DistConfig { device: "cuda".into(), ..Default::default() };
/// let communicator = distributed::init(&config)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Config`] for a world size of 0; [`Error::Io`] if the program cannot be started again.
pub fn launch(world_size: usize) -> Result<Option<FailedRank>> {
    let program =
        std::env::current_exe().map_err(|error| Error::io("find", "this program", error))?;
    let command = |_| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1));
        command
    };
    let (out, err) = (Mutex::new(io::stdout()), Mutex::new(io::stderr()));
    launch_commands(world_size, command, [Arc::new(out), Arc::new(err)], GRACE)
}

/// Launches any commands, with any sinks for standard output and error.
fn launch_commands(
    world_size: usize,
    command: impl Fn(usize) -> Command,
    [out, err]: [Sink; 2],
    grace: Grace,
) -> Result<Option<FailedRank>> {
    if world_size == 0 {
        let error = Error::config("launch", "world_size", world_size);
        return Err(error.must_be("positive", "1 is one process"));
    }
    let (port, token) = (free_port("127.0.0.1")?, made_token());

    let signals = Signals::listen();
    let mut children = Children::default();
    let (relaying, relayed) = channel();
    for rank in 0..world_size {
        let mut command = command(rank);
        let stdin = if rank == 0 {
            Stdio::inherit
        } else {
            Stdio::null
        };
        // Variables of a torchrun or srun around this process.
        outer_variables().for_each(|name| _ = command.env_remove(name));
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("LOCAL_WORLD_SIZE", world_size.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TALLOW_JOB_TOKEN", &token)
            .stdin(stdin())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        end_with_parent(&mut command);
        let started = children.start(&mut command);
        let (stdout, stderr) =
            started.map_err(|error| Error::io("start", command.get_program(), error))?;
        let prefix = format!("[{rank}] ");
        let out_prefix = if rank == 0 { "" } else { &prefix };
        relay(stdout, out_prefix.into(), out.clone(), relaying.clone())?;
        relay(stderr, prefix, err.clone(), relaying.clone())?;
    }
    drop(relaying);
    let failed = children.wait(&signals, grace);
    // Wait until all relays have ended and all lines are printed, but not forever: a process that a rank left behind
    // may keep its pipe open.
    let _ = relayed.recv_timeout(Duration::from_secs(2));
    failed.map_err(|error| Error::io("wait for", "the ranks", error))
}

/// The bytes after which a long line is split.
const MAX_LINE: u64 = 1 << 20;

/// The output of all ranks, written line by line.
type Sink = Arc<Mutex<dyn Write + Send>>;

/// Relays until the pipe or the sink is closed, then drops `relaying`.
fn relay(
    pipe: impl Read + Send + 'static,
    prefix: String,
    sink: Sink,
    relaying: Sender<()>,
) -> Result<()> {
    let copy = move || -> io::Result<()> {
        let _relaying = relaying;
        let mut pipe = BufReader::new(pipe);
        loop {
            let mut line = prefix.clone().into_bytes();
            let length = pipe.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)?;
            if length == 0 {
                return Ok(());
            }
            if !line.ends_with(b"\n") {
                line.push(b'\n');
            }
            let mut sink = locked(&sink);
            sink.write_all(&line)?;
            sink.flush()?;
        }
    };
    // A closed sink ends the relay; the rank then has a closed pipe, as it would alone.
    spawn("tallow-relay", copy).map(drop)
}
