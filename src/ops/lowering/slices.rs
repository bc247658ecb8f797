//! The operands of a call on the CPU.

use crate::kernels::cpu::Real;
use candle_core::{DType, Result, WithDType, bail};
use half::{bf16, f16};
use std::borrow::Cow;
use std::cell::Cell;
use std::marker::PhantomData;

/// Elements that one call reads or writes, of a dtype.
#[derive(Clone, Copy)]
pub(crate) struct Slice<'a> {
    start: *mut u8,
    elements: usize,
    dtype: DType,
    lent: PhantomData<&'a ()>,
}

impl<'a> Slice<'a> {
    /// # Safety
    /// So many initialised elements of the dtype are there for as long as `'a`; what is handed to [`Slices::new`] to be
    /// written, nobody else uses.
    pub unsafe fn new(start: *mut u8, elements: usize, dtype: DType) -> Self {
        Self {
            start,
            elements,
            dtype,
            lent: PhantomData,
        }
    }

    fn check<T: WithDType>(&self) -> Result<*mut T> {
        if self.dtype != T::DTYPE {
            bail!("planned as {:?}, used as {:?}", self.dtype, T::DTYPE);
        }
        Ok(self.start.cast())
    }
}

/// The operands of one call.
pub(crate) struct Slices<'a> {
    reads: Vec<Slice<'a>>,
    /// Empty where it was handed out: a second time it would be written twice at once.
    writes: Vec<Cell<Option<Slice<'a>>>>,
}

impl<'a> Slices<'a> {
    pub fn new(reads: Vec<Slice<'a>>, writes: Vec<Slice<'a>>) -> Self {
        let writes = writes.into_iter().map(|slice| Cell::new(Some(slice)));
        Self {
            reads,
            writes: writes.collect(),
        }
    }

    /// Of what is read at `place`.
    pub fn dtype(&self, place: usize) -> DType {
        self.reads[place].dtype
    }

    /// Of what is written at `place`, before it is.
    pub fn dtype_written(&self, place: usize) -> Result<DType> {
        match self.writes[place].get() {
            Some(slice) => Ok(slice.dtype),
            None => bail!("operand {place} is written already"),
        }
    }

    /// How many are read.
    pub fn count(&self) -> usize {
        self.reads.len()
    }

    /// How many are written.
    pub fn count_written(&self) -> usize {
        self.writes.len()
    }

    /// What is read at `place`.
    pub fn x<T: WithDType>(&self, place: usize) -> Result<&'a [T]> {
        let slice = &self.reads[place];
        let start = slice.check::<T>()?;
        // SAFETY: by `Slice::new`; nothing that is read is written by the same call.
        Ok(unsafe { std::slice::from_raw_parts(start, slice.elements) })
    }

    /// What is written at `place`, once.
    pub fn y<T: WithDType>(&self, place: usize) -> Result<&'a mut [T]> {
        let Some(slice) = self.writes[place].take() else {
            bail!("operand {place} is written already");
        };
        let start = slice.check::<T>()?;
        // SAFETY: by `Slice::new`; handed out this once.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, slice.elements) })
    }

    /// As [`x`](Self::x), in the type computed in: for small operands, which half precision is widened to as a whole.
    pub fn wide_x<R: Real>(&self, place: usize) -> Result<Cow<'a, [R]>> {
        fn widened<T: WithDType, R: Real>(elements: &[T]) -> Vec<R> {
            elements.iter().map(|x| R::real(x.to_f64())).collect()
        }
        Ok(match self.dtype(place) {
            DType::F16 => Cow::Owned(widened(self.x::<f16>(place)?)),
            DType::BF16 => Cow::Owned(widened(self.x::<bf16>(place)?)),
            _ => Cow::Borrowed(self.x::<R>(place)?),
        })
    }
}
