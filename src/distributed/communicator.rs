//! The communicator: the ranks of a job, and their collectives.

#[cfg(feature = "cuda")]
use super::gpu_queue::GpuQueue;
use super::host::{HostBuffer, validate};
use super::host_queue::{Exchanged, HostQueue};
use super::membership::{Membership, TimeoutGuard};
use super::{Collective, Reduce, Shard};
use crate::hardware::device_name;
use crate::{Error, Result};
use candle_core::{Device, Tensor, WithDType};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

const OP: &str = "distributed::Communicator";

/// The ranks of a job, as seen by one of them. [`init`](super::init) creates it for a process. Clones share it.
///
/// All ranks must make the same calls in the same order, on tensors of the same shape and dtype. Collectives that
/// change a tensor change every tensor that shares its storage, and are not recorded by autograd.
///
/// On a GPU a collective runs on a separate stream, after earlier work on the device's stream. Later work on the
/// device's stream waits for it. The host does not wait: the call returns before the collective is done. On the CPU a
/// thread runs the collectives in order, and each call returns when its collective is done.
///
/// If a rank's process ends, if it hangs for longer than the timeout, or if it makes a different call than the others,
/// all ranks get [`Error::Rank`], which names that rank. On each rank a background thread receives the failure and
/// aborts NCCL; calls on the host that wait for the GPU then return. A call that waits for other ranks returns the
/// error. A collective on a GPU returns before it is done: if a rank fails meanwhile, its result is undefined, and the
/// next call of the communicator returns the error. So copy the result to the host, call [`check`](Self::check), and
/// only then use it. After the error weights are undefined: continue from a checkpoint.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::distributed::{Communicator, Reduce};
///
/// let communicator = Communicator::single_rank(&Device::Cpu); // a job of one
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// communicator.all_reduce(&x, Reduce::Mean)?;
/// assert_eq!(x.to_vec1::<f32>()?, [1.0, 2.0]);
/// assert_eq!((communicator.rank(), communicator.world_size()), (0, 1));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone)]
pub struct Communicator(Arc<Shared>);

struct Shared {
    shard: Shard,
    device: Device,
    // Dropped before the membership: collectives end before this rank says goodbye.
    backend: Backend,
    membership: Arc<Membership>,
}

pub(super) enum Backend {
    /// A job of one rank: collectives do nothing.
    SingleRank,
    Host(HostQueue),
    #[cfg(feature = "cuda")]
    Gpu(GpuQueue),
}

impl Communicator {
    pub(super) fn new(
        shard: Shard,
        device: Device,
        backend: Backend,
        membership: Membership,
    ) -> Self {
        Self(Arc::new(Shared {
            shard,
            device,
            backend,
            membership: Arc::new(membership),
        }))
    }

    /// Creates a job of one rank, for code that runs with or without several.
    pub fn single_rank(device: &Device) -> Self {
        Self::new(
            Shard::SINGLE,
            device.clone(),
            Backend::SingleRank,
            Membership::single_rank(),
        )
    }

    /// Returns this process's rank, from 0.
    pub fn rank(&self) -> usize {
        self.0.shard.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.shard.world_size
    }

    /// Returns this rank and the number of ranks.
    pub fn shard(&self) -> Shard {
        self.0.shard
    }

    /// Returns the device of this rank's tensors.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Reduces a contiguous tensor over all ranks, in place; all ranks get the same bits.
    ///
    /// # Errors
    /// [`Error::DType`] for a dtype that cannot be exchanged or reduced; [`Error::Placement`] for a tensor on another
    /// device; [`Error::Shape`] for one that is not contiguous; [`Error::Rank`].
    pub fn all_reduce(&self, tensor: &Tensor, reduce: Reduce) -> Result<()> {
        self.run(Collective::AllReduce(reduce), tensor)
    }

    /// Reduces a contiguous tensor over all ranks, in place on `root`; on other ranks it is undefined afterwards.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); [`Error::Config`] for a `root` that is not a rank.
    pub fn reduce(&self, tensor: &Tensor, reduce: Reduce, root: usize) -> Result<()> {
        self.run(Collective::Reduce { reduce, root }, tensor)
    }

    /// Copies a contiguous tensor of `root` to every rank, in place.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); [`Error::Config`] for a `root` that is not a rank.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.run(Collective::Broadcast { root }, tensor)
    }

    /// Concatenates the tensors (d0, ...) of all ranks along dimension 0: (world_size d0, ...).
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); [`Error::Shape`] for a scalar.
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Tensor> {
        let mut dims = tensor.dims().to_vec();
        let Some(first) = dims.first_mut() else {
            return Err(Error::shape(OP, "a scalar").must_be(
                "a tensor of at least one dimension, to gather along",
                "reshape it to (1)",
            ));
        };
        let rows = *first;
        *first *= self.world_size();
        let all = Tensor::zeros(dims, tensor.dtype(), tensor.device())?;
        all.slice_set(&tensor.contiguous()?, 0, self.rank() * rows)?;
        self.run(Collective::AllGather, &all)?;
        Ok(all)
    }

    /// Reduces a tensor (world_size d0, ...) over all ranks and returns this rank's part (d0, ...).
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); [`Error::Shape`] if the number of rows is not a multiple of the
    /// number of ranks.
    pub fn reduce_scatter(&self, tensor: &Tensor, reduce: Reduce) -> Result<Tensor> {
        let world_size = self.world_size();
        let rows = tensor.dims().first().copied().unwrap_or(0);
        if rows == 0 || !rows.is_multiple_of(world_size) {
            return Err(Error::shape(OP, format!("{:?}", tensor.dims())).must_be(
                format!("rows that {world_size} ranks divide"),
                "fill it up with rows of zeros",
            ));
        }
        let all = tensor.force_contiguous()?;
        self.run(Collective::ReduceScatter(reduce), &all)?;
        let rows = rows / world_size;
        Ok(all.narrow(0, self.rank() * rows, rows)?)
    }

    /// Waits until all ranks have called this, and their devices have finished earlier work.
    ///
    /// # Errors
    /// [`Error::Rank`].
    pub fn barrier(&self) -> Result<()> {
        self.mean(&[0.0]).map(drop)
    }

    /// Returns the means over all ranks of numbers that differ between ranks, such as losses or times.
    ///
    /// # Errors
    /// [`Error::Rank`].
    pub fn mean(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        let _timeout = self.apply_timeout("mean");
        let numbers = Tensor::from_slice(numbers, numbers.len(), self.device())?;
        self.all_reduce(&numbers, Reduce::Mean)?;
        let mean = numbers.to_vec1()?;
        self.check()?;
        Ok(mean)
    }

    /// Applies the [timeout](super::DistConfig::timeout) to this rank while the guard is alive. If it is alive for
    /// longer than that, the job fails. The error names the rank that failed, by the first of these rules that
    /// applies:
    ///
    /// - a rank whose heartbeats have stopped;
    /// - a rank that is *behind*: it has begun fewer collectives than another;
    /// - a rank that is in another collective than this one;
    /// - a rank that has left;
    /// - this rank itself, if no other rule applies.
    ///
    /// A planned step counts as one collective. On the CPU each collective inside of it is counted too. If a rank hangs
    /// in work of its own, such as its data loader, while the others wait in [`Step::run`](crate::compile::Step::run),
    /// it is behind.
    ///
    /// These calls are covered without a guard:
    ///
    /// - [`distributed::init`](super::init()), until all ranks have joined and NCCL has begun;
    /// - [`mean`](Self::mean), [`barrier`](Self::barrier), [`check_equal`](Self::check_equal), and on the CPU every
    ///   collective;
    /// - training steps of a planned [`Step`](crate::compile::Step), with or without the update, but not its planning;
    /// - [`Trainer::step`], with its batches, and with planning in the first step;
    /// - calls by which ranks begin to train together, where they compare their settings: [`Trainer::replicate`],
    ///   [`Trainer::shard_optimizer`], [`Trainer::fully_sharded`], [`Trainer::resume_fully_sharded`],
    ///   [`Replicated::new`](super::Replicated::new), [`Optimizer::shard`](crate::optim::Optimizer::shard);
    /// - each batch of [`Trainer::evaluate`], and its end, where losses are averaged;
    /// - [`Trainer::gather_model`], for each weight; the waits for other ranks in [`Trainer::save`]. Writing a file has
    ///   no timeout of its own, but other ranks wait for it: the timeout must be longer than the slowest write.
    ///
    /// On a GPU other collectives return before they are done, and no timeout covers the wait for their results. Hold a
    /// guard around your own collectives, around [`Step::forward`](crate::compile::Step::forward) with sharded weights,
    /// and around the reads of their results. Without it a rank that hangs there may never be noticed. A process that
    /// dies is always noticed.
    ///
    /// ```
    /// # use tallow::distributed::Communicator;
    /// # let ranks = Communicator::single_rank(&tallow::device("cpu")?);
    /// # let work = || Ok::<_, tallow::Error>(());
    /// let timeout = ranks.apply_timeout("my evaluation");
    /// work()?; // for example Step::forward and the read of its output
    /// drop(timeout);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// [`Trainer::step`]: crate::train::Trainer::step
    /// [`Trainer::evaluate`]: crate::train::Trainer::evaluate
    /// [`Trainer::save`]: crate::train::Trainer::save
    /// [`Trainer::gather_model`]: crate::train::Trainer::gather_model
    /// [`Trainer::replicate`]: crate::train::Trainer::replicate
    /// [`Trainer::shard_optimizer`]: crate::train::Trainer::shard_optimizer
    /// [`Trainer::fully_sharded`]: crate::train::Trainer::fully_sharded
    /// [`Trainer::resume_fully_sharded`]: crate::train::Trainer::resume_fully_sharded
    pub fn apply_timeout(&self, what: &str) -> TimeoutGuard<'_> {
        self.0.membership.enter_some(what)
    }

    /// Applies the timeout of [`apply_timeout`](Self::apply_timeout) to an operation that all ranks begin, which counts
    /// as a collective.
    pub(crate) fn enter(&self, what: &str) -> TimeoutGuard<'_> {
        self.0.membership.enter(what)
    }

    /// Checks that no rank is known to have failed.
    ///
    /// # Errors
    /// [`Error::Rank`], which names the rank that failed.
    pub fn check(&self) -> Result<()> {
        self.0.membership.check()?;
        #[cfg(feature = "cuda")]
        if let Backend::Gpu(queue) = &self.0.backend
            && let Err(error) = queue.check()
        {
            let problem = error.to_string();
            self.0.membership.fail_unless_known("NCCL", &problem);
            return self.0.membership.check();
        }
        Ok(())
    }

    /// Compares facts that must be the same on all ranks: a configuration, shapes, a digest of weights.
    ///
    /// # Errors
    /// [`Error::Rank`] on every rank, with the first rank whose facts differ from those of rank 0, and both values.
    pub fn check_equal(&self, what: &str, facts: &[(&str, String)]) -> Result<()> {
        let _timeout = self.apply_timeout("check_equal");
        let about = [("agreement", what)].into_iter();
        let facts = about.chain(facts.iter().map(|(name, value)| (*name, value.as_str())));
        let facts: Vec<String> = facts
            .map(|(name, value)| format!("{name}{VALUE}{value}"))
            .collect();
        let own = facts.join(FACT);
        // Ranks exchange only a digest, unless facts differ.
        let mut digest = DefaultHasher::new();
        own.hash(&mut digest);
        let digest = Tensor::new(&[[digest.finish() as i64, own.len() as i64]], self.device())?;
        let digests = self.all_gather(&digest)?.to_vec2::<i64>()?;
        self.check()?; // otherwise they are undefined
        if let Some(rank) = digests.iter().position(|digest| *digest != digests[0]) {
            let facts_of = |root: usize| {
                let (mut facts, length) = (own.clone().into_bytes(), digests[root][1] as usize);
                facts.resize(length, 0);
                let facts = Tensor::from_vec(facts, length, self.device())?;
                self.broadcast(&facts, root)?;
                Ok::<_, Error>(String::from_utf8_lossy(&facts.to_vec1::<u8>()?).into_owned())
            };
            let problem = difference(&facts_of(0)?, &facts_of(rank)?);
            let hint = "start all ranks with the same program, arguments and files";
            self.0.membership.fail(rank, what, &problem, hint);
        }
        self.check()
    }

    /// Runs a collective on a tensor. On a GPU its stream waits for the result, and the host does not.
    pub(super) fn run(&self, collective: Collective, tensor: &Tensor) -> Result<()> {
        self.check_tensor(collective, tensor)?;
        match &self.0.backend {
            Backend::SingleRank => Ok(()),
            Backend::Host(queue) => {
                let membership = Arc::clone(&self.0.membership);
                let exchanged = Exchanged::Tensor(tensor.clone());
                HostQueue::wait(queue.start(membership, collective, exchanged))
            }
            #[cfg(feature = "cuda")]
            Backend::Gpu(queue) => {
                let _timeout = self.0.membership.enter(collective.name());
                queue.run_on(collective, tensor)
            }
        }
    }

    /// Runs a collective on host memory to completion.
    ///
    /// # Errors
    /// [`Error::Rank`]; [`Error::Placement`] for a communicator of GPUs.
    pub(crate) fn run_on_host<T: WithDType>(
        &self,
        collective: Collective,
        memory: &mut [T],
    ) -> Result<()> {
        validate(collective, memory.len(), T::DTYPE, self.world_size())?;
        match &self.0.backend {
            Backend::SingleRank => Ok(()),
            Backend::Host(queue) => {
                let membership = Arc::clone(&self.0.membership);
                let exchanged = Exchanged::Memory(HostBuffer::of(memory));
                // The call returns only when the collective is done, so the memory stays borrowed.
                HostQueue::wait(queue.start(membership, collective, exchanged))
            }
            #[cfg(feature = "cuda")]
            Backend::Gpu(_) => Err(self.wrong_device("the CPU".into())),
        }
    }

    /// Returns NCCL's queue, for a job of several ranks on GPUs.
    #[cfg(feature = "cuda")]
    pub(crate) fn gpu_queue(&self) -> Option<&GpuQueue> {
        match &self.0.backend {
            Backend::Gpu(queue) => Some(queue),
            _ => None,
        }
    }

    fn check_tensor(&self, collective: Collective, tensor: &Tensor) -> Result<()> {
        let (elements, dtype) = (tensor.elem_count(), tensor.dtype());
        validate(collective, elements, dtype, self.world_size())?;
        if !tensor.is_contiguous() {
            return Err(Error::Shape {
                op: OP,
                expected: "a contiguous tensor".into(),
                got: format!("{:?} by strides {:?}", tensor.dims(), tensor.stride()),
                hint: "make it contiguous with contiguous()".into(),
            });
        }
        self.check_device(tensor.device())?;
        self.check()
    }

    /// Checks that the device is that of this rank's tensors.
    pub(crate) fn check_device(&self, device: &Device) -> Result<()> {
        match device.location() == self.device().location() {
            true => Ok(()),
            false => Err(self.wrong_device(device_name(device))),
        }
    }

    fn wrong_device(&self, got: String) -> Error {
        Error::placement(OP, got).must_be(
            format!(
                "tensors on this rank's device, {}",
                device_name(self.device())
            ),
            "make the model on Communicator::device",
        )
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", self.device())
            .finish_non_exhaustive()
    }
}

/// The separators between facts, and between a fact's name and its value.
const FACT: &str = "\u{1e}";
const VALUE: &str = "\u{1f}";

/// Describes the first fact that differs from that of rank 0.
fn difference(rank_0: &str, other: &str) -> String {
    let (mut rank_0, mut other) = (rank_0.split(FACT), other.split(FACT));
    loop {
        let [ours, theirs] = [rank_0.next(), other.next()];
        if ours != theirs || ours.is_none() {
            let [(name, ours), (same, theirs)] = [ours, theirs].map(|fact| {
                fact.and_then(|fact| fact.split_once(VALUE))
                    .unwrap_or(("nothing", ""))
            });
            return match name == same {
                true => format!("{name} is {theirs}, and {ours} on rank 0"),
                false => format!("compares {same}, and rank 0 {name}"),
            };
        }
    }
}
