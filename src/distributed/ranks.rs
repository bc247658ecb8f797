//! A process's place in its job, and the environment variables of launchers.

use super::Shard;
use super::membership::is_loopback;
use crate::{Error, Result};
use std::fmt;
use std::net::TcpListener;

/// The fewest bytes of a secret: shorter ones can be guessed.
const MIN_SECRET_BYTES: usize = 16;

/// A process's place in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ranks {
    /// This process's number, less than `world_size`.
    pub rank: usize,
    /// Its number among the processes of its host, which is also the index of its GPU.
    pub local_rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Host and port at which ranks connect to rank 0. Ranks on GPUs require it; ranks on CPUs agree on one by MPI.
    pub master: Option<(String, u16)>,
    /// Whether all ranks are known to be on this host.
    pub(crate) is_one_host: bool,
    /// The text that the processes of this job share.
    pub(crate) token: Token,
}

/// The text that the processes of one job share, and send when they connect.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Token {
    /// Known only to this job's ranks.
    Secret(String),
    /// The job's name: it keeps jobs on one port apart, but others know or can guess it. May be empty.
    Name(String),
}

impl Token {
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Secret(text) | Self::Name(text) => text,
        }
    }
}

/// Omits the secret, which would be printed with the rest of a place.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret(_) => f.write_str("Secret(..)"),
            Self::Name(name) => f.debug_tuple("Name").field(name).finish(),
        }
    }
}

/// Returns the secret of a new job.
#[cfg_attr(not(any(unix, feature = "mpi")), allow(dead_code))]
pub(super) fn made_token() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Returns a port of this host that is free now.
#[cfg_attr(not(any(unix, feature = "mpi")), allow(dead_code))]
pub(super) fn free_port(host: &str) -> Result<u16> {
    let listener = TcpListener::bind((host, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    let address = address.map_err(|error| Error::io("listen", host, error))?;
    Ok(address.port())
}

impl Ranks {
    /// Reads the place from the environment; `None` if this process is not one of several.
    ///
    /// | started by | rank | local rank | world size |
    /// |---|---|---|---|
    /// | torchrun, `launch` | `RANK` | `LOCAL_RANK` | `WORLD_SIZE` |
    /// | Open MPI's `mpirun` | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_LOCAL_RANK` | `OMPI_COMM_WORLD_SIZE` |
    /// | MPICH, Intel MPI | `PMI_RANK` | `MPI_LOCALRANKID`, else the rank | `PMI_SIZE` |
    /// | Slurm's `srun` | `SLURM_PROCID` | `SLURM_LOCALID` | `SLURM_STEP_NUM_TASKS`, else `SLURM_NTASKS` |
    ///
    /// - Under torchrun (`TORCHELASTIC_RUN_ID` is set) only the first row counts.
    /// - Otherwise, if variables of more than one of the last three rows are set, the first of these rows counts.
    ///   (`mpirun` may start ranks through `srun`, so both can be set.) If `RANK` or `WORLD_SIZE` is set too, it must
    ///   have the same value as that row's. `LOCAL_RANK` may differ: it replaces that row's local rank, for ranks that
    ///   see one GPU each.
    /// - A world size of 1 without a rank, or `MASTER_ADDR` alone, does not make this process a rank: the result is
    ///   `None`. Under `torchrun --nproc-per-node 1` it is `Some`. Slurm's variables count only inside `srun`, not in the
    ///   batch script around it.
    /// - Ranks connect to rank 0 at `MASTER_ADDR` and `MASTER_PORT`. Rank 0 listens on that port, on all interfaces. If
    ///   the address is a loopback address, or the launcher's variables show that all ranks are on one host, it listens
    ///   on loopback alone. Ranks of torchrun and ranks on GPUs need `MASTER_ADDR` and `MASTER_PORT`. Ranks on CPUs
    ///   that `mpirun` or `srun` started may lack them: rank 0 then chooses a port. If torchrun's agent itself listens
    ///   on `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE=True`), rank 0 listens on the port after it.
    /// - `TALLOW_JOB_TOKEN` is the job's secret: rank 0 refuses every process that does not know it. `launch` and the
    ///   ranks of mpirun make one. Ranks of torchrun and Slurm on several hosts need one that you set, the same for
    ///   all: at least 16 bytes, for example from `openssl rand -hex 16`. With torchrun export it on each host; with
    ///   Slurm export it in the batch script, from where `srun` passes it on. It is sent unencrypted: it keeps
    ///   strangers out, but not those who can read the network's traffic. On one host you need
    ///   not set it: the job's `TORCHELASTIC_RUN_ID` or `SLURM_JOB_ID` keeps jobs apart.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) naming a variable that is missing or has an invalid value, or two that
    /// contradict each other.
    pub fn from_env() -> Result<Option<Self>> {
        // Text that is not Unicode then fails a check, instead of looking like a missing variable.
        read(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    #[cfg_attr(not(any(feature = "cuda", feature = "mpi")), allow(dead_code))]
    pub(super) fn shard(&self) -> Shard {
        Shard {
            rank: self.rank,
            world_size: self.world_size,
        }
    }

    /// Checks that the job has a secret if other hosts can reach rank 0 at this master.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) naming the variable to set.
    pub(super) fn check_secret(&self, (host, port): &(String, u16)) -> Result<()> {
        let got = match &self.token {
            Token::Secret(secret) if secret.len() >= MIN_SECRET_BYTES => return Ok(()),
            _ if is_loopback(host) => return Ok(()),
            Token::Secret(secret) if !secret.is_empty() => format!("{} bytes", secret.len()),
            _ => "nothing".into(),
        };
        Err(environment(TOKEN, got).must_be(
            format!(
                "a secret of at least {MIN_SECRET_BYTES} bytes, since other hosts reach rank 0 at {host}:{port}"
            ),
            "make one with `openssl rand -hex 16`, and export the same TALLOW_JOB_TOKEN on each host before the ranks \
             start (with Slurm: in the batch script)",
        ))
    }
}

/// The variables in which a launcher gives each rank its place.
#[derive(Clone, Copy)]
struct Launcher {
    rank: &'static str,
    local_rank: &'static str,
    world_size: &'static str,
    /// The variable with the number of ranks on this host.
    local_world_size: Option<&'static str>,
    /// The variable with the number of hosts, if that is set instead.
    hosts: Option<&'static str>,
}

const TORCHRUN: Launcher = Launcher {
    rank: "RANK",
    local_rank: "LOCAL_RANK",
    world_size: "WORLD_SIZE",
    local_world_size: Some("LOCAL_WORLD_SIZE"),
    hosts: None,
};
const OPEN_MPI: Launcher = Launcher {
    rank: "OMPI_COMM_WORLD_RANK",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    world_size: "OMPI_COMM_WORLD_SIZE",
    local_world_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    hosts: None,
};
/// MPICH, Intel MPI, and `srun --mpi=pmi2`.
const PMI: Launcher = Launcher {
    rank: "PMI_RANK",
    local_rank: "MPI_LOCALRANKID",
    world_size: "PMI_SIZE",
    local_world_size: Some("MPI_LOCALNRANKS"),
    hosts: None,
};
const SLURM: Launcher = Launcher {
    rank: "SLURM_PROCID",
    local_rank: "SLURM_LOCALID",
    world_size: "SLURM_NTASKS",
    local_world_size: None,
    hosts: Some("SLURM_NNODES"),
};
/// Slurm's counts of one `srun`, which may start fewer ranks than its allocation has tasks.
const SLURM_STEP: Launcher = Launcher {
    world_size: "SLURM_STEP_NUM_TASKS",
    hosts: Some("SLURM_STEP_NUM_NODES"),
    ..SLURM
};

const MASTER: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];
/// Set by torchrun, whatever started torchrun itself.
const TORCHRUN_ID: &str = "TORCHELASTIC_RUN_ID";
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// The job's secret.
const TOKEN: &str = "TALLOW_JOB_TOKEN";
/// Names of a job, which are not secret; the first that is set counts.
const JOB_NAMES: [&str; 2] = [TORCHRUN_ID, "SLURM_JOB_ID"];

/// More ranks than any job has; a limit of tables with a row per rank.
const MAX_WORLD_SIZE: usize = 1 << 16;
const MAX_HOST_BYTES: usize = 255;
const MAX_TOKEN_BYTES: usize = 256;
const START: &str = "start the ranks with torchrun, srun, mpirun, or with tallow's own launch";

/// Returns the variables of launchers around this process, which do not apply to the ranks that it starts.
#[cfg_attr(not(unix), allow(dead_code))] // used by `launch`
pub(super) fn outer_variables() -> impl Iterator<Item = &'static str> {
    let launchers = [TORCHRUN, OPEN_MPI, PMI, SLURM, SLURM_STEP].into_iter();
    let variables = launchers.flat_map(|launcher| {
        let counts = [launcher.local_world_size, launcher.hosts];
        let names = [launcher.rank, launcher.local_rank, launcher.world_size];
        names.into_iter().chain(counts.into_iter().flatten())
    });
    variables.chain([TORCHRUN_ID, AGENT_STORE])
}

/// Reads the place of this process from the variables of `lookup`; `None` if it is not one of several.
fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Ranks>> {
    let variables = Variables(lookup);
    let is_torchrun = variables.is_set(TORCHRUN.rank) && variables.is_set(TORCHRUN_ID);
    let launcher = variables.launcher().filter(|_| !is_torchrun);
    let torchrun = variables.first_of(&TORCHRUN);
    let outer = launcher.and_then(|launcher| variables.first_of(&launcher));
    let Some(because) = outer.or(torchrun) else {
        return Ok(None);
    };
    let most = MAX_WORLD_SIZE;
    let names = launcher.map(|launcher| [launcher.world_size, launcher.rank]);
    let [world_size, rank] = names.map_or([None; 2], |names| names.map(Some));
    let world_size = variables.agreed(TORCHRUN.world_size, world_size, 1..=most, because)?;
    let below = 0..=world_size - 1;
    let rank = variables.agreed(TORCHRUN.rank, rank, below.clone(), because)?;
    let local = launcher.map_or(TORCHRUN.local_rank, |launcher| launcher.local_rank);
    let local = match variables.is_set(TORCHRUN.local_rank) {
        true => TORCHRUN.local_rank,
        false => local,
    };
    let may_be_missing = world_size == 1 || local == PMI.local_rank;
    let local_rank = match variables.is_set(local) || !may_be_missing {
        true => variables.number(local, below, because)?,
        false => rank,
    };
    let mut master = variables.first_set(&MASTER);
    if launcher.is_none() {
        master = master.or(Some(because));
    }
    let is_one_host = variables.is_one_host(&launcher.unwrap_or(TORCHRUN), world_size);
    let mut master = match master {
        Some(because) if world_size > 1 => Some(variables.master(because)?),
        _ => None,
    };
    if let (Some((host, _)), true) = (&mut master, is_one_host) {
        *host = "127.0.0.1".into();
    }
    Ok(Some(Ranks {
        rank,
        local_rank,
        world_size,
        master,
        is_one_host,
        token: variables.token()?,
    }))
}

/// The environment, or that of a test.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn is_set(&self, name: &str) -> bool {
        self.0(name).is_some()
    }

    fn first_set(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().find(|name| self.is_set(name)).copied()
    }

    /// Returns the variable which shows that a launcher started this process as one of several, or as the only one.
    fn first_of(&self, launcher: &Launcher) -> Option<&'static str> {
        let several = || self.0(launcher.world_size).is_some_and(|size| size != "1");
        let place = self.first_set(&[launcher.rank, launcher.local_rank]);
        place.or_else(|| several().then_some(launcher.world_size))
    }

    /// Returns the innermost launcher of this process other than torchrun.
    fn launcher(&self) -> Option<Launcher> {
        let slurm = match self.is_set(SLURM_STEP.world_size) {
            true => SLURM_STEP,
            false => SLURM,
        };
        // A batch script has its job's number of tasks, but is not one of them; `srun` numbers its steps.
        let is_batch = self.0("ENVIRONMENT").as_deref() == Some("BATCH");
        let is_script = is_batch && !self.is_set("SLURM_STEP_ID");
        let is_task = self.is_set(slurm.rank) && self.is_set(slurm.world_size) && !is_script;
        let mpi = [OPEN_MPI, PMI].into_iter();
        let mut mpi = mpi.filter(|launcher| self.first_of(launcher).is_some());
        mpi.next().or(is_task.then_some(slurm))
    }

    /// Returns whether the launcher's variables show that all ranks are on this host.
    fn is_one_host(&self, launcher: &Launcher, world_size: usize) -> bool {
        let is = |name: Option<&str>, count: usize| {
            let value = name.and_then(&self.0);
            value.is_some_and(|value| value.parse() == Ok(count))
        };
        is(launcher.local_world_size, world_size) || is(launcher.hosts, 1)
    }

    /// Returns a variable that is required `because` another is set.
    fn text(&self, name: &'static str, because: &str) -> Result<String> {
        let missing =
            || environment(name, "nothing").must_be(format!("set, as {because} is"), START);
        self.0(name).ok_or_else(missing)
    }

    fn number(
        &self,
        name: &'static str,
        range: std::ops::RangeInclusive<usize>,
        because: &str,
    ) -> Result<usize> {
        let text = self.text(name, because)?;
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let (first, last) = range.into_inner();
            environment(name, text).must_be(format!("a number from {first} to {last}"), START)
        })
    }

    /// Returns the number in torchrun's variable or in the launcher's, which must agree if both are set.
    fn agreed(
        &self,
        torchrun: &'static str,
        launcher: Option<&'static str>,
        range: std::ops::RangeInclusive<usize>,
        because: &str,
    ) -> Result<usize> {
        let Some(launcher) = launcher else {
            return self.number(torchrun, range, because);
        };
        if !self.is_set(torchrun) {
            return self.number(launcher, range, because);
        }
        // torchrun's variables may be of a smaller job; only the launcher's number is checked against the range.
        let of_torchrun = self.number(torchrun, 0..=MAX_WORLD_SIZE, because)?;
        let of_launcher = self.number(launcher, range, because)?;
        match of_torchrun == of_launcher {
            true => Ok(of_launcher),
            false => Err(environment(torchrun, of_torchrun).must_be(
                format!("{of_launcher}, as {launcher} is"),
                "unset the one that does not belong to this process, in the script that starts it",
            )),
        }
    }

    fn master(&self, because: &str) -> Result<(String, u16)> {
        let host = self.text("MASTER_ADDR", because)?;
        let is_long = host.len() > MAX_HOST_BYTES;
        if host.is_empty()
            || is_long
            || host.contains(|c: char| c.is_whitespace() || c.is_control())
        {
            let error = environment("MASTER_ADDR", format!("{host:?}"));
            return Err(error.must_be("a host's name or address", "give it rank 0's host"));
        }
        // The agent's store uses the port itself.
        let agent = self.0(AGENT_STORE).as_deref() == Some("True");
        let last = usize::from(u16::MAX - u16::from(agent));
        let port = self.number("MASTER_PORT", 1..=last, because)? as u16 + u16::from(agent);
        Ok((host, port))
    }

    fn token(&self) -> Result<Token> {
        if self.is_set(TOKEN) {
            return self.short(TOKEN).map(Token::Secret);
        }
        match self.first_set(&JOB_NAMES) {
            Some(name) => self.short(name).map(Token::Name),
            None => Ok(Token::Name(String::new())),
        }
    }

    fn short(&self, name: &'static str) -> Result<String> {
        let token = self.text(name, name)?;
        if token.len() > MAX_TOKEN_BYTES {
            let error = environment(name, format!("{} bytes", token.len()));
            return Err(error.must_be(
                format!("at most {MAX_TOKEN_BYTES} bytes long"),
                "set TALLOW_JOB_TOKEN to something short, the same on all ranks",
            ));
        }
        if token.contains(char::is_control) {
            let error = environment(name, token.escape_debug());
            return Err(error.must_be(
                "without control characters",
                "set TALLOW_JOB_TOKEN to something printable, the same on all ranks",
            ));
        }
        Ok(token)
    }
}

fn environment(name: &'static str, got: impl std::fmt::Display) -> crate::error::Got {
    Error::config("environment", name, got)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn from(variables: &str) -> Result<Option<Ranks>> {
        let pairs: Vec<_> = (variables.split_whitespace())
            .map(|pair| pair.split_once('=').unwrap())
            .collect();
        read(|name| {
            let (_, value) = pairs.iter().find(|(key, _)| *key == name)?;
            Some((*value).to_string())
        })
    }

    fn job(variables: &str) -> Ranks {
        from(variables).unwrap().unwrap()
    }

    const TWO_OF_FOUR: &str =
        "RANK=2 LOCAL_RANK=0 WORLD_SIZE=4 MASTER_ADDR=node-0 MASTER_PORT=29500";
    const MPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=2";

    #[test]
    fn places_are_read() {
        assert_eq!(from("").unwrap(), None);
        assert_eq!(from("SLURM_JOB_ID=7").unwrap(), None);

        let torchrun = job(TWO_OF_FOUR);
        let place = |ranks: &Ranks| (ranks.rank, ranks.local_rank, ranks.world_size);
        assert_eq!(place(&torchrun), (2, 0, 4));
        assert_eq!(torchrun.master, Some(("node-0".into(), 29500)));
        assert_eq!(torchrun.token, Token::Name(String::new()));

        let agent = job(&format!("{TWO_OF_FOUR} TORCHELASTIC_USE_AGENT_STORE=True"));
        assert_eq!(agent.master.unwrap().1, 29501);

        let mpi = job(MPI);
        assert_eq!((place(&mpi), mpi.master), ((1, 1, 2), None));
        let mpi = job(&format!("{MPI} MASTER_ADDR=::1 MASTER_PORT=1"));
        assert_eq!(mpi.master, Some(("::1".into(), 1)));
        // torchrun under mpirun: the inner launcher started this process.
        let both = job(&format!("{MPI} {TWO_OF_FOUR} TORCHELASTIC_RUN_ID=none"));
        assert_eq!(both.rank, 2);

        let token = |more: &str| job(&format!("{TWO_OF_FOUR} {more}")).token;
        let name = |name: &str| Token::Name(name.into());
        let secret = |secret: &str| Token::Secret(secret.into());
        assert_eq!(token("SLURM_JOB_ID=7 TORCHELASTIC_RUN_ID=run"), name("run"));
        assert_eq!(token("SLURM_JOB_ID=7"), name("7"));
        assert_eq!(token("SLURM_JOB_ID=7 TALLOW_JOB_TOKEN="), secret(""));
        assert_eq!(
            token("TORCHELASTIC_RUN_ID=run TALLOW_JOB_TOKEN=s"),
            secret("s")
        );
    }

    const SLURM: &str = "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4";

    #[test]
    fn places_of_slurm_and_pmi_are_read() {
        let place = |variables: &str| {
            let ranks = from(variables).unwrap();
            ranks.map(|ranks| (ranks.rank, ranks.local_rank, ranks.world_size))
        };
        assert_eq!(place(SLURM), Some((3, 1, 4)));
        let ranks = job(SLURM);
        assert_eq!((ranks.master, ranks.is_one_host), (None, false));
        let with_master = format!("{SLURM} MASTER_ADDR=node-0 MASTER_PORT=29500");
        let master = job(&with_master).master;
        assert_eq!(master, Some(("node-0".into(), 29500)));
        // An srun of fewer tasks than the allocation, on one of its hosts.
        let step =
            "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=2 SLURM_NNODES=2";
        assert_eq!(place(step), Some((1, 1, 2)));
        let step = format!("{step} SLURM_STEP_NUM_NODES=1");
        assert!(job(&step).is_one_host);
        // srun in a batch script, and the script itself.
        let script = "ENVIRONMENT=BATCH SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4";
        assert_eq!(place(script), None);
        assert_eq!(place(&format!("{script} SLURM_STEP_ID=0")), Some((0, 0, 4)));
        // A shell of salloc.
        assert_eq!(place("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_NNODES=2"), None);
        assert_eq!(
            place("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1"),
            Some((0, 0, 1))
        );

        assert_eq!(place("PMI_RANK=1 PMI_SIZE=2"), Some((1, 1, 2)));
        assert_eq!(
            place("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1"),
            Some((3, 1, 4))
        );
        // mpirun's helpers are tasks of Slurm, and its ranks inherit their variables.
        assert_eq!(place(&format!("{MPI} {SLURM}")), Some((1, 1, 2)));
        // A script that sets torchrun's variables from Slurm's, and gives each rank one GPU.
        let same = format!("{SLURM} RANK=3 WORLD_SIZE=4 LOCAL_RANK=0");
        assert_eq!(place(&same), Some((3, 0, 4)));
        assert_eq!(place(&format!("{SLURM} WORLD_SIZE=4")), Some((3, 1, 4)));
    }

    #[rstest]
    #[case("MASTER_ADDR=node-0")]
    #[case("MASTER_PORT=29500")]
    #[case("MASTER_ADDR=node-0 MASTER_PORT=what")]
    #[case("WORLD_SIZE=1")]
    #[case("WORLD_SIZE=1 MASTER_ADDR=node-0")]
    #[case("OMPI_COMM_WORLD_SIZE=1")]
    fn a_single_process_is_no_job(#[case] variables: &str) {
        assert_eq!(from(variables).unwrap(), None);
    }

    #[test]
    fn a_job_of_one_has_a_place() {
        let alone = job("RANK=0 WORLD_SIZE=1 MASTER_ADDR=node-0");
        assert_eq!((alone.rank, alone.local_rank, alone.world_size), (0, 0, 1));
    }

    #[rstest]
    #[case(format!("{SLURM} RANK=0 WORLD_SIZE=4"), "RANK must be 3, as SLURM_PROCID is, got 0")]
    #[case(format!("{SLURM} {TWO_OF_FOUR}"), "RANK must be 3, as SLURM_PROCID is, got 2")]
    #[case(format!("{SLURM} WORLD_SIZE=1"), "WORLD_SIZE must be 4, as SLURM_NTASKS is, got 1")]
    #[case(format!("{MPI} {TWO_OF_FOUR}"), "WORLD_SIZE must be 2, as OMPI_COMM_WORLD_SIZE is, got 4")]
    #[case(
        "PMI_RANK=0 PMI_SIZE=2 RANK=1",
        "RANK must be 0, as PMI_RANK is, got 1"
    )]
    #[case("RANK=0", "WORLD_SIZE must be set, as RANK is")]
    #[case("RANK=0 WORLD_SIZE=2", "LOCAL_RANK must be set")]
    #[case("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "MASTER_ADDR must be set")]
    #[case(format!("{MPI} MASTER_ADDR=a"), "MASTER_PORT must be set, as MASTER_ADDR is")]
    #[case("WORLD_SIZE=2", "RANK must be set, as WORLD_SIZE is")]
    #[case("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK must be set")]
    #[case(with("RANK=4"), "RANK must be a number from 0 to 3, got 4")]
    #[case(with("RANK=-1"), "got -1")]
    #[case(with("RANK="), "RANK must be")]
    #[case(with("LOCAL_RANK=4"), "LOCAL_RANK must be a number from 0 to 3")]
    #[case(with("WORLD_SIZE=0"), "WORLD_SIZE must be a number from 1")]
    #[case(with("WORLD_SIZE=99999999999999999999"), "WORLD_SIZE must be")]
    #[case(
        with("MASTER_PORT=65536"),
        "MASTER_PORT must be a number from 1 to 65535"
    )]
    #[case(with("MASTER_PORT=65535") + " TORCHELASTIC_USE_AGENT_STORE=True", "1 to 65534")]
    #[case(with("MASTER_ADDR="), "MASTER_ADDR must be a host's name")]
    #[case(with(&format!("MASTER_ADDR={}", "x".repeat(256))), "MASTER_ADDR must be a host's name")]
    #[case(with(&format!("TALLOW_JOB_TOKEN={}", "x".repeat(257))), "TALLOW_JOB_TOKEN must be at most 256")]
    fn what_cannot_be_is_named(#[case] variables: impl Into<String>, #[case] words: &str) {
        let text = from(&variables.into()).unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }

    /// Returns [`TWO_OF_FOUR`] with a change.
    fn with(change: &str) -> String {
        let (name, _) = change.split_once('=').unwrap();
        let kept = TWO_OF_FOUR.split(' ');
        let kept = kept.filter(|pair| pair.split('=').next() != Some(name));
        kept.chain([change]).collect::<Vec<_>>().join(" ")
    }

    /// Ranks of one host meet on loopback, whatever name the host has.
    #[test]
    fn ranks_of_one_host_meet_on_loopback() {
        let here = format!("{TWO_OF_FOUR} LOCAL_WORLD_SIZE=4");
        assert_eq!(job(&here).master, Some(("127.0.0.1".into(), 29500)));
        let slurm = format!("{SLURM} SLURM_NNODES=1 MASTER_ADDR=node-0 MASTER_PORT=1");
        assert_eq!(job(&slurm).master, Some(("127.0.0.1".into(), 1)));
        let hosts = format!("{TWO_OF_FOUR} LOCAL_WORLD_SIZE=2 SLURM_NNODES=1");
        assert_eq!(job(&hosts).master, Some(("node-0".into(), 29500)));
    }

    #[rstest]
    #[case("", "node-0", "got nothing")]
    #[case("TALLOW_JOB_TOKEN=", "10.0.0.1", "got nothing")]
    #[case("TALLOW_JOB_TOKEN=0123456789abcde", "node-0", "got 15 bytes")]
    #[case("TORCHELASTIC_RUN_ID=0123456789abcdef", "::", "got nothing")]
    #[case("SLURM_JOB_ID=0123456789abcdef", "0.0.0.0", "got nothing")]
    fn a_rank_0_that_other_hosts_reach_has_a_secret(
        #[case] more: &str,
        #[case] host: &str,
        #[case] got: &str,
    ) {
        let check = |more: &str, host: &str| {
            let ranks = job(&format!("{TWO_OF_FOUR} {more}"));
            assert!(!format!("{ranks:?}").contains("0123456") || !more.contains("TOKEN"));
            ranks.check_secret(&(host.into(), 29500))
        };
        let text = check(more, host).unwrap_err().to_string();
        let secret = "TALLOW_JOB_TOKEN must be a secret of at least 16 bytes";
        for words in [secret, got, "openssl rand -hex 16", "each host"] {
            assert!(text.contains(words), "{text}");
        }
        check("TALLOW_JOB_TOKEN=0123456789abcdef", host).unwrap();
        for host in ["localhost", "127.0.0.1", "::1"] {
            check("", host).unwrap();
        }
    }
}
