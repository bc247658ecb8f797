//! Strided copies, and sums of elements with the same destination, against a loop over the indices.

use super::super::strided::{copy, sums};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, view_of};
use crate::kernels::strided::{Dim, merged_dims, writes_are_disjoint};
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

/// (size, from, to) of each dimension, and the lengths of source and destination.
type Case = (Vec<[usize; 3]>, [usize; 2]);

fn dims(of: &[[usize; 3]]) -> Vec<Dim> {
    let dims = of.iter().map(|&[size, from, to]| Dim { size, from, to });
    merged_dims(dims)
}

/// Returns the offsets in source and destination for each index.
fn places(of: &[[usize; 3]]) -> Vec<[usize; 2]> {
    of.iter().fold(vec![[0, 0]], |places, &[size, from, to]| {
        let all = places.iter().flat_map(|&[a, b]| {
            let next = move |i| [a + i * from, b + i * to];
            (0..size).map(next)
        });
        all.collect()
    })
}

#[test]
#[ignore = "needs a CUDA device"]
fn copies() {
    let gpu = gpu();
    let cases: [Case; 9] = [
        (vec![], [1, 1]),
        (vec![[0, 3, 3], [3, 1, 1]], [1, 1]),
        (vec![[5, 1, 1]], [5, 5]),
        (vec![[7, 1, 33], [33, 7, 1]], [231, 231]), // transposed
        (vec![[9, 0, 16], [16, 1, 1]], [16, 144]),  // repeated
        (vec![[31, 24, 16], [16, 1, 1]], [744, 496]), // rows of whole words
        (vec![[31, 25, 17], [16, 1, 1]], [775, 527]), // rows that do not consist of whole words
        (vec![[300, 2, 1]], [600, 300]),            // every second element
        (
            vec![
                [2, 60, 128],
                [3, 4, 1],
                [2, 30, 32],
                [5, 0, 6],
                [2, 12, 3],
                [2, 1, 64],
            ],
            [120, 260],
        ),
    ];
    for case in &cases {
        for offset in [0, 1] {
            copied::<f32>(&gpu, case, offset);
            copied::<f16>(&gpu, case, offset);
            copied::<bf16>(&gpu, case, offset);
            copied::<u32>(&gpu, case, offset);
            copied_unguarded::<u8>(&gpu, case);
            copied_unguarded::<i64>(&gpu, case);
        }
    }
    let seven = vec![[2, 1, 2]; 7];
    let buffer = Buffer::<f32>::unwritten(&gpu, 200, 0);
    let view = buffer.view(&gpu);
    copy(&gpu, view, view, &dims(&seven)).unwrap_err();
}

/// Returns the expected destination, with `before` where nothing is written.
fn expected<T: Element>(case: &Case, x: &[T], before: T) -> Vec<T> {
    let mut y = vec![before; case.1[1]];
    for [from, to] in places(&case.0) {
        y[to] = x[from];
    }
    y
}

fn copied<T: Element>(gpu: &CudaDevice, case: &Case, offset: usize) {
    let x = match T::DTYPE {
        candle_core::DType::U32 => (0..case.1[0]).map(|i| T::from_f64(i as f64)).collect(),
        _ => numbers::<T>(case.1[0], 1),
    };
    let from = Buffer::new(gpu, &x, offset);
    let y = Buffer::new(gpu, &vec![T::from_f64(9.0); case.1[1]], offset);
    copy(gpu, from.view(gpu), y.view(gpu), &dims(&case.0)).unwrap();
    let expected = expected(case, &x, T::from_f64(9.0));
    assert_eq!(bits(&y.read(gpu)), bits(&expected), "{case:?}");
}

/// Checks copies of integers, which have no poison value.
fn copied_unguarded<T: Element>(gpu: &CudaDevice, case: &Case) {
    let x: Vec<T> = (0..case.1[0]).map(|i| T::from_f64(i as f64)).collect();
    let from = gpu.clone_htod(&x).unwrap();
    let y = gpu.clone_htod(&vec![T::zero(); case.1[1]]).unwrap();
    let [x_view, y_view] = [(&from, x.len()), (&y, case.1[1])].map(|(x, len)| view_of(gpu, x, len));
    copy(gpu, x_view, y_view, &dims(&case.0)).unwrap();
    let got = gpu.clone_dtoh(&y).unwrap();
    assert_eq!(bits(&got), bits(&expected(case, &x, T::zero())), "{case:?}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn sums_of_one_place() {
    let gpu = gpu();
    // (size, from, to) of dy in order, the length of dx, and the offset of the first destination.
    let cases: [(Vec<[usize; 3]>, usize, usize); 12] = [
        (vec![], 1, 0),
        (vec![[5, 3, 3], [3, 1, 1]], 15, 0),
        (vec![[0, 3, 3], [3, 1, 1]], 4, 1),
        (vec![[5, 8, 10], [8, 1, 1]], 53, 2), // part of each row
        (vec![[33, 7, 1], [7, 1, 33]], 231, 0), // transposed
        (vec![[4096, 65, 0], [65, 1, 1]], 65, 0), // a repeated row
        (vec![[513, 33, 1], [33, 1, 0]], 513, 0), // a repeated column
        (vec![[3, 5000, 1], [5000, 1, 0]], 3, 0),
        (vec![[100_003, 1, 0]], 1, 0), // a scalar
        (vec![[7, 660, 33], [20, 33, 0], [33, 1, 1]], 231, 0),
        (vec![[9, 310, 0], [31, 10, 1], [10, 1, 0]], 31, 0),
        (vec![[9, 310, 0], [31, 10, 2], [10, 1, 62]], 622, 1),
    ];
    for (of, len, offset) in &cases {
        for at in [0, 1] {
            summed::<f32>(&gpu, of, *len, *offset, at);
            summed::<f16>(&gpu, of, *len, *offset, at);
            summed::<bf16>(&gpu, of, *len, *offset, at);
        }
    }
    let double = Buffer::<f64>::unwritten(&gpu, 3, 0);
    let wide = Buffer::<f32>::unwritten(&gpu, 3, 0);
    let (double, wide) = (double.view(&gpu), wide.view(&gpu));
    sums(&gpu, double, wide, 0, &dims(&[[3, 1, 1]])).unwrap_err();
    sums(&gpu, wide, double, 0, &dims(&[[3, 1, 1]])).unwrap_err();
}

fn summed<T: Element>(gpu: &CudaDevice, of: &[[usize; 3]], len: usize, offset: usize, at: usize) {
    let dims = dims(of);
    assert!(writes_are_disjoint(&dims), "{of:?}");
    let dy = numbers::<T>(of.iter().map(|[size, ..]| size).product(), 1);
    let mut exact = vec![0.0; len];
    for (dy, [_, to]) in dy.iter().zip(places(of)) {
        exact[offset + to] += dy.to_f64();
    }
    let from = Buffer::new(gpu, &dy, at);
    let run = || {
        let dx = Buffer::<f32>::unwritten(gpu, len, at);
        sums(gpu, from.view(gpu), dx.view(gpu), offset, &dims).unwrap();
        dx.read(gpu)
    };
    let (first, second) = (run(), run());
    assert_close(&format!("{of:?}"), &first, &exact);
    assert_eq!(bits(&first), bits(&second), "{of:?}");
}
