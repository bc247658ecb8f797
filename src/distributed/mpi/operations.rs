//! What MPI reduces with: our own arithmetic, for MPI knows neither f16 nor bf16, nor says what the larger of a number
//! and NaN is.

use super::library::answered;
use crate::Result;
use crate::distributed::collective::Reduce;
use crate::distributed::host::{HostBuffer, divide, not_exchanged, of_dtype, reduce_onto};
use crate::kernels::cpu::simd::{self, BLOCK};
use crate::kernels::cpu::{Real, Stored};
use ::mpi::ffi;
use candle_core::DType;
use std::ffi::{c_int, c_void};
use std::ptr;

type Function = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut ffi::MPI_Datatype);

/// The operations made so far, which live as long as MPI.
#[derive(Default)]
pub(super) struct Operations(Vec<(Reduce, DType, ffi::MPI_Op)>);

impl Operations {
    /// A mean is a sum until all numbers are in it.
    pub(super) fn get(&mut self, reduce: Reduce, dtype: DType) -> Result<ffi::MPI_Op> {
        let made =
            |(made_reduce, made_dtype, _): &&_| (*made_reduce, *made_dtype) == (reduce, dtype);
        if let Some((_, _, operation)) = self.0.iter().find(made) {
            return Ok(*operation);
        }
        let function = match reduce {
            Reduce::Sum | Reduce::Mean => of_dtype!(sum as Function, dtype)?,
            Reduce::Max => of_dtype!(max as Function, dtype)?,
        };
        let commutes = 1;
        // SAFETY: MPI has been started; the function is one for its elements. The first operation is overwritten.
        let operation = unsafe {
            let mut operation = ffi::RSMPI_SUM;
            answered(ffi::MPI_Op_create(Some(function), commutes, &mut operation))?;
            operation
        };
        self.0.push((reduce, dtype, operation));
        Ok(operation)
    }
}

/// MPI's type with a dtype's size and alignment: it is not asked to compute.
pub(super) fn datatype(dtype: DType) -> Result<ffi::MPI_Datatype> {
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

unsafe extern "C" fn sum<T: Stored>(
    from: *mut c_void,
    into: *mut c_void,
    count: *mut c_int,
    _: *mut ffi::MPI_Datatype,
) {
    // SAFETY: as MPI calls its operations.
    unsafe { combine::<T>(Reduce::Sum, from, into, *count) }
}

unsafe extern "C" fn max<T: Stored>(
    from: *mut c_void,
    into: *mut c_void,
    count: *mut c_int,
    _: *mut ffi::MPI_Datatype,
) {
    // SAFETY: as MPI calls its operations.
    unsafe { combine::<T>(Reduce::Max, from, into, *count) }
}

/// Half precision is rounded once an addition.
///
/// # Safety
/// There are `count` elements at `from` and others at `into`.
unsafe fn combine<T: Stored>(reduce: Reduce, from: *mut c_void, into: *mut c_void, count: c_int) {
    if count == 0 {
        return; // the pointers may be null
    }
    let from = ptr::slice_from_raw_parts(from.cast::<T>(), count as usize);
    let into = ptr::slice_from_raw_parts_mut(into.cast::<T>(), count as usize);
    // SAFETY: the caller's promise.
    let (from, into) = unsafe { (&*from, &mut *into) };
    simd::vectorized(
        #[inline(always)]
        || {
            let mut wide = [[T::Wide::ZERO; BLOCK]; 2];
            for (from, into) in from.chunks(BLOCK).zip(into.chunks_mut(BLOCK)) {
                let [x, reduced] = wide.each_mut().map(|block| &mut block[..from.len()]);
                T::load(from, x);
                T::load(into, reduced);
                reduce_onto::<T>(reduce, reduced, x);
                T::store(reduced, into);
            }
        },
    );
}

/// Makes sums means.
///
/// # Safety
/// The buffer has elements of type `T`, which nobody else uses.
pub(super) unsafe fn make_means<T: Stored>(buffer: HostBuffer, world_size: usize) {
    // SAFETY: the caller's promise.
    let sums = unsafe { &mut *buffer.slice::<T>(0, buffer.elements) };
    simd::vectorized(
        #[inline(always)]
        || {
            let mut wide = [T::Wide::ZERO; BLOCK];
            for sums in sums.chunks_mut(BLOCK) {
                let wide = &mut wide[..sums.len()];
                T::load(sums, wide);
                divide::<T>(wide, world_size);
                T::store(wide, sums);
            }
        },
    );
}
