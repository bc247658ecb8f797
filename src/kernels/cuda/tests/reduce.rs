//! Sums of buffers, their gradient, and log-softmax against f64; two runs have the same bits.

use super::super::{log_softmax, reduce};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, wide};
use crate::kernels::cpu::rows::log_softmax as on_cpu;
use crate::kernels::workspace::sum_parts;
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

#[test]
#[ignore = "needs a CUDA device"]
fn sums() {
    let gpu = gpu();
    for n in [0, 1, 5, 8191, 8193, 100_003, 9_000_001] {
        for offset in [0, 1, 3] {
            summed::<f32>(&gpu, n, offset);
            summed::<f16>(&gpu, n, offset);
            summed::<bf16>(&gpu, n, offset);
        }
    }
}

fn summed<T: Element>(gpu: &CudaDevice, n: usize, offset: usize) {
    // All are positive, so that the sum is not a small difference.
    let x = numbers::<T>(n, 1)
        .iter()
        .map(|x| T::from_f64(x.to_f64().abs()))
        .collect::<Vec<T>>();
    let factor = 0.7 / n.max(1) as f64;
    let exact = factor * wide(&x).iter().sum::<f64>();
    let of_x = Buffer::new(gpu, &x, offset);
    let parts = Buffer::<f64>::unwritten(gpu, sum_parts(n), 0);
    let run = || {
        let y = Buffer::<T>::unwritten(gpu, 1, offset);
        let scratch = parts.view(gpu);
        reduce::sum(gpu, of_x.view(gpu), factor, y.view(gpu), scratch).unwrap();
        parts.read(gpu);
        y.read(gpu)
    };
    let (first, second) = (run(), run());
    assert_close("sum", &first, &[exact]);
    assert_eq!(bits(&first), bits(&second));

    let dy = [T::from_f64(1.3)];
    let of_dy = Buffer::new(gpu, &dy, offset);
    let dx = Buffer::<T>::unwritten(gpu, n, offset);
    reduce::spread(gpu, of_dy.view(gpu), factor, dx.view(gpu)).unwrap();
    assert_close("spread", &dx.read(gpu), &vec![factor * dy[0].to_f64(); n]);
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
