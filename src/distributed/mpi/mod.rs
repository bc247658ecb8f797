//! Collectives of ranks that are processes on CPUs, with MPI; `mpirun` starts them.
//!
//! MPI reduces with this crate's arithmetic, since it supports neither f16 nor bf16, and does not define the maximum of
//! a number and NaN. It does not specify the order of additions. Open MPI (libnbc, of 4.1 and 5.0) plans a non-blocking
//! collective from ranks and count alone: each number is summed on one rank, in the order of a tree, and is sent to the
//! others from there. All ranks therefore have the same bits, and so has every run with the same number of ranks. For
//! hcoll and UCC, which are used instead where they are installed, this is not known.

mod library;
mod plan;

use super::Shard;
use super::collective::{Collective, Reduce};
use super::host::{HostBackend, HostBuffer, not_exchanged, not_reduced, reduce_range};
use crate::{Error, Result};
use ::mpi::ffi;
use candle_core::{DType, WithDType};
use half::{bf16, f16};
use library::{answered, run_to_its_end, start};
use plan::{Step, plan};
use std::ffi::{c_int, c_void};

/// The most elements of one MPI call. Received elements exist twice for a while, and larger pieces were not faster.
const PIECE: usize = 1 << 20;

/// A process's connection to the others. Dropping it ends MPI, which all ranks do together.
pub(crate) struct MpiBackend {
    place: Shard,
    operations: Operations,
    /// The memory that MPI writes to. It is never the caller's, since MPI may write after a collective has been given
    /// up.
    received: Vec<u64>,
    has_failed: bool,
}

// SAFETY: MPI was started such that any thread may call it, one at a time.
unsafe impl Send for MpiBackend {}

impl MpiBackend {
    /// Starts MPI, which a process can do only once.
    ///
    /// # Errors
    /// [`Error::Order`] if it was started before, or serves one thread only.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            place: start()?,
            operations: Operations::default(),
            received: Vec::new(),
            has_failed: false,
        })
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
            // SAFETY: `from` has the elements, and nobody writes to them; `into` has room for those received; MPI has
            // been started.
            unsafe { begin(step, into.cast(), datatype, operation, request) }
        };
        run_to_its_end(self.place.rank, during.name(), begin, check)?;
        // SAFETY: MPI has received this many elements.
        unsafe { step.into.copy_from(into.cast()) };
        if reduce == Some(Reduce::Mean) {
            let (sums, n) = (step.into, self.place.world_size);
            // SAFETY: the buffer belongs to the caller, who waits.
            unsafe { reduce_range(Reduce::Sum, &[sums], 0..sums.elements, &[sums], n)? };
        }
        Ok(())
    }
}

impl HostBackend for MpiBackend {
    fn place(&self) -> Shard {
        self.place
    }

    fn run(
        &mut self,
        collective: Collective,
        buffer: HostBuffer,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        if self.has_failed {
            return Err(Error::Order {
                op: "distributed::Communicator",
                problem: format!("{} comes after one that failed", collective.name()),
                hint: "start the job again, from its checkpoint".into(),
            });
        }
        self.has_failed = true; // until it completes
        for step in plan(collective, buffer, self.place, PIECE) {
            self.run_step(collective, &step, check)?;
        }
        self.has_failed = false;
        Ok(())
    }
}

impl Drop for MpiBackend {
    fn drop(&mut self) {
        match self.has_failed {
            // MPI would wait for ranks that do not come, and may still write.
            true => std::mem::forget(std::mem::take(&mut self.received)),
            // SAFETY: MPI was started, and has nothing left to do.
            false => drop(unsafe { ffi::MPI_Finalize() }),
        }
    }
}

/// Begins an MPI call.
///
/// # Safety
/// MPI must have been started. Until the request is done, `step.from` must have its elements, of `datatype`, and `into`
/// must have room for those of `step.into`. `operation` must be for `datatype`.
unsafe fn begin(
    step: &Step,
    into: *mut c_void,
    datatype: ffi::MPI_Datatype,
    operation: Option<ffi::MPI_Op>,
    request: *mut ffi::MPI_Request,
) -> c_int {
    let from = step.from.start.cast::<c_void>();
    let (sent, received) = (step.from.elements as c_int, step.into.elements as c_int);
    let of = datatype;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let world = ffi::RSMPI_COMM_WORLD;
        let with = operation.unwrap_or(ffi::RSMPI_SUM); // set for every reduction
        match step.call {
            Collective::AllReduce(_) | Collective::ReduceScatter(_) | Collective::Reduce { .. } => {
                ffi::MPI_Iallreduce(from, into, sent, of, with, world, request)
            }
            Collective::AllGather => {
                ffi::MPI_Iallgather(from, sent, of, into, sent, of, world, request)
            }
            Collective::Broadcast { root } if received == 0 => {
                ffi::MPI_Ibcast(from, sent, of, root as c_int, world, request)
            }
            Collective::Broadcast { root } => {
                ffi::MPI_Ibcast(into, received, of, root as c_int, world, request)
            }
        }
    }
}

type Function = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut ffi::MPI_Datatype);

/// The operations created so far, which live as long as MPI.
#[derive(Default)]
struct Operations(Vec<(Reduce, DType, ffi::MPI_Op)>);

impl Operations {
    /// Returns MPI's operation. A mean is computed as a sum, which is divided at the end.
    fn get(&mut self, reduce: Reduce, dtype: DType) -> Result<ffi::MPI_Op> {
        let made =
            |(made_reduce, made_dtype, _): &&_| (*made_reduce, *made_dtype) == (reduce, dtype);
        if let Some((_, _, operation)) = self.0.iter().find(made) {
            return Ok(*operation);
        }
        let [sum, max] = match dtype {
            DType::F64 => functions::<f64>(),
            DType::F32 => functions::<f32>(),
            DType::F16 => functions::<f16>(),
            DType::BF16 => functions::<bf16>(),
            other => return Err(not_reduced(other)),
        };
        let function = if reduce == Reduce::Max { max } else { sum };
        let commutes = 1;
        // SAFETY: MPI has been started; the function is for these elements. The initial operation is overwritten.
        let operation = unsafe {
            let mut operation = ffi::RSMPI_SUM;
            answered(ffi::MPI_Op_create(Some(function), commutes, &mut operation))?;
            operation
        };
        self.0.push((reduce, dtype, operation));
        Ok(operation)
    }
}

/// Returns an MPI type with a dtype's size and alignment; MPI does not compute with it.
fn datatype(dtype: DType) -> Result<ffi::MPI_Datatype> {
    // SAFETY: constants.
    unsafe {
        match dtype {
            DType::F64 => Ok(ffi::RSMPI_DOUBLE),
            DType::F32 => Ok(ffi::RSMPI_FLOAT),
            DType::F16 | DType::BF16 => Ok(ffi::RSMPI_UINT16_T),
            DType::U8 => Ok(ffi::RSMPI_UINT8_T),
            DType::U32 => Ok(ffi::RSMPI_UINT32_T),
            DType::I64 => Ok(ffi::RSMPI_INT64_T),
            other => Err(not_exchanged(other)),
        }
    }
}

/// Returns MPI's sum and maximum functions of a type; half precision is rounded at every addition.
fn functions<T: WithDType>() -> [Function; 2] {
    [sum::<T>, max::<T>]
}

unsafe extern "C" fn sum<T: WithDType>(
    from: *mut c_void,
    into: *mut c_void,
    count: *mut c_int,
    _: *mut ffi::MPI_Datatype,
) {
    // SAFETY: as MPI calls its operations.
    unsafe { combine::<T>(Reduce::Sum, from, into, *count) }
}

unsafe extern "C" fn max<T: WithDType>(
    from: *mut c_void,
    into: *mut c_void,
    count: *mut c_int,
    _: *mut ffi::MPI_Datatype,
) {
    // SAFETY: as MPI calls its operations.
    unsafe { combine::<T>(Reduce::Max, from, into, *count) }
}

/// # Safety
/// `from` and `into` must each point to `count` elements.
unsafe fn combine<T: WithDType>(
    reduce: Reduce,
    from: *mut c_void,
    into: *mut c_void,
    count: c_int,
) {
    let elements = count as usize;
    let [from, into] = [from, into].map(|start| HostBuffer {
        start: start.cast(),
        elements,
        dtype: T::DTYPE,
    });
    // SAFETY: guaranteed by the caller. The dtype can be reduced.
    let _ = unsafe { reduce_range(reduce, &[into, from], 0..elements, &[into], 1) };
}
