//! The operands of a call on the CPU.

use super::{Kernel, Named};
use crate::kernels::cpu::Real;
use candle_core::{DType, Result, WithDType, bail};
use half::{bf16, f16};
use std::borrow::Cow;
use std::cell::Cell;
use std::marker::PhantomData;

/// The elements of an operand of a call, with their dtype.
#[derive(Clone, Copy)]
pub(crate) struct Slice<'a> {
    start: *mut u8,
    count: usize,
    dtype: DType,
    /// The strides of four dimensions that are not contiguous; the elements are then all those from the first on.
    strides: Option<&'a [usize; 4]>,
    borrow: PhantomData<&'a ()>,
}

impl<'a> Slice<'a> {
    /// # Safety
    /// `count` initialised elements of the dtype must be alive for `'a`. If the slice is passed to [`Slices::new`] as
    /// an output, nothing else may use its elements.
    pub unsafe fn new(start: *mut u8, count: usize, dtype: DType) -> Self {
        Self {
            start,
            count,
            dtype,
            strides: None,
            borrow: PhantomData,
        }
    }

    /// Sets the strides of heads (B, H, T, Dh).
    pub fn by_strides(self, strides: &'a [usize; 4]) -> Self {
        Self {
            strides: Some(strides),
            ..self
        }
    }

    fn check<T: WithDType>(&self) -> Result<*mut T> {
        if self.dtype != T::DTYPE {
            bail!(
                "kernel expected {:?}, got an operand planned in {:?}",
                T::DTYPE,
                self.dtype
            );
        }
        Ok(self.start.cast())
    }

    fn as_slice<T: WithDType>(&self) -> Result<&'a [T]> {
        match self.strides {
            None => self.elements(),
            Some(strides) => bail!("kernel expected contiguous elements, got strides {strides:?}"),
        }
    }

    fn elements<T: WithDType>(&self) -> Result<&'a [T]> {
        let start = self.check::<T>()?;
        // SAFETY: by `new`; a call does not write what it reads.
        Ok(unsafe { std::slice::from_raw_parts(start, self.count) })
    }
}

/// The state of a step that its calls depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepState {
    /// The index of the micro-batch in its step.
    pub micro_batch: usize,
    /// The initial gradient of a step's loss: the loss scale, divided by the number of targets if the loss is a sum.
    pub loss_gradient: f64,
}

/// The operands of one call.
pub(crate) struct Slices<'a> {
    pub step: StepState,
    reads: Named<Slice<'a>>,
    /// The outputs; a cell is empty once its slice was returned, so that it cannot be borrowed mutably twice.
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

    /// Returns whether a call adds to its output `name`.
    pub fn adds(&self, kernel: &Kernel, name: &str) -> bool {
        kernel.adds(name, self.step.micro_batch)
    }

    /// Returns whether the call has an input `name`.
    pub fn has_x(&self, name: &str) -> bool {
        self.reads.get(name).is_some()
    }

    /// Returns the dtype of the first input.
    pub fn dtype(&self) -> Result<DType> {
        match self.reads.first() {
            Some(slice) => Ok(slice.dtype),
            None => bail!("nothing is read"),
        }
    }

    /// Returns the dtype of the input `name`, or of the output `name` if it was not yet returned.
    pub fn dtype_of(&self, name: &str) -> Result<DType> {
        let written = || self.writes.get(name).and_then(Cell::get);
        match self.reads.get(name).copied().or_else(written) {
            Some(slice) => Ok(slice.dtype),
            None => bail!("no operand {name}, or it is written already"),
        }
    }

    /// Returns all inputs, in order.
    pub fn all_x<T: WithDType>(&self) -> Result<Vec<&'a [T]>> {
        self.reads.iter().map(Slice::as_slice).collect()
    }

    /// Returns all outputs, in order; each can be returned once.
    pub fn all_y<T: WithDType>(&self) -> Result<Vec<&'a mut [T]>> {
        self.writes
            .iter()
            .map(|slice| take_output("operand", slice))
            .collect()
    }

    /// Returns the input `name`, which must be contiguous.
    pub fn x<T: WithDType>(&self, name: &str) -> Result<&'a [T]> {
        match self.reads.get(name) {
            Some(slice) => slice.as_slice(),
            None => bail!("{name} is not read"),
        }
    }

    /// Returns the input `name`, with its strides if it is heads (B, H, T, Dh) that are not contiguous.
    pub fn strided<T: WithDType>(&self, name: &str) -> Result<(&'a [T], Option<&'a [usize; 4]>)> {
        match self.reads.get(name) {
            Some(slice) => Ok((slice.elements()?, slice.strides)),
            None => bail!("{name} is not read"),
        }
    }

    /// Returns the output `name`; only once.
    pub fn y<T: WithDType>(&self, name: &str) -> Result<&'a mut [T]> {
        match self.writes.get(name) {
            Some(slice) => take_output(name, slice),
            None => bail!("{name} is not written"),
        }
    }

    /// Returns the input `name`, if the call has it.
    pub fn some_x<T: WithDType>(&self, name: &str) -> Result<Option<&'a [T]>> {
        self.reads.get(name).map(Slice::as_slice).transpose()
    }

    /// Returns the output `name`, if the call has it; only once.
    pub fn some_y<T: WithDType>(&self, name: &str) -> Result<Option<&'a mut [T]>> {
        let slice = self.writes.get(name);
        slice.map(|slice| take_output(name, slice)).transpose()
    }

    /// Returns the input `name` in the compute type; half precision is widened into a copy, so it is for small
    /// operands.
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

fn take_output<'a, T: WithDType>(
    name: &str,
    slice: &Cell<Option<Slice<'a>>>,
) -> Result<&'a mut [T]> {
    let Some(slice) = slice.take() else {
        bail!("{name} is written already");
    };
    let start = slice.check::<T>()?;
    // SAFETY: by `Slice::new`; each output is returned once.
    Ok(unsafe { std::slice::from_raw_parts_mut(start, slice.count) })
}
