//! A buffer on the GPU, as a kernel sees it, and what the driver does to one without a kernel.

use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result};
use std::marker::PhantomData;

/// A buffer on the GPU, borrowed from the tensor, storage or arena that owns it. What is freed is freed in
/// the order of the stream, so a kernel that was launched in time may read it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    /// Where it begins, on the device.
    pub pointer: u64,
    /// Of its elements. Words of any other kind are u32.
    pub dtype: DType,
    /// How many elements it has.
    pub len: usize,
    /// Of four dimensions that are not one after another; else it is contiguous.
    pub strides: Option<&'a [usize; 4]>,
    owner: PhantomData<&'a ()>,
}

impl<'a> View<'a> {
    /// The same buffer, borrowed from `_owner`, whose it is too.
    pub(crate) fn owned_by<T>(self, _owner: &T) -> View<'_> {
        View::new(self.pointer, self.dtype, self.len)
    }

    /// The buffer of `len` elements that begins at `pointer`.
    pub(crate) fn new(pointer: u64, dtype: DType, len: usize) -> Self {
        Self {
            pointer,
            dtype,
            len,
            strides: None,
            owner: PhantomData,
        }
    }

    /// With heads, (B, H, T, Dh), by these strides.
    pub(crate) fn by_strides(self, strides: &'a [usize; 4]) -> Self {
        Self {
            strides: Some(strides),
            ..self
        }
    }

    /// `len` of its elements, from element `first` on.
    pub(crate) fn part(self, first: usize, len: usize) -> View<'a> {
        debug_assert!(first + len <= self.len, "{first} + {len} of {self:?}");
        let first_byte = first * self.dtype.size_in_bytes();
        View::new(self.pointer + first_byte as u64, self.dtype, len)
    }

    /// Its elements from element `first` on.
    pub(crate) fn part_from(self, first: usize) -> View<'a> {
        self.part(first, self.len.saturating_sub(first))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.size_in_bytes()
    }
}

/// Sets every byte to zero, in the order of the stream.
pub(crate) fn set_to_zero(gpu: &CudaDevice, buffer: View) -> Result<()> {
    if buffer.len == 0 {
        return Ok(());
    }
    let stream = gpu.cuda_stream();
    stream.context().bind_to_thread().w()?;
    // SAFETY: the buffer has these bytes, and zeros are numbers of every dtype.
    unsafe { result::memset_d8_async(buffer.pointer, 0, buffer.bytes(), stream.cu_stream()) }.w()
}

/// Copies the elements of `from` to `to`, of the same dtype and length, in the order of the stream.
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
