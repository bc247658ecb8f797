//! Strided views of q, k and v, read in tiles.

use crate::kernels::cpu::Stored;
use std::ops::Range;

/// A tensor of heads (B, H, T, Dh) with any strides, in elements; a stride of 0 repeats.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a, T> {
    /// The elements; the tensor's first is at index 0.
    pub data: &'a [T],
    /// The strides of batch, head, position and element.
    pub strides: [usize; 4],
}

impl<'a, T: Stored> Heads<'a, T> {
    /// The (T, Dh) matrix of one head.
    pub(super) fn matrix(&self, batch: usize, head: usize) -> Rows<'a, T> {
        let [batches, heads, row, col] = self.strides;
        let start = batch * batches + head * heads;
        Rows {
            data: &self.data[start.min(self.data.len())..],
            row,
            col,
        }
    }
}

/// The rows of one head, with the strides of rows and columns.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    data: &'a [T],
    row: usize,
    col: usize,
}

impl<'a, T: Stored> Rows<'a, T> {
    /// Loads `to.len()` elements of row `row`, widened to the compute type.
    #[inline]
    pub(super) fn load(&self, row: usize, to: &mut [T::Wide]) {
        let row = &self.data[row * self.row..];
        if self.col == 1 {
            return T::load(&row[..to.len()], to);
        }
        for (i, to) in to.iter_mut().enumerate() {
            T::load(&row[i * self.col..][..1], std::slice::from_mut(to));
        }
    }

    /// Returns the rows `range` of `width` elements and their stride: in place if possible, else copied into `packed`.
    pub(super) fn tile<'t>(
        &self,
        range: Range<usize>,
        width: usize,
        packed: &'t mut [T::Wide],
    ) -> (&'t [T::Wide], usize)
    where
        'a: 't,
    {
        if self.col == 1
            && let Some(wide) = T::as_wide(&self.data[range.start * self.row..])
        {
            return (wide, self.row);
        }
        for (row, to) in range.zip(packed.chunks_exact_mut(width)) {
            self.load(row, to);
        }
        (packed, width)
    }
}
