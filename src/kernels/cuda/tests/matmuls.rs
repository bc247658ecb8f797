//! Matmuls by cuBLAS: batched, transposed, accumulated, with results in f32, of depth 0.

use super::super::cublas::multiply;
use super::super::matmul::{Matrix, Product};
use super::{Buffer, Element, assert_close, gpu, numbers, wide};
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

/// a (count, M, K), b (count, K, N), c (count, M, N).
const SIZES: [[usize; 4]; 4] = [[1, 1, 1, 1], [3, 5, 7, 2], [2, 33, 24, 65], [1, 16, 0, 8]];

#[test]
#[ignore = "needs a CUDA device"]
fn products_of_every_kind() {
    let gpu = gpu();
    for sizes in SIZES {
        for transposed in [[false, false], [true, false], [false, true]] {
            for adds in [false, true] {
                check::<f32, f32>(&gpu, sizes, transposed, adds);
                check::<bf16, bf16>(&gpu, sizes, transposed, adds);
                check::<bf16, f32>(&gpu, sizes, transposed, adds);
                check::<f16, f32>(&gpu, sizes, transposed, adds);
            }
        }
    }
}

/// Checks matmuls with operands in T and the result in C.
fn check<T: Element, C: Element>(
    gpu: &CudaDevice,
    [count, m, k, n]: [usize; 4],
    transposed: [bool; 2],
    adds: bool,
) {
    let (a, b) = (
        numbers::<T>(count * m * k, 1),
        numbers::<T>(count * k * n, 2),
    );
    let before = match adds {
        true => numbers::<C>(count * m * n, 3),
        false => vec![super::poison::<C>(); count * m * n],
    };
    let [of_a, of_b] = [&a, &b].map(|values| Buffer::new(gpu, values, 0));
    let of_c = Buffer::new(gpu, &before, 0);
    let factor = |buffer, [rows, cols]: [usize; 2], transposed| {
        let [rows, cols] = if transposed {
            [cols, rows]
        } else {
            [rows, cols]
        };
        Matrix {
            transposed,
            ..Matrix::batched(buffer, rows, cols)
        }
    };
    let factors = [
        factor(of_a.view(gpu), [m, k], transposed[0]),
        factor(of_b.view(gpu), [k, n], transposed[1]),
    ];
    let c = factor(of_c.view(gpu), [m, n], false);
    multiply(gpu, Product::of(factors, c, count, adds)).unwrap();

    let (a, b) = (wide(&a), wide(&b));
    let at = |of: &[f64], [rows, cols]: [usize; 2], transposed, number: usize, i, j| {
        let place = if transposed {
            j * rows + i
        } else {
            i * cols + j
        };
        of[number * rows * cols + place]
    };
    let mut exact = Vec::new();
    for number in 0..count {
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let terms = (0..k).map(|l| {
                at(&a, [m, k], transposed[0], number, i, l)
                    * at(&b, [k, n], transposed[1], number, l, j)
            });
            let first = match adds {
                true => before[exact.len()].to_f64(),
                false => 0.0,
            };
            exact.push(first + terms.sum::<f64>());
        }
    }
    let what = format!("{count} of {m} {k} {n}, transposed {transposed:?}, adds {adds}");
    assert_close(&what, &of_c.read(gpu), &exact);
}
