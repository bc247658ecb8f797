//! Tests of whole matmuls: exact at every block edge, the same bits for any number of threads, and no less accurate
//! than the `gemm` crate.

use super::cut::{DEPTH_BYTES, ROWS};
use super::micro_kernel::COLUMNS;
use super::{MatMut, MatRef, Threads, matmul, matmul_to, packed, panels};
use crate::kernels::cpu::Stored;
use half::{bf16, f16};

const DEPTH: usize = DEPTH_BYTES / 4;

/// The columns of a strip of registers.
const STRIP: usize = 3 * COLUMNS;

/// Returns small integers, for which products and sums are exact in f32 and only the last rounding remains.
fn integers<T: Stored>(n: usize, step: usize) -> Vec<T> {
    let value = |i: usize| (i * step % 7) as f64 - 3.0;
    (0..n).map(|i| T::from_f64(value(i))).collect()
}

/// Returns a matrix of `rows` x `cols`: `data` as stored, or its transpose.
fn view<T>(data: &[T], rows: usize, cols: usize, transposed: bool) -> MatRef<'_, T> {
    match transposed {
        false => MatRef::new(data, rows, cols),
        true => MatRef::new(data, cols, rows).t(),
    }
}

/// Sizes at and around every block edge: register blocks, strips, depths, blocks of rows.
const SIZES: [(usize, usize, usize); 12] = [
    (1, 1, 1),
    (1, DEPTH, STRIP),
    (7, 3, 15),
    (9, DEPTH + 1, STRIP + 1),
    (ROWS, 2 * DEPTH, COLUMNS),
    (ROWS + 1, 5, 5 * STRIP - 1),
    (2 * ROWS + 13, DEPTH - 1, 31),
    (33, 2 * DEPTH + 17, 11 * STRIP + 33),
    (8, 0, 20),
    (0, 5, 3),
    (3, 5, 0),
    (2 * ROWS, 0, 11 * STRIP),
];

fn exact_for<T, C>()
where
    T: Stored,
    C: Stored<Wide = T::Wide>,
{
    for (rows, depth, cols) in SIZES {
        let (a, b) = (
            integers::<T>(rows * depth, 3),
            integers::<T>(depth * cols, 5),
        );
        for (a_transposed, b_transposed) in
            [(false, false), (false, true), (true, false), (true, true)]
        {
            let (a, b) = (
                view(&a, rows, depth, a_transposed),
                view(&b, depth, cols, b_transposed),
            );
            for accumulate in [false, true] {
                let before = integers::<C>(rows * cols, 4);
                let mut c = before.clone();
                let mut one = before.clone();
                let mut chosen = before.clone();
                for (c, threads) in [(&mut c, Threads::All), (&mut one, Threads::One)] {
                    packed::matmul(a, b, MatMut::new(c, rows, cols), accumulate, threads);
                }
                let to = MatMut::new(&mut chosen, rows, cols);
                matmul_to(a, b, to, accumulate, Threads::All); // by any implementation
                for i in 0..rows * cols {
                    let (row, col) = (i / cols, i % cols);
                    let mut sum = if accumulate { before[i].to_f64() } else { 0.0 };
                    for k in 0..depth {
                        let x = a.data[row * a.row_stride + k * a.col_stride].to_f64();
                        sum += x * b.data[k * b.row_stride + col * b.col_stride].to_f64();
                    }
                    let wanted = C::from_f64(sum).to_f64();
                    assert_eq!(c[i].to_f64(), wanted, "{rows}x{depth}x{cols} at {i}");
                    assert_eq!(one[i].to_f64(), wanted);
                    assert_eq!(chosen[i].to_f64(), wanted);
                }
            }
        }
    }
}

#[test]
fn products_are_exact_at_every_edge() {
    exact_for::<f32, f32>();
    exact_for::<f64, f64>();
    exact_for::<bf16, bf16>();
    exact_for::<f16, f16>();
    exact_for::<bf16, f32>();
    exact_for::<f32, f16>();
}

/// Writes to a band of a wider matrix, whose other elements must not change; by the crate's own kernel and the `gemm`
/// crate.
#[test]
fn bands_are_exact() {
    for (rows, depth, cols) in [
        (5, 3, 14),
        (130, DEPTH + 5, STRIP + 135),
        (65, 0, 257),
        (260, DEPTH + 5, 457), // large enough for the own kernel
    ] {
        let c_row = cols + 3;
        let a_data = integers::<f32>(rows * (depth + 2), 3);
        let a = MatRef::band(&a_data, rows, depth, depth + 2);
        let b_data = integers::<f32>(depth * cols, 5);
        let b = MatRef::new(&b_data, depth, cols);
        for accumulate in [false, true] {
            let before = integers::<f32>(rows * c_row, 4);
            let mut c = before.clone();
            let band = MatMut::band(&mut c, rows, cols, c_row);
            matmul_to(a, b, band, accumulate, Threads::All);
            for (i, value) in c.iter().enumerate() {
                let (row, column) = (i / c_row, i % c_row);
                let product = |k: usize| a_data[row * (depth + 2) + k] * b_data[k * cols + column];
                let wanted = match (column < cols, accumulate) {
                    (false, _) => before[i],
                    (true, false) => (0..depth).map(product).sum(),
                    (true, true) => before[i] + (0..depth).map(product).sum::<f32>(),
                };
                assert_eq!(*value, wanted, "{row}, {column} of {rows} x {cols}");
            }
        }
    }
}

/// Returns values that use all bits.
fn waves(n: usize, step: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * step).sin()).collect()
}

#[test]
fn the_bits_do_not_depend_on_the_threads() {
    for (rows, depth, cols) in [(257, 700, 131), (1024, 512, 1344), (64, 1030, 2000)] {
        let (a, b) = (waves(rows * depth, 0.7), waves(depth * cols, 1.1));
        for (a_transposed, b_transposed) in [(false, true), (false, false), (true, false)] {
            let a = view(&a, rows, depth, a_transposed);
            let b = view(&b, depth, cols, b_transposed);
            let [one, two, three] = [1, 2, 3].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let mut c = waves(rows * cols, 1.3);
                pool.unwrap()
                    .install(|| matmul(a, b, &mut c, true, Threads::All));
                c
            });
            let mut alone = waves(rows * cols, 1.3);
            matmul(a, b, &mut alone, true, Threads::One);
            assert!(
                one == two && one == three && one == alone,
                "{rows} x {depth} x {cols}"
            );
        }
    }
}

#[test]
fn errors_are_no_larger_than_the_gemm_crates() {
    for (rows, depth, cols) in [(96, 512, 130), (100, 1344, 96), (70, 5120, 64)] {
        let (x, y) = (waves(rows * depth, 0.7), waves(depth * cols, 1.1));
        let wide = |x: &[f32]| x.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
        let mut exact = vec![0f64; rows * cols];
        let (a, b) = (wide(&x), wide(&y));
        let (a, b) = (MatRef::new(&a, rows, depth), MatRef::new(&b, depth, cols));
        matmul(a, b, &mut exact, false, Threads::All);
        let error = |c: &[f32]| {
            let squares = c
                .iter()
                .zip(&exact)
                .map(|(c, exact)| (f64::from(*c) - exact).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let (a, b) = (MatRef::new(&x, rows, depth), MatRef::new(&y, depth, cols));
        let [mut ours, mut theirs] = [(); 2].map(|()| vec![0f32; rows * cols]);
        let c = MatMut::new(&mut ours, rows, cols);
        packed::matmul(a, b, c, false, Threads::All);
        let c = MatMut::new(&mut theirs, rows, cols);
        panels::matmul(a, b, c, false, Threads::All);
        let (ours, theirs) = (error(&ours), error(&theirs));
        assert!(
            ours > 0.0 && ours <= 1.1 * theirs,
            "{ours} beside {theirs} at depth {depth}"
        );
    }
}
