//! Training on several ranks. A rank is a process; on GPUs each has a GPU of its own. In tests a rank may be a
//! [thread](threads()).
//!
//! A program calls [`distributed::init`](init()), which reads its place from the variables of torchrun, Slurm or mpirun
//! ([`Ranks::from_env`] lists them). It returns a [`Communicator`] with collectives by NCCL on NVIDIA GPUs, or by MPI
//! on CPUs. The rest of the program is written as for one process.
//!
//! ```no_run
//! use tallow::data::Tokens;
//! use tallow::distributed::{self, DistConfig, ReplicatedConfig};
//! use tallow::model::{TransformerConfig, TransformerLM};
//! use tallow::train::{TrainConfig, Trainer};
//!
//! # fn main() -> tallow::Result<()> {
//! // Without a launcher's variables this is a job of one rank: the same program runs alone.
//! let communicator =
//!     distributed::init(&DistConfig { device: "cuda".into(), ..Default::default() })?;
//! let (train, validation) = Tokens::bytes("input.txt")?.split(0.1)?;
//! let config = TransformerConfig { vocab_size: 256, ..TransformerConfig::preset("small")? };
//! let model = TransformerLM::new(&config, 0, communicator.device())?;
//! let config = TrainConfig {
//!     sequence_length: 256,
//!     accumulation: 16, // batches of a step on all ranks together: a multiple of their number
//!     ..Default::default()
//! };
//! let mut trainer = Trainer::new(model, config, train, validation)?;
//! trainer.replicate(&communicator, ReplicatedConfig::default())?;
//! while let Some(step) = trainer.step()? {
//!     if communicator.rank() == 0 {
//!         println!("{}: {:.3} nats", step.step, step.loss);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! ```sh
//! torchrun --no-python --nproc-per-node 2 target/release/my-program
//! ```
//!
//! Without torchrun, a program that calls [`launch()`] starts its own ranks on one host. Ranks on CPUs are started by
//! `mpirun --bind-to none`; by default it binds each rank to one core, which all of its threads then share.
//!
//! Ranks on several hosts must share a secret, which rank 0 requires of every process that connects. Ranks of `mpirun`
//! make one. With Slurm and torchrun set `TALLOW_JOB_TOKEN` to the same secret on each host. In a batch script of
//! Slurm:
//!
//! ```sh
//! export TALLOW_JOB_TOKEN=$(openssl rand -hex 16)    # srun passes it on
//! export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500
//! srun --kill-on-bad-exit=1 target/release/my-program
//! ```
//!
//! With torchrun, run this on each of two hosts ([the guide](crate::guide::several_hosts) explains Slurm and torchrun):
//!
//! ```sh
//! export TALLOW_JOB_TOKEN=...    # what `openssl rand -hex 16` has printed, the same on both
//! torchrun --nnodes 2 --node-rank $N --master-addr host-0 --nproc-per-node 8 --no-python target/release/my-program
//! ```
//!
//! Ranks train together in one of three ways:
//!
//! - [`Replicated`]: every rank has all weights, and gradients are averaged. Call [`Trainer::replicate`] after
//!   [`Trainer::new`] or [`Trainer::resume`], which put the full model on each GPU.
//! - [`Optimizer::shard`](crate::optim::Optimizer::shard): in addition the optimizer's state is sharded (ZeRO stage 1).
//!   Call
//!   [`Trainer::shard_optimizer`] after `replicate`.
//! - [`FullyShard`]: each rank has a shard of each weight, its gradient and its state. [`Trainer::fully_sharded`] or
//!   [`Trainer::resume_fully_sharded`] creates the run. The full model is never on one GPU.
//!
//! The bytes that one of `n` ranks sends in a step of a model with `P` parameters, where `f = (n - 1) / n`. They do not
//! depend on the number of micro-batches of a rank, except for the last row, which is for each micro-batch:
//!
//! | | step in f32 | step in bf16 |
//! |---|---|---|
//! | replicated: all-reduce of gradients in f32 | 8 f P | 8 f P, or about 4 f P with [`ReplicatedConfig::dtype`] bf16 |
//! | sharded optimizer: gradients to their owners in f32, then updated parameters to all | 8 f P | about 6 f P |
//! | fully sharded: parameters in forward and again in backward, gradients in f32 | at most 12 f P | at most about 8 f P |
//!
//! A step in bf16 sends the parameters of the last two rows in the dtype that is read: weight matrices in bf16,
//! embeddings and norms in f32. "At most", because fully sharded weights of the last bucket in forward are not gathered
//! again for backward. [`Plan::timeline`](crate::compile::Plan::timeline) returns the exact number of a plan,
//! `sent_bytes`, and [`Trainer::plan`](crate::train::Trainer::plan) the plan of a job.
//!
//! `Trainer` plans its steps itself. In a loop of your own, [`compile::Step`](crate::compile::Step) plans a step with
//! its exchanges. GPUs need the feature `cuda`, `Trainer` needs `train` (on by default).
//!
//! # Failures
//!
//! Each rank reports to rank 0 several times a second that it is alive, and the operation that it is in. A rank has
//! failed in each of these cases:
//!
//! - It panics, or its process ends without dropping the communicator: a crash, a signal, `std::process::exit`. The
//!   others notice immediately.
//! - It has dropped its communicator, for instance by returning from `main`, and another rank still waits for it in a
//!   call. That is noticed no later than the timeout. Ranks need not return from `main` together.
//! - Another rank has waited for it longer than [`DistConfig::timeout`], in a call that the timeout covers. Most calls
//!   that wait for other ranks are covered: [`Communicator::apply_timeout`] lists them, and how the failed rank is
//!   found. All ranks learn of it within a second after the timeout.
//!
//! All ranks are notified of the failure: their waits end with [`Error::Rank`], which names the rank. Ranks may be
//! suspended together and resumed (`scontrol suspend`): that time does not count.
//!
//! - After [`Error::Rank`] the weights are undefined, and later calls of the communicator return the same error. Return
//!   it from `main` (`?`). The process then ends with exit code 1, at most about 15 seconds after the error. Dropping
//!   the communicator takes this time: up to 10 seconds for NCCL's abort, and a few seconds for messages that are not
//!   sent yet. It does not wait for other ranks. Start all ranks again, and resume from a checkpoint.
//! - Under [`launch()`], print the error before the communicator is dropped. Rust prints the error of `main` after the
//!   drop, which may take longer than the 10 seconds that `launch` gives a rank after another one has ended with an
//!   error.
//! - Once a rank has exited with the error, [`launch()`], torchrun and mpirun also end a rank that hangs. `srun` does
//!   so with `--kill-on-bad-exit=1`.
//! - If a host loses power or its network, its connections stay open. The ranks on other hosts notice when a covered
//!   call exceeds the timeout, also if the lost host is that of rank 0. No rank replaces rank 0.
//! - tallow handles no signals in a rank. SIGTERM ends the rank without a save, and the other ranks see a failed rank.
//!   To save first, let a handler set a flag (for example by the crate `signal-hook`). After each step combine the
//!   flags of all ranks ([`Communicator::mean`]); if one is set, every rank calls `save` and stops.
//!   `examples/train/signals.rs` does this.
//!
//! [`Trainer::new`]: crate::train::Trainer::new
//! [`Trainer::resume`]: crate::train::Trainer::resume
//! [`Trainer::replicate`]: crate::train::Trainer::replicate
//! [`Trainer::shard_optimizer`]: crate::train::Trainer::shard_optimizer
//! [`Trainer::fully_sharded`]: crate::train::Trainer::fully_sharded
//! [`Trainer::resume_fully_sharded`]: crate::train::Trainer::resume_fully_sharded

mod collective;
mod communicator;
mod config;
mod fully_shard;
#[cfg(feature = "cuda")]
mod gpu_queue;
mod host;
mod host_queue;
mod init;
mod launch;
#[cfg_attr(not(all(feature = "cuda", feature = "mpi")), allow(dead_code))]
// each backend uses a part of it
mod membership;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(any(feature = "cuda", test))] // its tests need no GPU
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod nccl;
mod ranks;
mod replicated;
mod shard;
mod threads;

pub(crate) use collective::Collective;
pub use collective::Reduce;
pub use communicator::Communicator;
pub use config::{DistConfig, Exchange, FullyShardConfig, ReplicatedConfig};
pub use fully_shard::FullyShard;
pub use init::{init, threads};
#[cfg(unix)]
pub use launch::{FailedRank, launch};
pub use membership::TimeoutGuard;
pub use ranks::Ranks;
pub use replicated::Replicated;
pub use shard::Shard;

use crate::{Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Locks a mutex even if it is poisoned: data under this module's locks is always consistent.
fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread.
///
/// # Errors
/// [`Error::Order`] if the system cannot start it.
fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let thread = Builder::new().name(name.into()).spawn(run);
    thread.map_err(|error| Error::Order {
        op: "distributed::init",
        problem: format!("the system gives no thread ({name}): {error}"),
        hint: "raise the limit of threads (ulimit -u)".into(),
    })
}
