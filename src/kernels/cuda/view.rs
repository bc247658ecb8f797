//! A buffer on the card, as a kernel sees it.

use candle_core::DType;
use std::marker::PhantomData;

/// A contiguous buffer on the card, borrowed from the tensor or storage that owns it. What is freed is freed in the order
/// of the stream, so a kernel that was launched in time may read it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    /// Where it begins, on the device.
    pub pointer: u64,
    /// Of its elements.
    pub dtype: DType,
    /// How many elements it has.
    pub len: usize,
    owner: PhantomData<&'a ()>,
}

impl View<'_> {
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
            owner: PhantomData,
        }
    }
}
