//! Matrices over slices.

use crate::kernels::cpu::Stored;

/// A read-only matrix over a slice, with strides in elements.
#[derive(Clone, Copy)]
pub struct MatRef<'a, T> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a, T> MatRef<'a, T> {
    /// `data` as (rows, cols), row by row.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        let len = rows.checked_mul(cols);
        assert_eq!(Some(data.len()), len, "matrix of {rows} x {cols}");
        Self::band(data, rows, cols, cols)
    }

    /// A band of the columns of a wider matrix: (rows, cols), each row `row_stride` elements after the one before.
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

    /// The same view over other elements.
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

    /// The transpose, by swapping strides.
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

/// A matrix to write, row by row, perhaps a band of the columns of a wider one.
pub struct MatMut<'a, T> {
    pub(super) data: &'a mut [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
}

impl<'a, T> MatMut<'a, T> {
    /// `data` as (rows, cols).
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        let len = rows.checked_mul(cols);
        assert_eq!(Some(data.len()), len, "matrix of {rows} x {cols}");
        Self::band(data, rows, cols, cols)
    }

    /// As (rows, cols), each row `row_stride` elements after the one before; what lies between rows is left as it is.
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
    /// The same view of the type that is computed in, where that is what is stored.
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

    /// Sizes whose products wrap around to something small are no way past the end of the slice.
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
