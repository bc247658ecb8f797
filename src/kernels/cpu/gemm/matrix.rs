//! Views of slices as matrices.

use crate::kernels::cpu::Stored;

/// A read-only view of a slice as a matrix, with strides in elements.
#[derive(Clone, Copy)]
pub struct MatRef<'a, T> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a, T> MatRef<'a, T> {
    /// Views `data` as (rows, cols), row-major.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        let len = rows.checked_mul(cols);
        assert_eq!(Some(data.len()), len, "matrix of {rows} x {cols}");
        Self::band(data, rows, cols, cols)
    }

    /// Views a band of columns of a wider matrix: (rows, cols), with rows `row_stride` elements apart.
    pub fn band(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_band(data.len(), rows, cols, row_stride);
        Self {
            data,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }

    /// Returns the same view of other elements.
    pub(super) fn over<U>(self, data: &[U]) -> MatRef<'_, U> {
        assert_eq!(data.len(), self.data.len());
        MatRef {
            data,
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
        }
    }

    /// Returns the transpose, by swapping strides.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// A mutable row-major matrix, or a band of columns of a wider one.
pub struct MatMut<'a, T> {
    pub(super) data: &'a mut [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
}

impl<'a, T> MatMut<'a, T> {
    /// Views `data` as (rows, cols).
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        let len = rows.checked_mul(cols);
        assert_eq!(Some(data.len()), len, "matrix of {rows} x {cols}");
        Self::band(data, rows, cols, cols)
    }

    /// Views a band: (rows, cols), with rows `row_stride` elements apart. Elements between rows stay unchanged.
    pub fn band(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        check_band(data.len(), rows, cols, row_stride);
        Self {
            data,
            rows,
            cols,
            row_stride,
        }
    }
}

impl<T: Stored> MatMut<'_, T> {
    /// Returns the same view in the compute type, if the elements are stored in it.
    pub(super) fn as_wide(&mut self) -> Option<MatMut<'_, T::Wide>> {
        let (rows, cols, row_stride) = (self.rows, self.cols, self.row_stride);
        let data = T::as_wide_mut(self.data)?;
        Some(MatMut::band(data, rows, cols, row_stride))
    }
}

/// Checks the bounds that unsafe code relies on. Sizes whose product overflows are out of bounds.
fn check_band(len: usize, rows: usize, cols: usize, row_stride: usize) {
    assert!(cols <= row_stride || rows <= 1, "rows overlap");
    let reach = match rows {
        0 => Some(0),
        rows => (rows - 1)
            .checked_mul(row_stride)
            .and_then(|to_last| to_last.checked_add(cols)),
    };
    let is_inside = reach.is_some_and(|reach| reach <= len);
    assert!(is_inside, "{rows} x {cols} by {row_stride} in {len}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;

    /// Sizes whose product wraps around to a small number must not pass the bounds check.
    #[test]
    fn a_view_beyond_its_slice_panics() {
        const HALF: usize = 1 << (usize::BITS / 2);
        let views: [fn() -> usize; 5] = [
            || MatRef::<f32>::new(&[], HALF, HALF).rows,
            || MatRef::<f32>::band(&[], HALF + 1, HALF, HALF).rows,
            || MatRef::band(&[1f32; 8], 3, 2, 4).rows,
            || MatRef::band(&[1f32; 8], usize::MAX, 0, 2).rows,
            || MatMut::band(&mut [1f32; 8], HALF + 1, HALF, HALF).rows,
        ];
        for (i, view) in views.into_iter().enumerate() {
            assert!(catch_unwind(view).is_err(), "view {i}");
        }
        MatRef::band(&[1f32; 8], 2, 4, 4);
        MatRef::band(&[1f32; 8], 2, 3, 5);
    }
}
