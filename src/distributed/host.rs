//! Host memory of collectives, the trait of backends for it, and reductions.

use super::Shard;
use super::collective::{Collective, Reduce};
use crate::kernels::cpu::simd::{self, BLOCK};
use crate::kernels::cpu::{Real, Stored};
use crate::{Error, Result};
use candle_core::{DType, WithDType};
use half::{bf16, f16};
use std::ops::Range;
use std::ptr;

const OP: &str = "distributed::Communicator";

/// Host memory that a collective uses exclusively until [`HostBackend::run`] returns. `start` points to `elements`
/// initialised, aligned numbers of a dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBuffer {
    pub(crate) start: *mut u8,
    pub(crate) elements: usize,
    pub(crate) dtype: DType,
}

// SAFETY: only a pointer; using what it points to is unsafe on any thread.
unsafe impl Send for HostBuffer {}

impl HostBuffer {
    pub(super) fn of<T: WithDType>(memory: &mut [T]) -> Self {
        Self {
            start: memory.as_mut_ptr().cast(),
            elements: memory.len(),
            dtype: T::DTYPE,
        }
    }

    /// Returns a range of the elements, which must exist.
    pub(super) fn range(self, range: Range<usize>) -> Self {
        let bytes = range.start * self.dtype.size_in_bytes();
        Self {
            start: self.start.wrapping_add(bytes),
            elements: range.len(),
            dtype: self.dtype,
        }
    }

    /// Returns a rank's part of a buffer that `world_size` divides.
    pub(super) fn part(self, rank: usize, world_size: usize) -> Self {
        let elements = self.elements / world_size;
        self.range(rank * elements..(rank + 1) * elements)
    }

    pub(super) fn bytes(self) -> usize {
        self.elements * self.dtype.size_in_bytes()
    }

    /// Returns `length` elements from `start` on, which must exist and have type `T`.
    fn slice<T>(self, start: usize, length: usize) -> *mut [T] {
        ptr::slice_from_raw_parts_mut(self.start.cast::<T>().wrapping_add(start), length)
    }

    /// Overwrites the elements with the same number of others.
    ///
    /// # Safety
    /// `from` must point to them, in the same dtype, and nobody else may use either.
    pub(super) unsafe fn copy_from(self, from: *const u8) {
        // SAFETY: guaranteed by the caller; the memory may overlap.
        unsafe { from.copy_to(self.start, self.bytes()) }
    }
}

/// A rank's connection to the others through host memory. Only one thread uses it at a time.
pub(crate) trait HostBackend: Send {
    /// Returns the rank and the number of ranks.
    fn place(&self) -> Shard;

    /// Runs a [valid](validate) collective to completion, in place. While it waits it calls `check` repeatedly, whose
    /// error ends the wait and leaves the elements undefined.
    ///
    /// # Errors
    /// [`Error::Rank`]; those of `check`.
    fn run(
        &mut self,
        collective: Collective,
        buffer: HostBuffer,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()>;
}

/// Checks that a collective supports a number of elements and a dtype.
pub(super) fn validate(
    collective: Collective,
    elements: usize,
    dtype: DType,
    world_size: usize,
) -> Result<()> {
    use Collective::{AllGather, Broadcast, Reduce, ReduceScatter};
    // Sums need floats; copies support integers too.
    match dtype {
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 => {}
        DType::U8 | DType::U32 | DType::I64 if collective.reduce().is_none() => {}
        DType::U8 | DType::U32 | DType::I64 => return Err(not_reduced(dtype)),
        _ => return Err(not_exchanged(dtype)),
    }
    match collective {
        Broadcast { root } | Reduce { root, .. } if root >= world_size => {
            Err(Error::config(OP, "root", root).must_be(
                format!("under the number of ranks, {world_size}"),
                "ranks count from 0",
            ))
        }
        AllGather | ReduceScatter(_) if !elements.is_multiple_of(world_size) => Err(Error::Shape {
            op: OP,
            expected: format!("elements that {world_size} ranks divide"),
            got: format!("{elements} for {}", collective.name()),
            hint: "fill the tensor up with zeros".into(),
        }),
        _ => Ok(()),
    }
}

pub(super) fn not_exchanged(dtype: DType) -> Error {
    refused(dtype, "f32, f64, bf16, f16, u8, u32 or i64")
}

pub(super) fn not_reduced(dtype: DType) -> Error {
    refused(dtype, "f32, f64, bf16 or f16, to be reduced")
}

fn refused(dtype: DType, expected: &str) -> Error {
    Error::dtype(OP, dtype.as_str()).must_be(expected, "convert the tensor with to_dtype")
}

/// Reduces a range of buffers in order, divides it, and writes it to the buffers `into`. Half precision is rounded
/// once.
///
/// # Errors
/// [`Error::DType`] for a dtype that cannot be reduced.
///
/// # Safety
/// All buffers must contain the range and have the same dtype, and nobody else may use them.
pub(super) unsafe fn reduce_range(
    reduce: Reduce,
    from: &[HostBuffer],
    range: Range<usize>,
    into: &[HostBuffer],
    divisor: usize,
) -> Result<()> {
    let run = match from[0].dtype {
        DType::F64 => reduce_range_of::<f64>,
        DType::F32 => reduce_range_of::<f32>,
        DType::F16 => reduce_range_of::<f16>,
        DType::BF16 => reduce_range_of::<bf16>,
        other => return Err(not_reduced(other)),
    };
    // SAFETY: guaranteed by the caller; the type is the dtype's.
    unsafe { run(reduce, from, range, into, divisor) };
    Ok(())
}

/// [`reduce_range`] of one dtype. `Max` ignores NaN unless all elements are NaN.
///
/// # Safety
/// That of [`reduce_range`]; `T` must be the dtype's type.
unsafe fn reduce_range_of<T: Stored>(
    reduce: Reduce,
    from: &[HostBuffer],
    range: Range<usize>,
    into: &[HostBuffer],
    divisor: usize,
) {
    simd::vectorized(
        #[inline(always)]
        || {
            let mut wide = [[T::Wide::ZERO; BLOCK]; 2];
            for start in range.clone().step_by(BLOCK) {
                let length = BLOCK.min(range.end - start);
                let [reduced, x] = wide.each_mut().map(|block| &mut block[..length]);
                for (rank, buffer) in from.iter().enumerate() {
                    // SAFETY: these elements are in the buffer.
                    T::load(unsafe { &*buffer.slice(start, length) }, x);
                    let pairs = reduced.iter_mut().zip(&*x);
                    match reduce {
                        _ if rank == 0 => reduced.copy_from_slice(x),
                        Reduce::Sum | Reduce::Mean => pairs.for_each(|(sum, x)| *sum += *x),
                        Reduce::Max => pairs.for_each(|(max, x)| {
                            let so_far: f64 = (*max).into();
                            if *x > *max || so_far.is_nan() {
                                *max = *x;
                            }
                        }),
                    }
                }
                if divisor > 1 {
                    let divisor = T::Wide::real(divisor as f64);
                    reduced.iter_mut().for_each(|x| *x /= divisor);
                }
                for buffer in into {
                    // SAFETY: as above.
                    T::store(reduced, unsafe { &mut *buffer.slice(start, length) });
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(
        Collective::AllGather,
        DType::F32,
        3,
        "elements that 2 ranks divide, got 3"
    )]
    #[case(
        Collective::AllReduce(Reduce::Mean),
        DType::I64,
        2,
        "to be reduced, got i64"
    )]
    #[case(Collective::AllGather, DType::I16, 2, "u32 or i64, got i16")]
    #[case(Collective::Broadcast { root: 2 }, DType::F32, 2, "root must be under")]
    fn what_cannot_be_is_refused(
        #[case] collective: Collective,
        #[case] dtype: DType,
        #[case] elements: usize,
        #[case] words: &str,
    ) {
        let error = validate(collective, elements, dtype, 2).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}
