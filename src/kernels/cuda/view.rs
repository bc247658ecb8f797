//! Views of GPU buffers, and copies and fills by the driver.

use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};
use std::marker::PhantomData;

/// A buffer on the GPU, borrowed from the tensor, storage or arena that owns it. Memory is freed in stream order, so a
/// kernel that was launched before may still read it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    /// The device address of the first element.
    pub pointer: u64,
    /// The dtype of the elements. Other 32-bit words count as u32.
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
    /// The strides of four dimensions, in elements. `None` if the buffer is contiguous.
    pub strides: Option<&'a [usize; 4]>,
    owner: PhantomData<&'a ()>,
}

impl<'a> View<'a> {
    /// Returns the same view, borrowed from `_owner`, which also owns the buffer.
    pub(crate) fn owned_by<T>(self, _owner: &T) -> View<'_> {
        View::new(self.pointer, self.dtype, self.len)
    }

    /// Returns a contiguous view of `len` elements from the address `pointer` on.
    pub(crate) fn new(pointer: u64, dtype: DType, len: usize) -> Self {
        Self {
            pointer,
            dtype,
            len,
            strides: None,
            owner: PhantomData,
        }
    }

    /// Returns the view as heads (B, H, T, Dh) with these strides.
    pub(crate) fn by_strides(self, strides: &'a [usize; 4]) -> Self {
        Self {
            strides: Some(strides),
            ..self
        }
    }

    /// Returns a view of `len` elements from element `first` on.
    pub(crate) fn slice(self, first: usize, len: usize) -> View<'a> {
        debug_assert!(first + len <= self.len, "{first} + {len} of {self:?}");
        let first_byte = first * self.dtype.size_in_bytes();
        View::new(self.pointer + first_byte as u64, self.dtype, len)
    }

    /// Returns a view of all elements from element `first` on.
    pub(crate) fn slice_from(self, first: usize) -> View<'a> {
        self.slice(first, self.len.saturating_sub(first))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.size_in_bytes()
    }
}

/// Sets all bytes to zero, in stream order.
pub(crate) fn set_to_zero(gpu: &CudaDevice, buffer: View) -> Result<()> {
    if buffer.len == 0 {
        return Ok(());
    }
    let stream = gpu.cuda_stream();
    stream.context().bind_to_thread().w()?;
    // SAFETY: the buffer has these bytes, and all-zero bits are valid in every dtype.
    unsafe { result::memset_d8_async(buffer.pointer, 0, buffer.bytes(), stream.cu_stream()) }.w()
}

/// Copies `from` to `to`, of the same dtype and length, in stream order.
pub(crate) fn copy(gpu: &CudaDevice, from: View, to: View) -> Result<()> {
    debug_assert_eq!((from.dtype, from.len), (to.dtype, to.len));
    if to.len == 0 {
        return Ok(());
    }
    let stream = gpu.cuda_stream();
    stream.context().bind_to_thread().w()?;
    let (from_pointer, to_pointer) = (from.pointer, to.pointer);
    // SAFETY: both buffers have these bytes.
    unsafe { result::memcpy_dtod_async(to_pointer, from_pointer, to.bytes(), stream.cu_stream()) }
        .w()
}
