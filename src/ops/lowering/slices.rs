//! The operands of a call on the CPU.

use super::{Kernel, Named};
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
    count: usize,
    dtype: DType,
    /// Of four dimensions that are not one after another: all elements from the first of theirs on are here.
    strides: Option<&'a [usize; 4]>,
    lent: PhantomData<&'a ()>,
}

impl<'a> Slice<'a> {
    /// # Safety
    /// So many initialised elements of the dtype are there for as long as `'a`; what is handed to [`Slices::new`] to be
    /// written, nothing else uses.
    pub unsafe fn new(start: *mut u8, count: usize, dtype: DType) -> Self {
        Self {
            start,
            count,
            dtype,
            strides: None,
            lent: PhantomData,
        }
    }

    /// With heads, (B, H, T, Dh), by these strides.
    pub fn by_strides(self, strides: &'a [usize; 4]) -> Self {
        Self {
            strides: Some(strides),
            ..self
        }
    }

    fn check<T: WithDType>(&self) -> Result<*mut T> {
        if self.dtype != T::DTYPE {
            bail!("planned as {:?}, used as {:?}", self.dtype, T::DTYPE);
        }
        Ok(self.start.cast())
    }

    fn as_slice<T: WithDType>(&self) -> Result<&'a [T]> {
        match self.strides {
            None => self.elements(),
            Some(strides) => bail!("a kernel of elements in order was handed strides {strides:?}"),
        }
    }

    fn elements<T: WithDType>(&self) -> Result<&'a [T]> {
        let start = self.check::<T>()?;
        // SAFETY: by `new`; nothing that is read is written by the same call.
        Ok(unsafe { std::slice::from_raw_parts(start, self.count) })
    }
}

/// Of a step, what its calls are told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepState {
    /// Of its micro-batches, the one whose calls these are.
    pub micro_batch: usize,
    /// What the gradient of a step's loss begins with: the loss scale, over the targets of a loss that is a sum.
    pub loss_gradient: f64,
}

/// The operands of one call.
pub(crate) struct Slices<'a> {
    pub step: StepState,
    reads: Named<Slice<'a>>,
    /// Empty where it was handed out: a second time it would be written twice at once.
    writes: Named<Cell<Option<Slice<'a>>>>,
}

impl<'a> Slices<'a> {
    pub fn new(step: StepState, reads: Named<Slice<'a>>, writes: &Named<Slice<'a>>) -> Self {
        let writes = writes.map(|slice| Cell::new(Some(*slice)));
        Self {
            step,
            reads,
            writes,
        }
    }

    /// Whether a call adds to what it writes as `name`.
    pub fn adds(&self, kernel: &Kernel, name: &str) -> bool {
        kernel.adds(name, self.step.micro_batch)
    }

    /// Whether the call reads it.
    pub fn has_x(&self, name: &str) -> bool {
        self.reads.get(name).is_some()
    }

    /// Of what is read first.
    pub fn dtype(&self) -> Result<DType> {
        match self.reads.first() {
            Some(slice) => Ok(slice.dtype),
            None => bail!("nothing is read"),
        }
    }

    /// Of what is read as `name`, or written, before it is.
    pub fn dtype_of(&self, name: &str) -> Result<DType> {
        let written = || self.writes.get(name).and_then(Cell::get);
        match self.reads.get(name).copied().or_else(written) {
            Some(slice) => Ok(slice.dtype),
            None => bail!("no operand {name}, or it is written already"),
        }
    }

    /// All that is read, in order.
    pub fn all_x<T: WithDType>(&self) -> Result<Vec<&'a [T]>> {
        self.reads.iter().map(Slice::as_slice).collect()
    }

    /// All that is written, in order, once.
    pub fn all_y<T: WithDType>(&self) -> Result<Vec<&'a mut [T]>> {
        self.writes
            .iter()
            .map(|slice| taken("operand", slice))
            .collect()
    }

    /// What is read as `name`.
    pub fn x<T: WithDType>(&self, name: &str) -> Result<&'a [T]> {
        match self.reads.get(name) {
            Some(slice) => slice.as_slice(),
            None => bail!("{name} is not read"),
        }
    }

    /// As [`x`](Self::x), with the strides of heads, (B, H, T, Dh), that are not one after another.
    pub fn lying<T: WithDType>(&self, name: &str) -> Result<(&'a [T], Option<&'a [usize; 4]>)> {
        match self.reads.get(name) {
            Some(slice) => Ok((slice.elements()?, slice.strides)),
            None => bail!("{name} is not read"),
        }
    }

    /// What is written as `name`, once.
    pub fn y<T: WithDType>(&self, name: &str) -> Result<&'a mut [T]> {
        match self.writes.get(name) {
            Some(slice) => taken(name, slice),
            None => bail!("{name} is not written"),
        }
    }

    /// What is read as `name`, if the call has it.
    pub fn some_x<T: WithDType>(&self, name: &str) -> Result<Option<&'a [T]>> {
        self.reads.get(name).map(Slice::as_slice).transpose()
    }

    /// What is written as `name`, once, if the call has it.
    pub fn some_y<T: WithDType>(&self, name: &str) -> Result<Option<&'a mut [T]>> {
        let slice = self.writes.get(name);
        slice.map(|slice| taken(name, slice)).transpose()
    }

    /// As [`x`](Self::x), in the type computed in: for small operands, which half precision is widened to as a whole.
    pub fn wide_x<R: Real>(&self, name: &str) -> Result<Cow<'a, [R]>> {
        fn widened<T: WithDType, R: Real>(elements: &[T]) -> Vec<R> {
            elements.iter().map(|x| R::real(x.to_f64())).collect()
        }
        Ok(match self.reads.get(name).map(|slice| slice.dtype) {
            Some(DType::F16) => Cow::Owned(widened(self.x::<f16>(name)?)),
            Some(DType::BF16) => Cow::Owned(widened(self.x::<bf16>(name)?)),
            _ => Cow::Borrowed(self.x::<R>(name)?),
        })
    }
}

fn taken<'a, T: WithDType>(name: &str, slice: &Cell<Option<Slice<'a>>>) -> Result<&'a mut [T]> {
    let Some(slice) = slice.take() else {
        bail!("{name} is written already");
    };
    let start = slice.check::<T>()?;
    // SAFETY: by `Slice::new`; handed out this once.
    Ok(unsafe { std::slice::from_raw_parts_mut(start, slice.count) })
}
