//! Activations in place, biases laid out and their gradients, repeated rows: anywhere in memory, nothing written beside.

use super::super::{activation, bias, repeat};
use super::{Buffer, Element, assert_close, bits, card, numbers, wide};
use crate::kernels::cpu::activation::{self as on_cpu, Activation};
use crate::kernels::workspace::bias_backward;
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

#[test]
fn activations_in_place() {
    let Some(card) = card() else { return };
    for n in [1, 7, 4096, 100_003] {
        for offset in [0, 1] {
            activations::<f32>(&card, n, offset);
            activations::<f16>(&card, n, offset);
            activations::<bf16>(&card, n, offset);
        }
    }
}

fn activations<T: Element>(card: &CudaDevice, n: usize, offset: usize) {
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
        let y = Buffer::new(card, &x, offset);
        activation::forward(card, f, y.view(card), y.view(card)).unwrap();
        assert_close("y", &y.read(card), &exact);

        on_cpu::backward(f, &wide_dy, &wide_x, &mut exact);
        let (dx, of_x) = (
            Buffer::new(card, &dy, offset),
            Buffer::new(card, &x, offset),
        );
        let read = [dx.view(card), of_x.view(card)];
        activation::backward(card, f, read, dx.view(card)).unwrap();
        assert_close("dx", &dx.read(card), &exact);
    }
}

#[test]
fn biases_and_their_gradients() {
    let Some(card) = card() else { return };
    for (rows, width) in [(1, 1), (7, 33), (129, 257), (70_001, 3), (4096, 768)] {
        for offset in [0, 1] {
            biases::<f32>(&card, rows, width, offset);
            biases::<f16>(&card, rows, width, offset);
            biases::<bf16>(&card, rows, width, offset);
        }
    }
}

fn biases<T: Element>(card: &CudaDevice, rows: usize, width: usize, offset: usize) {
    let wide_bias = numbers::<f32>(width, 1);
    let rounded: Vec<T> = wide_bias.iter().map(|b| T::from_f64((*b).into())).collect();
    let expected = bits(&rounded.repeat(rows));
    let y = Buffer::<T>::room(card, rows * width, offset);
    let from = Buffer::new(card, &wide_bias, offset);
    bias::fill(card, from.view(card), y.view(card)).unwrap();
    assert_eq!(bits(&y.read(card)), expected, "from f32");
    let y = Buffer::<T>::room(card, rows * width, offset);
    let from = Buffer::new(card, &rounded, offset);
    bias::fill(card, from.view(card), y.view(card)).unwrap();
    assert_eq!(bits(&y.read(card)), expected, "from its own dtype");

    let dy = numbers::<T>(rows * width, 2);
    let mut exact = vec![0.0; width];
    for row in wide(&dy).chunks(width) {
        exact.iter_mut().zip(row).for_each(|(sum, dy)| *sum += dy);
    }
    let dy = Buffer::new(card, &dy, offset);
    let db = Buffer::<f32>::room(card, width, offset);
    let workspace = Buffer::<f32>::room(card, bias_backward(rows, width), 0);
    let room = workspace.view(card);
    bias::gradient(card, dy.view(card), db.view(card), room).unwrap();
    assert_close("db", &db.read(card), &exact);
}

#[test]
fn repeated_rows() {
    let Some(card) = card() else { return };
    for (rows, width, times) in [(1, 1, 1), (3, 5, 4), (7, 64, 2), (33, 1031, 3)] {
        for offset in [0, 1] {
            repeats::<f32>(&card, rows, width, times, offset);
            repeats::<f16>(&card, rows, width, times, offset);
            repeats::<bf16>(&card, rows, width, times, offset);
        }
    }
}

fn repeats<T: Element>(card: &CudaDevice, rows: usize, width: usize, times: usize, offset: usize) {
    let x = numbers::<T>(rows * width, 1);
    let repeated: Vec<T> = x.chunks(width).flat_map(|row| row.repeat(times)).collect();
    let from = Buffer::new(card, &x, offset);
    let y = Buffer::<T>::room(card, repeated.len(), offset);
    repeat::repeat(card, from.view(card), width, times, y.view(card)).unwrap();
    assert_eq!(bits(&y.read(card)), bits(&repeated));

    let dy = numbers::<T>(repeated.len(), 2);
    let mut exact = Vec::new();
    for group in wide(&dy).chunks(times * width) {
        let sum = |column: usize| group.iter().skip(column).step_by(width).sum::<f64>();
        exact.extend((0..width).map(sum));
    }
    let from = Buffer::new(card, &dy, offset);
    let dx = Buffer::<T>::room(card, x.len(), offset);
    repeat::fold(card, from.view(card), width, times, dx.view(card)).unwrap();
    assert_close("dx", &dx.read(card), &exact);
}
