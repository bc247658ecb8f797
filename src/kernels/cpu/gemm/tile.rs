//! Matmuls of tiles that are in cache, without packing: attention multiplies its tiles with these.

use super::bf16::{Lines, Output, SIDE, Unit, matmul_of_tiles};
use super::matrix::{MatMut, MatRef};
pub use super::micro_kernel::COLUMNS;
use super::micro_kernel::{PANEL, Sums, Tiles};
use super::pack::b_block;
use crate::kernels::cpu::simd::same_type;
use crate::kernels::cpu::{Lanes, Stored};
use crate::probe::parts::{Part, timed};

/// Computes `c = a b` or `c += a b` for one tile: a (rows, depth) with any strides, c (rows, columns) row-major, and b
/// (depth, columns) row-major or in units of [`COLUMNS`] columns. The number of columns is a multiple of [`COLUMNS`].
///
/// Elements of a are broadcast; rows of b and c are registers. A block of c stays in registers during the loop over the
/// depth. Every element of c is one chain of multiply-adds in the order of the depth. If a bf16 unit multiplies
/// instead, rows or columns of a must be contiguous.
pub(crate) struct TileMatmul<'a, T> {
    pub a: &'a [T],
    /// The stride from one row of a to the next.
    pub a_row: usize,
    /// The stride from one column of a to the next.
    pub a_col: usize,
    pub b: &'a [T],
    /// The stride from one row of b to the next.
    pub b_row: usize,
    /// The stride from [`COLUMNS`] columns of b to the next: [`COLUMNS`] if b is row-major.
    pub b_unit: usize,
    pub c: &'a mut [T],
    /// The stride from one row of c to the next.
    pub c_row: usize,
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    /// Whether to add to c.
    pub accumulate: bool,
    /// The bf16 unit that multiplies; `None` for f32 or f64 multiply-adds. The unit splits f32 elements into two bf16
    /// terms: at most 2^-15 of a product is lost, and infinity times a number of two terms may be NaN. Swapping the
    /// factors does not change the bits.
    pub unit: Option<Unit>,
}

/// Packs the transpose of x (columns, depth) as [`TileMatmul`]'s b: `to` (units, depth, COLUMNS), padded with zeros.
/// `lines` is scratch of (COLUMNS, depth).
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

impl<T: Lanes> TileMatmul<'_, T> {
    /// Computes the matmul on the calling thread; its time is recorded as `part` of an op.
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
        unsafe { matmul_of_tiles(unit, [a, b], self.depth, c) };
    }

    /// Returns the matmul on raw memory, after checking that the views, of at least one row and column, stay inside
    /// their slices.
    fn tiles(self) -> Tiles<T> {
        assert!(self.columns.is_multiple_of(COLUMNS));
        // The last element that each view reaches must exist.
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

    /// Covers every number of rows and registers, and so every register block, on every instruction set.
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
        let product = TileMatmul {
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
            let is_padding = column >= columns; // padding stays unchanged
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
