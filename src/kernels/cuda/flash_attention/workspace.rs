//! Scratch memory, allocated from one buffer.

use crate::kernels::cuda::View;
use candle_core::DType;

/// The alignment of every part, in words: 256 bytes, as in a separate allocation.
const ALIGNMENT: usize = 64;

/// The rest of a workspace.
pub(super) struct Workspace {
    next: u64,
    end: u64,
}

impl Workspace {
    pub(super) fn new(words: View) -> Self {
        let bytes = words.len * words.dtype.size_in_bytes();
        Self {
            next: words.pointer,
            end: words.pointer + bytes as u64,
        }
    }

    /// Returns the next `len` words.
    pub(super) fn take(&mut self, len: usize) -> View<'static> {
        let begin = self.next.next_multiple_of(4 * ALIGNMENT as u64);
        self.next = begin + 4 * len as u64;
        debug_assert!(self.next <= self.end, "a workspace that is too small");
        View::new(begin, DType::U32, len)
    }
}
