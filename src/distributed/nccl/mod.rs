//! Collectives of ranks on GPUs with NCCL, on memory and streams of the device.
//!
//! NCCL reads its own environment variables: `NCCL_DEBUG=INFO` makes it log, and `NCCL_NVLS_ENABLE=0` disables NVLink's
//! multicast, which does not work on every machine.

mod library;
#[cfg(test)]
mod tests;

use super::collective::Collective;
use super::host::validate;
use super::{Shard, locked, spawn};
use crate::{Error, Result};
use candle_core::DType;
use library::{
    Code, Comm, Config, IN_PROGRESS, Nccl, Pointer, UniqueId, data_type, operation, refusal,
};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use std::{ptr, thread};

/// How often a waiting rank checks for failures.
const POLL: Duration = Duration::from_millis(20);

/// How long an abort waits for a call to return by itself.
const GRACE: Duration = Duration::from_millis(500);

/// How long the drop of a communicator waits for its abort: if the process exited meanwhile, the library would be
/// unloaded under it.
const ABORT: Duration = Duration::from_secs(10);

/// The NCCL communicator of a process's GPU. Any thread may use it; dropping it destroys the communicator.
pub(crate) struct NcclBackend {
    nccl: &'static Nccl,
    place: Shard,
    /// Null once it is aborted.
    communicator: AtomicPtr<c_void>,
    /// Locked during calls.
    in_call: Arc<Mutex<()>>,
    /// Disconnected once a running abort is done.
    aborting: Mutex<Option<Receiver<()>>>,
}

/// Returns the id of a new communicator, in hexadecimal digits, on rank 0. Other ranks get an empty id, and an error if
/// they have no NCCL.
///
/// # Errors
/// [`Error::Order`] if NCCL is not found, or cannot be used.
pub(crate) fn unique_id(rank: usize) -> Result<String> {
    let nccl = Nccl::get()?;
    if rank > 0 {
        return Ok(String::new());
    }
    let mut id = UniqueId([0; 128]);
    // SAFETY: as NCCL declares it.
    let answer = nccl.check(unsafe { (nccl.get_unique_id)(&mut id) });
    answer.map_err(|answer| refusal(&answer))?;
    Ok(hexadecimal(&id.0))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl NcclBackend {
    /// Joins the other ranks, on the GPU whose context `bind` makes current on the calling thread. Collectives use at
    /// most `max_ctas` multiprocessors. `check` is called while waiting for the others.
    ///
    /// # Errors
    /// [`Error::Order`] if NCCL is not found, or `id` is not from [`unique_id`]; [`Error::Config`] for an invalid
    /// `max_ctas`; [`Error::Rank`] if NCCL fails; those of `bind` and `check`.
    pub(crate) fn new(
        place: Shard,
        id: &str,
        max_ctas: Option<u32>,
        bind: impl FnOnce() -> Result<()> + Send + 'static,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Self> {
        Self::with(Nccl::get()?, place, id, max_ctas, bind, check)
    }

    fn with(
        nccl: &'static Nccl,
        place: Shard,
        id: &str,
        max_ctas: Option<u32>,
        bind: impl FnOnce() -> Result<()> + Send + 'static,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Self> {
        let digits = (0..id.len()).step_by(2).map(|at| id.get(at..at + 2));
        let bytes = digits.map_while(|digits| u8::from_str_radix(digits?, 16).ok());
        let wrong = |id: Vec<u8>| format!("expected an id of 128 bytes, got {}", id.len());
        let id = <[u8; 128]>::try_from(bytes.collect::<Vec<_>>());
        let id = UniqueId(id.map_err(|id| refusal(&wrong(id)))?);
        let number = |number: u32| match c_int::try_from(number) {
            Ok(number @ 1..) => Ok(number),
            _ => Err(Error::config("DistConfig", "nccl_max_ctas", number)
                .must_be("from 1 to 2^31 - 1", "None leaves it to NCCL")),
        };
        let max_ctas = max_ctas.map(number).transpose()?;
        let begin = move || {
            bind()?;
            let (mut communicator, mut config) = (ptr::null_mut(), Config::new(max_ctas));
            let (ranks, rank) = (place.world_size as c_int, place.rank as c_int);
            // SAFETY: as NCCL declares it.
            let code = unsafe {
                (nccl.comm_init_rank_config)(&mut communicator, ranks, id, rank, &mut config)
            };
            let answer = nccl.check(code);
            answer.map_err(|answer| failure(place.rank, "the beginning of NCCL", answer))?;
            Ok::<_, Error>(AtomicPtr::new(communicator))
        };
        // NCCL waits for other ranks forever: if one does not come, the thread is abandoned.
        let (begun, result) = channel();
        spawn("tallow-nccl", move || {
            if let Err(SendError(Ok(late))) = begun.send(begin()) {
                // SAFETY: nobody else has it.
                unsafe { (nccl.comm_abort)(late.into_inner()) };
            }
        })?;
        let communicator = loop {
            match result.recv_timeout(POLL) {
                Ok(result) => break result?,
                Err(RecvTimeoutError::Timeout) => check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(refusal("the thread that begins it has panicked"));
                }
            }
        };
        Ok(Self {
            nccl,
            place,
            communicator,
            in_call: Arc::default(),
            aborting: Mutex::default(),
        })
    }

    /// Starts a collective on a stream of this rank's GPU, in place on `elements` of a dtype at `pointer`. A mean is
    /// rounded as NCCL does it.
    ///
    /// # Errors
    /// [`Error::Rank`] if NCCL refuses, or was [aborted](Self::abort); those of [`validate`].
    pub(crate) fn run(
        &self,
        collective: Collective,
        pointer: Pointer,
        elements: usize,
        dtype: DType,
        stream: *mut c_void,
    ) -> Result<()> {
        validate(collective, elements, dtype, self.place.world_size)?;
        let of = data_type(dtype)?;
        if elements == 0 {
            return Ok(());
        }
        let part = elements / self.place.world_size;
        let own = pointer + (self.place.rank * part * dtype.size_in_bytes()) as u64;
        let peer = |rank: usize| rank as c_int;
        self.call(collective.name(), |nccl, comm| {
            // SAFETY: as NCCL declares them; the caller guarantees that memory and stream are the GPU's.
            unsafe {
                match collective {
                    Collective::AllReduce(reduce) => {
                        let with = operation(reduce);
                        (nccl.all_reduce)(pointer, pointer, elements, of, with, comm, stream)
                    }
                    Collective::Reduce { reduce, root } => {
                        let (with, root) = (operation(reduce), peer(root));
                        (nccl.reduce)(pointer, pointer, elements, of, with, root, comm, stream)
                    }
                    Collective::ReduceScatter(reduce) => {
                        let with = operation(reduce);
                        (nccl.reduce_scatter)(pointer, own, part, of, with, comm, stream)
                    }
                    Collective::AllGather => {
                        (nccl.all_gather)(own, pointer, part, of, comm, stream)
                    }
                    Collective::Broadcast { root } => {
                        let root = peer(root);
                        (nccl.broadcast)(pointer, pointer, elements, of, root, comm, stream)
                    }
                }
            }
        })
    }

    /// Checks the work on streams, as far as NCCL knows. A running call reports its own result, and is not waited for.
    ///
    /// # Errors
    /// [`Error::Rank`].
    pub(crate) fn async_error(&self) -> Result<()> {
        const DURING: &str = "a collective";
        let Some(in_call) = unless_locked(&self.in_call) else {
            return Ok(());
        };
        let mut state = 0;
        // SAFETY: as NCCL declares it.
        let ask = |nccl: &Nccl, comm| unsafe { (nccl.comm_get_async_error)(comm, &mut state) };
        self.call_in(in_call, DURING, ask)?;
        match state {
            IN_PROGRESS => Ok(()),
            state => self.answered(DURING, state),
        }
    }

    /// Aborts what is on streams and in calls, from any thread: they end, and later calls are refused.
    ///
    /// It does not wait: NCCL may wait for the other ranks to abort too.
    pub(crate) fn abort(&self) {
        let communicator = self.communicator.swap(ptr::null_mut(), Ordering::AcqRel);
        if communicator.is_null() {
            return;
        }
        let (nccl, in_call) = (self.nccl, Arc::clone(&self.in_call));
        let communicator = AtomicPtr::new(communicator);
        let (over, aborting) = channel();
        let abort = move || {
            let _over: Sender<()> = over;
            // A call that waits for a dead rank returns only because of the abort.
            let began = Instant::now();
            let mut free = unless_locked(&in_call);
            while free.is_none() && began.elapsed() < GRACE {
                thread::sleep(Duration::from_millis(1));
                free = unless_locked(&in_call);
            }
            // SAFETY: it was taken out of `communicator`, so nobody else starts a call with it, aborts or destroys it.
            unsafe { (nccl.comm_abort)(communicator.into_inner()) };
        };
        // If the thread cannot start, hanging work hangs until the process ends.
        drop(spawn("tallow-nccl", abort));
        *locked(&self.aborting) = Some(aborting);
    }

    /// Runs several collectives as one group: NCCL starts all of them together when `collectives` returns.
    ///
    /// # Errors
    /// Those of `collectives`; [`Error::Rank`] if NCCL refuses.
    pub(crate) fn group(&self, collectives: impl FnOnce() -> Result<()>) -> Result<()> {
        const DURING: &str = "a group of collectives";
        // SAFETY: as NCCL declares it. A group belongs to its thread.
        self.answered(DURING, unsafe { (self.nccl.group_start)() })?;
        let result = collectives();
        // After an abort the group is not ended: NCCL would use its communicator, which is freed. Every later call of
        // this communicator is refused, so nothing is added to the open group of this thread.
        // SAFETY: as NCCL declares it; called after an error of `collectives` too.
        let ended = self.call(DURING, |nccl, _| unsafe { (nccl.group_end)() });
        result.and(ended)
    }

    fn call(&self, during: &str, call: impl FnOnce(&Nccl, Comm) -> Code) -> Result<()> {
        self.call_in(locked(&self.in_call), during, call)
    }

    fn call_in(
        &self,
        _in_call: MutexGuard<()>,
        during: &str,
        call: impl FnOnce(&Nccl, Comm) -> Code,
    ) -> Result<()> {
        let communicator = self.communicator.load(Ordering::Acquire);
        if communicator.is_null() {
            let problem = "NCCL was aborted because a rank failed".into();
            return Err(failure(self.place.rank, during, problem));
        }
        self.answered(during, call(self.nccl, communicator))
    }

    fn answered(&self, during: &str, code: Code) -> Result<()> {
        let answer = self.nccl.check(code);
        answer.map_err(|answer| failure(self.place.rank, during, answer))
    }
}

impl Drop for NcclBackend {
    fn drop(&mut self) {
        let communicator = self.communicator.swap(ptr::null_mut(), Ordering::AcqRel);
        if !communicator.is_null() {
            // SAFETY: nobody else has it any more.
            unsafe { (self.nccl.comm_destroy)(communicator) };
        }
        let aborting = self.aborting.get_mut();
        if let Some(aborting) = aborting.unwrap_or_else(PoisonError::into_inner) {
            let _over = aborting.recv_timeout(ABORT);
        }
    }
}

fn unless_locked(mutex: &Mutex<()>) -> Option<MutexGuard<'_, ()>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn failure(rank: usize, during: &str, problem: String) -> Error {
    Error::Rank {
        rank,
        during: during.into(),
        problem,
        hint: "set NCCL_DEBUG=WARN for details; continue from a checkpoint".into(),
    }
}
