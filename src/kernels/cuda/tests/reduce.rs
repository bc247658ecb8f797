//! Sums along a dimension, their gradient, and log-softmax against f64; two runs have the same bits.

use super::super::{log_softmax, reduce};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, wide};
use crate::kernels::cpu::{Stored, rows::log_softmax as on_cpu, sums as sums_on_cpu};
use crate::kernels::workspace::sum_chunks;
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

/// (outer, n, inner): all elements, short and long rows, few and many columns, chunks of both.
const SIZES: [[usize; 3]; 15] = [
    [1, 0, 1],
    [1, 1, 1],
    [1, 5, 1],
    [1, 8191, 1],
    [1, 100_003, 1],
    [1, 9_000_001, 1],
    [1001, 7, 1],
    [129, 512, 1],
    [37, 1031, 1],
    [3, 100_003, 1],
    [1, 3, 5],
    [5, 33, 65],
    [1, 100_003, 3],
    [2, 1031, 513],
    [1, 2, 100_003],
];

#[test]
#[ignore = "needs a CUDA device"]
fn sums() {
    let gpu = gpu();
    for sizes in SIZES {
        for offset in [0, 1, 3] {
            summed::<f32>(&gpu, sizes, offset);
            summed::<f16>(&gpu, sizes, offset);
            summed::<bf16>(&gpu, sizes, offset);
        }
    }
}

fn summed<T: Element + Stored>(gpu: &CudaDevice, sizes: [usize; 3], offset: usize) {
    let [outer, n, inner] = sizes;
    // All are positive, so that no sum is a small difference.
    let x = numbers::<T>(outer * n * inner, 1);
    let x: Vec<T> = x.iter().map(|x| T::from_f64(x.to_f64().abs())).collect();
    let factor = 0.7 / n.max(1) as f64;
    let mut exact = vec![0f64; outer * inner];
    sums_on_cpu::forward(&wide(&x), [n, inner], factor, &mut exact, None);
    let of_x = Buffer::new(gpu, &x, offset);
    let chunks = sum_chunks(sizes);
    let parts = Buffer::<f64>::unwritten(gpu, outer * chunks * inner, 0);
    let run = || {
        let y = Buffer::<T>::unwritten(gpu, outer * inner, offset);
        let scratch = (chunks > 1).then(|| parts.view(gpu));
        let (x, y_view) = (of_x.view(gpu), y.view(gpu));
        reduce::sum(gpu, x, [n, inner], factor, y_view, scratch).unwrap();
        parts.read(gpu);
        y.read(gpu)
    };
    let (first, second) = (run(), run());
    assert_close("sum", &first, &exact);
    assert_eq!(bits(&first), bits(&second));

    let dy = numbers::<T>(outer * inner, 2);
    let mut exact = vec![0f64; x.len()];
    sums_on_cpu::backward(&wide(&dy), [n, inner], factor, &mut exact);
    let of_dy = Buffer::new(gpu, &dy, offset);
    let dx = Buffer::<T>::unwritten(gpu, x.len(), offset);
    reduce::spread(gpu, of_dy.view(gpu), [n, inner], factor, dx.view(gpu)).unwrap();
    assert_close("spread", &dx.read(gpu), &exact);
}

#[test]
#[ignore = "needs a CUDA device"]
fn log_softmax_and_its_gradient() {
    let gpu = gpu();
    for (rows, width) in [(0, 5), (1, 1), (7, 33), (129, 256), (3, 5003), (2, 100_001)] {
        for offset in [0, 1] {
            log_probabilities::<f32>(&gpu, rows, width, offset);
            log_probabilities::<f16>(&gpu, rows, width, offset);
            log_probabilities::<bf16>(&gpu, rows, width, offset);
        }
    }
}

fn log_probabilities<T: Element>(gpu: &CudaDevice, rows: usize, width: usize, offset: usize) {
    let [x, dy] = [1, 2].map(|seed| numbers::<T>(rows * width, seed));
    let (wide_x, wide_dy) = (wide(&x), wide(&dy));
    let mut exact = vec![0f64; x.len()];
    on_cpu::forward(&wide_x, width, &mut exact);
    let (of_x, of_dy) = (Buffer::new(gpu, &x, offset), Buffer::new(gpu, &dy, 0));
    let y = Buffer::<T>::unwritten(gpu, x.len(), offset);
    log_softmax::forward(gpu, of_x.view(gpu), width, y.view(gpu)).unwrap();
    assert_close("y", &y.read(gpu), &exact);

    on_cpu::backward(&wide_dy, &wide_x, width, &mut exact);
    let dx = Buffer::<T>::unwritten(gpu, x.len(), offset);
    let read = [of_dy.view(gpu), of_x.view(gpu)];
    log_softmax::backward(gpu, read, width, dx.view(gpu)).unwrap();
    assert_close("dx", &dx.read(gpu), &exact);
}
