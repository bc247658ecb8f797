//! Creation of a process's communicator.

#[cfg(feature = "mpi")]
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

#[cfg(feature = "mpi")]
use cpu::join_on_cpu;
#[cfg(feature = "cuda")]
use gpu::join_on_gpu;

use super::communicator::Backend;
use super::host_queue::HostQueue;
use super::membership::Membership;
use super::threads::group;
use super::{Communicator, DistConfig, Ranks};
use crate::{Error, Result};
use candle_core::Device;

/// Joins the job that this process was started in, and returns when all ranks have joined. Without the
/// [variables](Ranks::from_env) of torchrun, Slurm or mpirun it is a job of one rank.
///
/// GPUs use NCCL, which is loaded here: `libnccl.so.2` in a folder of `LD_LIBRARY_PATH`, or the file that
/// `TALLOW_NCCL_LIBRARY` names. (PyTorch's wheels contain one.) CPUs use MPI, in builds with the feature `mpi`; `mpirun` starts them.
///
/// ```no_run
/// use tallow::distributed::{self, DistConfig};
///
/// let config = DistConfig { device: "cuda".into(), ..Default::default() };
/// let communicator = distributed::init(&config)?;
/// println!("rank {} of {}", communicator.rank(), communicator.world_size());
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Config`] for invalid variables, or a missing secret; [`Error::Device`] for a missing device, or one without
/// collectives; [`Error::Order`] if NCCL or MPI cannot be used, or rank 0 refuses this rank; [`Error::Rank`] for ranks
/// that do not join in time.
pub fn init(config: &DistConfig) -> Result<Communicator> {
    match Ranks::from_env()? {
        Some(ranks) if ranks.world_size > 1 => join(ranks, config),
        Some(ranks) => Ok(Communicator::single_rank(&device_of(&ranks, config)?)),
        None => Ok(Communicator::single_rank(&crate::device(&config.device)?)),
    }
}

/// Creates the ranks of a job as threads of one process, in order, on the CPU: for tests, and to try out a strategy.
/// Each communicator is for a separate thread. Sums are in the order of the ranks. As with processes, different
/// settings are an error. No timeout applies.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::distributed::{self, Reduce};
///
/// let ranks = distributed::threads(3)?;
/// std::thread::scope(|scope| {
///     for communicator in ranks {
///         scope.spawn(move || -> tallow::Result<()> {
///             let x = Tensor::new(&[communicator.rank() as f32], &Device::Cpu)?;
///             communicator.all_reduce(&x, Reduce::Sum)?;
///             assert_eq!(x.to_vec1::<f32>()?, [3.0]);
///             Ok(())
///         });
///     }
/// });
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// [`Error::Order`] if the system starts no more threads.
pub fn threads(world_size: usize) -> Result<Vec<Communicator>> {
    let backends = group(world_size).into_iter();
    let ranks = backends.map(|backend| {
        let (queue, place) = HostQueue::new(|| Ok(backend))?;
        Ok(Communicator::new(
            place,
            Device::Cpu,
            Backend::Host(queue),
            Membership::single_rank(),
        ))
    });
    ranks.collect()
}

/// Returns the device of this rank.
fn device_of(ranks: &Ranks, config: &DistConfig) -> Result<Device> {
    match config.device.as_str() {
        "cuda" => crate::device(&format!("cuda:{}", ranks.local_rank)),
        other => crate::device(other),
    }
}

fn join(ranks: Ranks, config: &DistConfig) -> Result<Communicator> {
    let refuse = |problem: &str, hint: &str| {
        Err(Error::Device {
            name: config.device.clone(),
            problem: problem.into(),
            hint: hint.into(),
        })
    };
    match config.device.as_str() {
        "cpu" => join_on_cpu(ranks, config),
        "cuda" => join_on_gpu(ranks, config),
        name if name.starts_with("cuda:") => refuse(
            "every rank has a GPU of its own",
            "say cuda, which is the one of each rank's LOCAL_RANK",
        ),
        _ => refuse("ranks do not exchange there", "say cuda or cpu"),
    }
}

#[cfg(not(feature = "cuda"))]
fn join_on_gpu(ranks: Ranks, config: &DistConfig) -> Result<Communicator> {
    // Returns the error that this build has no CUDA.
    device_of(&ranks, config).map(|device| Communicator::single_rank(&device))
}

#[cfg(not(feature = "mpi"))]
fn join_on_cpu(_ranks: Ranks, config: &DistConfig) -> Result<Communicator> {
    Err(Error::Device {
        name: config.device.clone(),
        problem: "ranks on CPUs exchange by MPI, which this build is without".into(),
        hint: "build with --features mpi and start the ranks with mpirun".into(),
    })
}
