//! Activations in place, biases and their gradients, repeated rows: at any address, without writes out of bounds.

use super::super::{activation, bias, repeat};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, wide};
use crate::kernels::Activation;
use crate::kernels::cpu::activation as on_cpu;
use crate::kernels::workspace::bias_backward;
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

#[test]
#[ignore = "needs a CUDA device"]
fn activations_in_place() {
    let gpu = gpu();
    for n in [1, 7, 4096, 100_003] {
        for offset in [0, 1] {
            activations::<f32>(&gpu, n, offset);
            activations::<f16>(&gpu, n, offset);
            activations::<bf16>(&gpu, n, offset);
        }
    }
}

fn activations<T: Element>(gpu: &CudaDevice, n: usize, offset: usize) {
    let [x, dy] = [1, 2].map(|seed| numbers::<T>(n, seed));
    let (wide_x, wide_dy) = (wide(&x), wide(&dy));
    for f in [
        Activation::Tanh,
        Activation::Sigmoid,
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
    ] {
        let mut exact = vec![0f64; n];
        on_cpu::forward(f, &wide_x, &mut exact);
        let y = Buffer::new(gpu, &x, offset);
        activation::forward(gpu, f, y.view(gpu), y.view(gpu)).unwrap();
        assert_close("y", &y.read(gpu), &exact);

        on_cpu::backward(f, &wide_dy, &wide_x, &mut exact);
        let (dx, of_x) = (Buffer::new(gpu, &dy, offset), Buffer::new(gpu, &x, offset));
        let read = [dx.view(gpu), of_x.view(gpu)];
        activation::backward(gpu, f, read, dx.view(gpu)).unwrap();
        assert_close("dx", &dx.read(gpu), &exact);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn biases_and_their_gradients() {
    let gpu = gpu();
    for (rows, width) in [(1, 1), (7, 33), (129, 257), (70_001, 3), (4096, 768)] {
        for offset in [0, 1] {
            biases::<f32>(&gpu, rows, width, offset);
            biases::<f16>(&gpu, rows, width, offset);
            biases::<bf16>(&gpu, rows, width, offset);
        }
    }
}

fn biases<T: Element>(gpu: &CudaDevice, rows: usize, width: usize, offset: usize) {
    let wide_bias = numbers::<f32>(width, 1);
    let rounded: Vec<T> = wide_bias.iter().map(|b| T::from_f64((*b).into())).collect();
    let expected = bits(&rounded.repeat(rows));
    let y = Buffer::<T>::unwritten(gpu, rows * width, offset);
    let from = Buffer::new(gpu, &wide_bias, offset);
    bias::fill(gpu, from.view(gpu), y.view(gpu)).unwrap();
    assert_eq!(bits(&y.read(gpu)), expected, "from f32");
    let y = Buffer::<T>::unwritten(gpu, rows * width, offset);
    let from = Buffer::new(gpu, &rounded, offset);
    bias::fill(gpu, from.view(gpu), y.view(gpu)).unwrap();
    assert_eq!(bits(&y.read(gpu)), expected, "from its own dtype");

    let dy = numbers::<T>(rows * width, 2);
    let mut exact = vec![0.0; width];
    for row in wide(&dy).chunks(width) {
        exact.iter_mut().zip(row).for_each(|(sum, dy)| *sum += dy);
    }
    let dy = Buffer::new(gpu, &dy, offset);
    let db = Buffer::<f32>::unwritten(gpu, width, offset);
    let workspace = Buffer::<f32>::unwritten(gpu, bias_backward(rows, width), 0);
    let scratch = workspace.view(gpu);
    bias::gradient(gpu, dy.view(gpu), db.view(gpu), false, scratch).unwrap();
    assert_close("db", &db.read(gpu), &exact);
    bias::gradient(gpu, dy.view(gpu), db.view(gpu), true, scratch).unwrap();
    let twice: Vec<f64> = exact.iter().map(|sum| 2.0 * sum).collect();
    assert_close("db added", &db.read(gpu), &twice);
}

#[test]
#[ignore = "needs a CUDA device"]
fn repeated_rows() {
    let gpu = gpu();
    for (rows, width, times) in [(1, 1, 1), (3, 5, 4), (7, 64, 2), (33, 1031, 3)] {
        for offset in [0, 1] {
            repeats::<f32>(&gpu, rows, width, times, offset);
            repeats::<f16>(&gpu, rows, width, times, offset);
            repeats::<bf16>(&gpu, rows, width, times, offset);
        }
    }
}

fn repeats<T: Element>(gpu: &CudaDevice, rows: usize, width: usize, times: usize, offset: usize) {
    let x = numbers::<T>(rows * width, 1);
    let repeated: Vec<T> = x.chunks(width).flat_map(|row| row.repeat(times)).collect();
    let from = Buffer::new(gpu, &x, offset);
    let y = Buffer::<T>::unwritten(gpu, repeated.len(), offset);
    repeat::repeat(gpu, from.view(gpu), width, times, y.view(gpu)).unwrap();
    assert_eq!(bits(&y.read(gpu)), bits(&repeated));

    let dy = numbers::<T>(repeated.len(), 2);
    let mut exact = Vec::new();
    for group in wide(&dy).chunks(times * width) {
        let sum = |column: usize| group.iter().skip(column).step_by(width).sum::<f64>();
        exact.extend((0..width).map(sum));
    }
    let from = Buffer::new(gpu, &dy, offset);
    let dx = Buffer::<T>::unwritten(gpu, x.len(), offset);
    repeat::fold(gpu, from.view(gpu), width, times, dx.view(gpu)).unwrap();
    assert_close("dx", &dx.read(gpu), &exact);
}
