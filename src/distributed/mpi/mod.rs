//! Ranks that are processes on CPUs: collectives by MPI, whose `mpirun` started them.
//!
//! What lives here: MPI's calls that a collective is made of ([`plan`](mod@plan)), how one is waited for
//! ([`library`]), and what they add with ([`operations`]).
//!
//! MPI does not say in which order it adds. Open MPI (libnbc, of 4.1 and 5.0) plans a collective that does not block
//! from the ranks and the count alone: a number is added up on one rank, in the order of a tree, and goes to the others
//! from there. So all ranks have the same bits, and so has every run of as many. Of hcoll and UCC, which take over
//! where they are installed, it is not known.

mod library;
mod operations;
mod plan;

use super::collective::{Collective, Reduce};
use super::host::{HostBackend, HostBuffer, of_dtype, validate};
use crate::{Error, Result};
use ::mpi::ffi;
use candle_core::DType;
use library::{run_to_its_end, start};
use operations::{Operations, datatype, make_means};
use plan::{Call, Step, plan};
use std::ffi::{c_int, c_void};

/// So many elements MPI is given at once. Those that it has received are there twice for a while, and larger pieces
/// were not faster.
const PIECE: usize = 1 << 20;

/// A process's way to the others. Dropping it ends MPI, which the ranks do together.
pub(crate) struct MpiBackend {
    rank: usize,
    world_size: usize,
    operations: Operations,
    /// Where MPI writes to, never the caller's memory: it may write after a collective has been given up.
    received: Vec<u64>,
    /// [`PIECE`], or a test's.
    pub(super) piece: usize,
    has_failed: bool,
}

// SAFETY: MPI has been told that any thread may call it, one at a time.
unsafe impl Send for MpiBackend {}

impl MpiBackend {
    /// Starts MPI, which a process can do once.
    ///
    /// # Errors
    /// [`Error::Order`] if it was started before, or serves one thread only.
    pub(crate) fn new() -> Result<Self> {
        let (rank, world_size) = start()?;
        Ok(Self {
            rank,
            world_size,
            operations: Operations::default(),
            received: Vec::new(),
            piece: PIECE,
            has_failed: false,
        })
    }

    /// What `root` says, on every rank: what the others say is not heard.
    ///
    /// # Errors
    /// As [`run`](HostBackend::run).
    pub(crate) fn tell(
        &mut self,
        root: usize,
        bytes: &[u8],
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Vec<u8>> {
        let mut broadcast = |bytes: &mut [u8]| {
            let buffer = HostBuffer {
                start: bytes.as_mut_ptr(),
                elements: bytes.len(),
                dtype: DType::U8,
            };
            self.run(Collective::Broadcast { root }, buffer, check)
        };
        let mut length = (bytes.len() as u64).to_ne_bytes();
        broadcast(&mut length)?;
        let mut told = bytes.to_vec();
        told.resize(u64::from_ne_bytes(length) as usize, 0);
        broadcast(&mut told)?;
        Ok(told)
    }

    fn run_step(
        &mut self,
        during: Collective,
        step: &Step,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let words = step.into.bytes().div_ceil(size_of::<u64>());
        if self.received.len() < words {
            self.received.resize(words, 0);
        }
        let into = self.received.as_mut_ptr();
        let (reduce, dtype) = (during.reduce(), step.into.dtype);
        let operation = match reduce {
            Some(reduce) => Some(self.operations.get(reduce, dtype)?),
            None => None,
        };
        let datatype = datatype(dtype)?;
        let begin = |request: *mut ffi::MPI_Request| {
            // SAFETY: `from` has the elements, and nobody writes to them; as many as are received have room; MPI has
            // been started.
            unsafe { begin(step, into.cast(), datatype, operation, request) }
        };
        run_to_its_end(self.rank, during.name(), begin, check)?;
        // SAFETY: MPI has received as many elements.
        unsafe { step.into.copy_from(into.cast()) };
        if reduce == Some(Reduce::Mean) {
            let make_means = of_dtype!(make_means as unsafe fn(HostBuffer, usize), dtype)?;
            // SAFETY: the dtype is the buffer's own.
            unsafe { make_means(step.into, self.world_size) };
        }
        Ok(())
    }
}

impl HostBackend for MpiBackend {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn run(
        &mut self,
        collective: Collective,
        buffer: HostBuffer,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let place = (self.rank, self.world_size);
        validate(collective, buffer.elements, buffer.dtype, place)?;
        if self.has_failed {
            return Err(Error::Order {
                op: "distributed::Communicator",
                problem: format!("{} comes after one that failed", collective.name()),
                hint: "start the job again, from its checkpoint".into(),
            });
        }
        self.has_failed = true; // unless it comes to its end
        for step in plan(collective, buffer, place, self.piece) {
            self.run_step(collective, &step, check)?;
        }
        self.has_failed = false;
        Ok(())
    }
}

impl Drop for MpiBackend {
    fn drop(&mut self) {
        match self.has_failed {
            // MPI would wait for ranks that do not come, and may write still.
            true => std::mem::forget(std::mem::take(&mut self.received)),
            // SAFETY: MPI was started, and has nothing left to do.
            false => drop(unsafe { ffi::MPI_Finalize() }),
        }
    }
}

/// Begins a call of MPI's.
///
/// # Safety
/// MPI has been started. `step.from` has its elements, of `datatype`, and there is room at `into` for those of
/// `step.into`, until the request is done; `operation` is for them.
unsafe fn begin(
    step: &Step,
    into: *mut c_void,
    datatype: ffi::MPI_Datatype,
    operation: Option<ffi::MPI_Op>,
    request: *mut ffi::MPI_Request,
) -> c_int {
    const TAG: c_int = 0;
    let from = step.from.start.cast::<c_void>();
    let (sent, received) = (step.from.elements as c_int, step.into.elements as c_int);
    let of = datatype;
    // SAFETY: the caller's promise.
    unsafe {
        let world = ffi::RSMPI_COMM_WORLD;
        let with = operation.unwrap_or(ffi::RSMPI_SUM); // a reduction has its own
        match step.call {
            Call::AllReduce(_) => ffi::MPI_Iallreduce(from, into, sent, of, with, world, request),
            Call::AllGather => ffi::MPI_Iallgather(from, sent, of, into, sent, of, world, request),
            Call::Broadcast { root } if received == 0 => {
                ffi::MPI_Ibcast(from, sent, of, root as c_int, world, request)
            }
            Call::Broadcast { root } => {
                ffi::MPI_Ibcast(into, received, of, root as c_int, world, request)
            }
            Call::Send { to } => ffi::MPI_Isend(from, sent, of, to as c_int, TAG, world, request),
            Call::Receive { from } => {
                ffi::MPI_Irecv(into, received, of, from as c_int, TAG, world, request)
            }
            Call::Barrier => ffi::MPI_Ibarrier(world, request),
        }
    }
}
