//! What backends have in common: host memory, who runs collectives on it, and how it adds up.

use super::collective::{Collective, Reduce, is_exchanged};
use crate::kernels::cpu::{Real, Stored};
use crate::{Error, Result};
use candle_core::DType;
use std::ops::Range;
use std::ptr;

const OP: &str = "distributed::Communicator";

/// Host memory that a collective has for itself until [`HostBackend::run`] returns: `start` is that of `elements`
/// initialised numbers of a dtype, aligned as they have to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBuffer {
    pub(crate) start: *mut u8,
    pub(crate) elements: usize,
    pub(crate) dtype: DType,
}

impl HostBuffer {
    /// Some of the elements, which must be there.
    pub(super) fn range(self, range: Range<usize>) -> Self {
        let bytes = range.start * self.dtype.size_in_bytes();
        Self {
            start: self.start.wrapping_add(bytes),
            elements: range.len(),
            dtype: self.dtype,
        }
    }

    /// A rank's part of a buffer that `world_size` divides.
    pub(super) fn part(self, rank: usize, world_size: usize) -> Self {
        let elements = self.elements / world_size;
        self.range(rank * elements..(rank + 1) * elements)
    }

    pub(super) fn bytes(self) -> usize {
        self.elements * self.dtype.size_in_bytes()
    }

    /// `length` of the elements from `start` on, which must be there. They are of type `T`.
    pub(super) fn slice<T>(self, start: usize, length: usize) -> *mut [T] {
        ptr::slice_from_raw_parts_mut(self.start.cast::<T>().wrapping_add(start), length)
    }

    /// Overwrites the elements by as many others.
    ///
    /// # Safety
    /// `from` has them, of the same dtype, and nobody else uses either.
    pub(super) unsafe fn copy_from(self, from: *const u8) {
        // SAFETY: the caller's promise; memory that overlaps is allowed for.
        unsafe { from.copy_to(self.start, self.bytes()) }
    }
}

/// A rank's way to the others, through host memory. One thread uses it at a time.
pub(crate) trait HostBackend: Send {
    /// This process's number, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// Runs a collective to its end, in place. `check` is asked now and then while it waits: an error of it ends the
    /// wait, and what the buffer holds is not defined then.
    ///
    /// # Errors
    /// [`Error::Rank`]; what [`validate`] refuses, before anything is exchanged; what `check` says.
    fn run(
        &mut self,
        collective: Collective,
        buffer: HostBuffer,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()>;
}

/// An error unless a rank can take part in a collective on `elements` of a dtype.
pub(super) fn validate(
    collective: Collective,
    elements: usize,
    dtype: DType,
    (rank, world_size): (usize, usize),
) -> Result<()> {
    use Collective::{AllGather, Broadcast, Receive, Reduce, ReduceScatter, Send};
    if !is_exchanged(dtype) {
        return Err(not_exchanged(dtype));
    }
    let is_integer = matches!(dtype, DType::U8 | DType::U32 | DType::I64);
    if is_integer && collective.reduce().is_some() {
        return Err(not_reduced(dtype));
    }
    let refused = |field, other: usize, expected: String| {
        Err(Error::config(OP, field, other).must_be(expected, "ranks count from 0"))
    };
    let is_other = |other| other < world_size && other != rank;
    let another = || format!("another of the {world_size} ranks than {rank}, this one");
    match collective {
        Broadcast { root } | Reduce { root, .. } if root >= world_size => refused(
            "root",
            root,
            format!("under the number of ranks, {world_size}"),
        ),
        Send { to } if !is_other(to) => refused("to", to, another()),
        Receive { from } if !is_other(from) => refused("from", from, another()),
        AllGather | ReduceScatter(_) if !elements.is_multiple_of(world_size) => Err(Error::Shape {
            op: OP,
            expected: format!("elements that {world_size} ranks divide"),
            got: format!("{elements} for {}", collective.name()),
            hint: "fill the tensor up with zeros".into(),
        }),
        _ => Ok(()),
    }
}

impl Collective {
    /// How it reduces, if it does.
    pub(super) fn reduce(self) -> Option<Reduce> {
        match self {
            Self::AllReduce(reduce) | Self::ReduceScatter(reduce) | Self::Reduce { reduce, .. } => {
                Some(reduce)
            }
            _ => None,
        }
    }
}

pub(super) fn not_exchanged(dtype: DType) -> Error {
    refused(dtype, "f32, f64, bf16, f16, u8, u32 or i64")
}

pub(super) fn not_reduced(dtype: DType) -> Error {
    refused(dtype, "f32, f64, bf16 or f16, to be reduced")
}

fn refused(dtype: DType, expected: &str) -> Error {
    Error::DType {
        op: OP,
        expected: expected.into(),
        got: dtype.as_str().into(),
        hint: "convert the tensor with to_dtype".into(),
    }
}

/// `reduced = reduced + x`, or the larger of both; of a number and NaN, the number. Slices of one length.
#[inline(always)]
pub(super) fn reduce_onto<T: Stored>(reduce: Reduce, reduced: &mut [T::Wide], x: &[T::Wide]) {
    let pairs = reduced.iter_mut().zip(x);
    match reduce {
        Reduce::Sum | Reduce::Mean => pairs.for_each(|(sum, x)| *sum += *x),
        Reduce::Max => pairs.for_each(|(max, x)| {
            let so_far: f64 = (*max).into();
            if *x > *max || so_far.is_nan() {
                *max = *x;
            }
        }),
    }
}

/// `sum = sum / world_size`, which makes it the mean.
#[inline(always)]
pub(super) fn divide<T: Stored>(sums: &mut [T::Wide], world_size: usize) {
    let world_size = T::Wide::real(world_size as f64);
    sums.iter_mut().for_each(|sum| *sum /= world_size);
}

/// `generic::<T>` with the `T` of a dtype that is reduced, as a pointer to a function.
macro_rules! of_dtype {
    ($generic:ident as $pointer:ty, $dtype:expr) => {{
        use candle_core::DType;
        match $dtype {
            DType::F64 => Ok($generic::<f64> as $pointer),
            DType::F32 => Ok($generic::<f32> as $pointer),
            DType::F16 => Ok($generic::<half::f16> as $pointer),
            DType::BF16 => Ok($generic::<half::bf16> as $pointer),
            other => Err($crate::distributed::host::not_reduced(other)),
        }
    }};
}
pub(super) use of_dtype;
