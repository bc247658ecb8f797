//! How a process comes to its communicator.

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

/// Joins the job that this process was started in, and returns when all ranks are there. Without the
/// [variables](Ranks::from_env) of torchrun, Slurm or mpirun it is a job of one rank.
///
/// GPUs exchange by NCCL, which is loaded here (`libnccl.so.2`, from `LD_LIBRARY_PATH` or where `TALLOW_NCCL_LIBRARY`
/// says; PyTorch's wheels bring one). CPUs exchange by MPI, in builds with the feature `mpi`; `mpirun` starts them.
///
/// # Errors
/// [`Error::Config`] for variables that cannot be, or a secret that is missing; [`Error::Device`] for a device that is
/// not there, or that ranks cannot exchange on; [`Error::Order`] where NCCL or MPI cannot be used, or rank 0 refuses
/// this one; [`Error::Rank`] for ranks that have not come in time.
pub fn init(config: &DistConfig) -> Result<Communicator> {
    match Ranks::from_env()? {
        Some(ranks) if ranks.world_size > 1 => join(ranks, config),
        Some(ranks) => Ok(Communicator::alone(&device_of(&ranks, config)?)),
        None => Ok(Communicator::alone(&crate::device(&config.device)?)),
    }
}

/// The ranks of a job that are threads of one process, in order, on the CPU: for tests, and to try a strategy out. Each
/// is for a thread of its own; sums are in the order of the ranks. Threads compare what processes compare: they refuse
/// to train with different settings.
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
/// A system that gives no more threads.
pub fn threads(world_size: usize) -> Result<Vec<Communicator>> {
    let backends = group(world_size).into_iter();
    let ranks = backends.map(|backend| {
        let (queue, place) = HostQueue::new(|| Ok(backend))?;
        Ok(Communicator::new(
            place,
            Device::Cpu,
            Backend::Host(queue),
            Membership::alone(),
        ))
    });
    ranks.collect()
}

/// The device of this rank.
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
    // It says that this build has no CUDA.
    device_of(&ranks, config).map(|device| Communicator::alone(&device))
}

#[cfg(not(feature = "mpi"))]
fn join_on_cpu(_ranks: Ranks, config: &DistConfig) -> Result<Communicator> {
    Err(Error::Device {
        name: config.device.clone(),
        problem: "ranks on CPUs exchange by MPI, which this build is without".into(),
        hint: "build with --features mpi and start the ranks with mpirun".into(),
    })
}
