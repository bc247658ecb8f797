//! Products of tiles that are in cache, used as they lie: what attention multiplies its tiles with.

use super::bf16::{Lines, Output, SIDE, Unit, product_of_tiles};
use super::matrix::{MatMut, MatRef};
pub use super::micro_kernel::COLUMNS;
use super::micro_kernel::{PANEL, Sums, Tiles};
use super::pack::b_block;
use crate::kernels::cpu::simd::same_type;
use crate::kernels::cpu::{Lanes, Stored};
use crate::probe::parts::{Part, timed};

/// `c = a b` or `c += a b` for one tile: a (rows, depth) with any strides, c (rows, columns) row by row, and b
/// (depth, columns) row by row or in units of [`COLUMNS`] columns, of which the columns are a multiple.
///
/// Elements of a are broadcast, rows of b and c are registers: a block of c stays in registers while the depth is
/// walked. Every element of c is one chain of multiply-adds in the order of the depth. Where a unit for bf16 multiplies
/// in place of these, a row or a column of a lies without gaps.
pub(crate) struct Product<'a, T> {
    /// a.
    pub a: &'a [T],
    /// From one row of a to the next.
    pub a_row: usize,
    /// From one column of a to the next.
    pub a_col: usize,
    /// b.
    pub b: &'a [T],
    /// From one row of b to the next.
    pub b_row: usize,
    /// From [`COLUMNS`] columns of b to the next: as many elements where its rows lie whole.
    pub b_unit: usize,
    /// c.
    pub c: &'a mut [T],
    /// From one row of c to the next.
    pub c_row: usize,
    /// Rows of a and c.
    pub rows: usize,
    /// Columns of b and c.
    pub columns: usize,
    /// Columns of a, rows of b.
    pub depth: usize,
    /// Add to c.
    pub accumulate: bool,
    /// What multiplies: f32's or f64's multiply-adds, or this unit, for which elements of f32 are split into two terms
    /// of bf16: 2^-15 of a product is lost at most, and an infinity times a number of two terms may be NaN. The bits
    /// are the same for factors that swap places.
    pub unit: Option<Unit>,
}

/// The transpose of x (columns, depth) for [`Product`]'s b, in units: `to` (units, depth, COLUMNS), zeros beyond the
/// columns. `lines` is (COLUMNS, depth) to work in.
pub(crate) fn pack_transposed<T: Stored>(
    x: &[T],
    depth: usize,
    to: &mut [T::Wide],
    lines: &mut [T::Wide],
) {
    let columns = x.len() / depth;
    let b = MatRef::new(x, columns, depth).t();
    b_block(b, 0..depth, 0..columns, to, lines);
}

impl<T: Lanes> Product<'_, T> {
    /// Computes it, on the calling thread, as this part of an op's time.
    pub(crate) fn run(self, part: Part) {
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        timed(part, || match self.unit {
            Some(unit) if self.depth > 0 => self.run_on(unit),
            _ => {
                let tiles = self.tiles();
                // SAFETY: `tiles` checked the views, and c is borrowed exclusively.
                unsafe { tiles.run() };
            }
        });
    }

    /// Computes it on `unit`.
    fn run_on(self, unit: Unit) {
        let [a, b] = [self.a, self.b].map(|x| same_type::<T, f32>(x).expect("tiles of f32"));
        let a = Lines {
            data: a,
            line: self.a_row,
            panel: SIDE * self.a_row,
            depth: self.a_col,
            is_b: false,
        };
        let b = Lines {
            data: b,
            line: 1,
            panel: self.b_unit,
            depth: self.b_row,
            is_b: true,
        };
        let mut c = MatMut::band(self.c, self.rows, self.columns, self.c_row);
        let c = Output::new(&mut c, self.accumulate).expect("tiles of f32");
        // SAFETY: c is borrowed until this returns.
        unsafe { product_of_tiles(unit, [a, b], self.depth, c) };
    }

    /// Itself over plain memory; the views of at least one row and column reach no further than their slices.
    fn tiles(self) -> Tiles<T> {
        assert!(self.columns.is_multiple_of(COLUMNS));
        // The last element that each view reaches.
        let (rows, depth) = (self.rows - 1, self.depth.saturating_sub(1));
        assert!(self.depth == 0 || rows * self.a_row + depth * self.a_col < self.a.len());
        let last_unit = (self.columns / COLUMNS - 1) * self.b_unit;
        assert!(self.depth == 0 || depth * self.b_row + last_unit + COLUMNS <= self.b.len());
        assert!(rows * self.c_row + self.columns <= self.c.len());
        Tiles {
            a: self.a.as_ptr(),
            a_row: self.a_row,
            a_col: self.a_col,
            a_panel: self.a_row * PANEL,
            b: self.b.as_ptr(),
            b_row: self.b_row,
            b_unit: self.b_unit,
            c: self.c.as_mut_ptr(),
            c_row: self.c_row,
            rows: self.rows,
            columns: self.columns,
            depth: self.depth,
            sums: match self.accumulate {
                true => Sums::Continue,
                false => Sums::Replace,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::simd::instruction_sets;
    use pulp::Arch;

    fn values<T: Lanes>(n: usize, step: f64) -> Vec<T> {
        (0..n).map(|i| T::real((i as f64 * step).sin())).collect()
    }

    /// Every number of rows and registers, so that every block is met, on every instruction set.
    fn every_block<T: Lanes + Into<f64>>(tolerance: f64) {
        for arch in instruction_sets() {
            for columns in (COLUMNS..=9 * COLUMNS).step_by(COLUMNS) {
                for rows in 1..=26 {
                    for transposed in [false, true] {
                        for accumulate in [false, true] {
                            for units in [false, true] {
                                let how = [transposed, accumulate, units];
                                one::<T>(arch, rows, columns, how, tolerance);
                            }
                        }
                    }
                }
            }
        }
    }

    fn one<T: Lanes + Into<f64>>(
        arch: Arch,
        rows: usize,
        columns: usize,
        [transposed, accumulate, units]: [bool; 3],
        tolerance: f64,
    ) {
        let (depth, padding) = (7, 3);
        let (a_row, a_col) = match transposed {
            false => (depth + padding, 1),
            true => (1, rows + padding),
        };
        let row = columns + padding;
        let a = values::<T>((rows + padding) * (depth + padding), 0.7);
        let (b_row, b_unit) = match units {
            false => (row, COLUMNS),
            true => (COLUMNS, depth * COLUMNS + padding),
        };
        let b = values::<T>((depth + padding) * row, 1.1);
        let before = values::<T>(rows * row, 1.3);
        let mut c = before.clone();
        let product = Product {
            a: &a,
            a_row,
            a_col,
            b: &b,
            b_row,
            b_unit,
            c: &mut c,
            c_row: row,
            rows,
            columns,
            depth,
            accumulate,
            unit: None,
        };
        arch.dispatch(product.tiles());
        for (i, value) in c.iter().enumerate() {
            let (r, column) = (i / row, i % row);
            let start: f64 = before[i].into();
            let is_padding = column >= columns; // which is left as it was
            let mut exact = if accumulate || is_padding { start } else { 0.0 };
            for t in 0..if is_padding { 0 } else { depth } {
                let in_b = t * b_row + column / COLUMNS * b_unit + column % COLUMNS;
                let (x, y) = (a[r * a_row + t * a_col], b[in_b]);
                exact += Into::<f64>::into(x) * Into::<f64>::into(y);
            }
            let got: f64 = (*value).into();
            assert!(
                (got - exact).abs() < tolerance,
                "{rows}x{columns}: {got} for {exact} at {i}"
            );
        }
    }

    #[test]
    fn every_block_in_f32() {
        every_block::<f32>(3e-6);
    }

    #[test]
    fn every_block_in_f64() {
        every_block::<f64>(1e-14);
    }
}
