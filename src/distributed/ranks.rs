//! A process's place in its job.

use super::environment::{TOKEN, environment, read};
use super::store::is_loopback;
use crate::Result;
use std::fmt;

/// A shorter secret can be guessed.
const MIN_SECRET_BYTES: usize = 16;

/// A process's place in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ranks {
    /// This process, from 0 to `world_size`.
    pub rank: usize,
    /// Its number among the processes of its host: the GPU that it takes.
    pub local_rank: usize,
    /// How many processes there are.
    pub world_size: usize,
    /// Host and port where rank 0's store listens. Under mpirun and Slurm there need not be one.
    pub master: Option<(String, u16)>,
    /// Whether all ranks are known to be on this host.
    pub(crate) is_one_host: bool,
    /// What the processes of one job have in common.
    pub(crate) token: Token,
}

/// What the processes of one job have in common, and show when they connect.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Token {
    /// Only this job's ranks know it.
    Secret(String),
    /// The job's name: it keeps jobs on one port apart, but others know or guess it. May be empty.
    Name(String),
}

impl Token {
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Secret(text) | Self::Name(text) => text,
        }
    }
}

/// Without the secret: it would be printed with the rest of a place.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Secret(_) => f.write_str("Secret(..)"),
            Self::Name(name) => f.debug_tuple("Name").field(name).finish(),
        }
    }
}

/// A secret of a new job.
#[cfg_attr(not(any(unix, feature = "mpi")), allow(dead_code))]
pub(super) fn made_token() -> String {
    format!("{:032x}", rand::random::<u128>())
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
    /// - The first of mpirun, MPICH and Slurm that has set its variables counts: mpirun starts its helpers by `srun`.
    ///   Variables of the first row that are set too must agree with it, except under torchrun
    ///   (`TORCHELASTIC_RUN_ID`), whose place counts alone. A `LOCAL_RANK` that is set overrides the launcher's, for
    ///   ranks that see one GPU each.
    /// - A world size of 1 alone, or `MASTER_ADDR` alone, makes no job. Neither does a Slurm batch script, which has a
    ///   rank of its own, outside `srun`.
    /// - Rank 0's store listens at `MASTER_ADDR` and `MASTER_PORT`, which may be missing under mpirun and Slurm. Where
    ///   torchrun's agent has a store of its own on that port (`TORCHELASTIC_USE_AGENT_STORE=True`), ours listens on
    ///   the next one. If the launcher says that all ranks are on one host, it listens on 127.0.0.1 only.
    /// - `TALLOW_JOB_TOKEN` is the job's secret: rank 0 refuses every process that does not know it. `launch` and
    ///   mpirun's ranks make one. Ranks of torchrun and Slurm on several hosts need one that you set, the same for all:
    ///   at least 16 bytes, for example from `openssl rand -hex 16`. With torchrun export it on each host; with Slurm
    ///   export it in the batch script, from where `srun` passes it on. It is sent in the clear: it keeps strangers
    ///   out, but not those who can read the network's traffic. On one host `TORCHELASTIC_RUN_ID` or `SLURM_JOB_ID`
    ///   keeps jobs apart without it.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) naming the variable that is missing, or has a value that cannot be, or
    /// the two that contradict each other.
    pub fn from_env() -> Result<Option<Self>> {
        // What is not Unicode becomes text that no check passes, instead of a variable that seems missing.
        read(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    /// Checks that a store that other hosts reach, at `master`, has a secret.
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
                "a secret of at least {MIN_SECRET_BYTES} bytes, since other hosts reach rank 0's store at {host}:{port}"
            ),
            "make one with `openssl rand -hex 16`, and export the same TALLOW_JOB_TOKEN on each host before the ranks \
             start (with Slurm: in the batch script)",
        ))
    }
}
