//! Elementwise maps, also in place, and casts of integers, against the CPU.

use super::super::{cast, elementwise};
use super::{Buffer, Element, assert_close, bits, gpu, numbers, wide};
use crate::kernels::cpu::{Stored, arithmetic as on_cpu, relu};
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

/// Less than a pack, full packs, not a multiple of a block.
const SIZES: [usize; 6] = [0, 1, 7, 4096, 4099, 100_003];

/// A map's name, its numbers, whether its bits must be the CPU's, and the CPU's function.
type Map<T> = (
    &'static str,
    [f64; 2],
    bool,
    fn(&[T], &[T], [f64; 2], &mut [T]),
);

fn maps<T: Stored>() -> Vec<Map<T>> {
    vec![
        ("sub", [0.0, 0.0], true, |a, b, _, y| on_cpu::sub(a, b, y)),
        ("mul", [0.0, 0.0], true, |a, b, _, y| on_cpu::mul(a, b, y)),
        ("div", [0.0, 0.0], true, |a, b, _, y| on_cpu::div(a, b, y)),
        ("negated_div", [0.0, 0.0], true, |a, b, _, y| {
            on_cpu::negated_div(a, b, y)
        }),
        ("add_scaled", [0.3, 0.0], true, |a, b, s, y| {
            on_cpu::add_scaled(a, b, s[0], y)
        }),
        ("relu_backward", [0.0, 0.0], true, |a, b, _, y| {
            relu::backward(a, b, y)
        }),
        ("neg", [0.0, 0.0], true, |a, _, _, y| {
            on_cpu::negated(a, a, y)
        }),
        ("scale", [-1.7, 0.0], true, |a, _, s, y| {
            on_cpu::scaled(a, s[0], y)
        }),
        ("relu", [0.0, 0.0], true, |a, _, _, y| relu::forward(a, y)),
        ("abs", [0.0, 0.0], true, |a, _, _, y| on_cpu::abs(a, y)),
        ("abs_backward", [0.0, 0.0], true, |a, b, _, y| {
            on_cpu::abs_backward(a, b, y)
        }),
        ("clamp", [-0.4, 0.3], true, |a, _, s, y| {
            on_cpu::clamp(a, s, y)
        }),
        ("clamp_backward", [-0.4, 0.3], true, |a, b, s, y| {
            on_cpu::clamp_backward(a, b, s, y)
        }),
        ("affine", [-1.7, 0.3], true, |a, _, s, y| {
            on_cpu::affine(a, s, y)
        }),
        ("exp", [0.0, 0.0], false, |a, _, _, y| on_cpu::exp(a, y)),
    ]
}

/// Maps of positive numbers.
fn maps_above_zero<T: Stored>() -> Vec<Map<T>> {
    vec![
        ("log", [0.0, 0.0], false, |a, _, _, y| on_cpu::log(a, y)),
        ("pow", [2.3, 0.0], false, |a, _, s, y| {
            on_cpu::pow(a, s[0], y)
        }),
        ("pow_backward", [2.3, 0.0], false, |a, b, s, y| {
            on_cpu::pow_backward(a, b, s[0], y)
        }),
        ("sqrt", [0.0, 0.0], false, |a, _, _, y| on_cpu::sqrt(a, y)),
        ("sqrt_backward", [0.0, 0.0], false, |a, b, _, y| {
            on_cpu::sqrt_backward(a, b, y)
        }),
        ("rsqrt", [0.0, 0.0], false, |a, _, _, y| on_cpu::rsqrt(a, y)),
        ("rsqrt_backward", [0.0, 0.0], false, |a, b, _, y| {
            on_cpu::rsqrt_backward(a, b, y)
        }),
    ]
}

#[test]
#[ignore = "needs a CUDA device"]
fn maps_are_the_cpus() {
    let gpu = gpu();
    for n in SIZES {
        for offsets in [[0, 0], [1, 1], [0, 3]] {
            all::<f32>(&gpu, n, offsets);
            all::<f16>(&gpu, n, offsets);
            all::<bf16>(&gpu, n, offsets);
        }
    }
}

fn all<T: Element + Stored>(gpu: &CudaDevice, n: usize, offsets: [usize; 2]) {
    let [a, b] = [1, 2].map(|seed| numbers::<T>(n, seed));
    let above = |x: &[T]| -> Vec<T> {
        let x = x.iter().map(|x| T::from_f64(x.to_f64().abs() + 0.25));
        x.collect()
    };
    let (above_a, above_b) = (above(&a), above(&b));
    for map in maps() {
        one(gpu, map, [&a, &b], offsets);
    }
    for map in maps_above_zero() {
        one(gpu, map, [&above_a, &above_b], offsets);
    }
}

fn one<T: Element + Stored>(
    gpu: &CudaDevice,
    (name, numbers, has_bits, run): Map<T>,
    [a, b]: [&[T]; 2],
    offsets: [usize; 2],
) {
    let mut exact = vec![T::zero(); a.len()];
    run(a, b, numbers, &mut exact);
    let check = |what: &str, got: &[T]| match has_bits {
        true => assert_eq!(bits(got), bits(&exact), "{name}, {:?}, {what}", T::DTYPE),
        false => assert_close(name, got, &wide(&exact)),
    };
    let of_a = Buffer::new(gpu, a, offsets[0]);
    let of_b = Buffer::new(gpu, b, offsets[0]);
    let y = Buffer::<T>::unwritten(gpu, a.len(), offsets[1]);
    let reads = [of_a.view(gpu), of_b.view(gpu)];
    elementwise::map(gpu, name, numbers, &reads, y.view(gpu)).unwrap();
    check("elsewhere", &y.read(gpu));
    assert_eq!(bits(&of_b.read(gpu)), bits(b));
    elementwise::map(gpu, name, numbers, &reads, of_a.view(gpu)).unwrap();
    check("in place of a", &of_a.read(gpu));
}

/// NaN and infinities are propagated.
#[test]
#[ignore = "needs a CUDA device"]
fn a_nan_stays_one() {
    let gpu = gpu();
    let x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0];
    let of_x = Buffer::new(&gpu, &x, 0);
    let run = |name| {
        let y = Buffer::<f32>::unwritten(&gpu, x.len(), 0);
        elementwise::map(&gpu, name, [0.0; 2], &[of_x.view(&gpu)], y.view(&gpu)).unwrap();
        y.read(&gpu)
    };
    let y = run("relu");
    assert!(
        y[0].is_nan() && y[1..] == [f32::INFINITY, 0.0, 0.0, 0.0],
        "{y:?}"
    );
    let y = run("clamp"); // to [0, 0]
    assert!(y[0].is_nan() && y[1..] == [0.0; 4], "{y:?}");
    let y = run("exp");
    assert!(
        y[0].is_nan() && y[1..] == [f32::INFINITY, 0.0, 1.0, 1.0],
        "{y:?}"
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn other_lengths_and_dtypes_are_refused() {
    let gpu = gpu();
    let wide = Buffer::<f32>::unwritten(&gpu, 12, 0);
    let short = Buffer::<f32>::unwritten(&gpu, 5, 0);
    let half = Buffer::<bf16>::unwritten(&gpu, 12, 0);
    let double = Buffer::<f64>::unwritten(&gpu, 12, 0);
    let [wide, short] = [wide.view(&gpu), short.view(&gpu)];
    let (half, double) = (half.view(&gpu), double.view(&gpu));
    for (a, b, y) in [
        (wide, short, wide),
        (short, wide, wide),
        (wide, half, wide),
        (wide, wide, half),
        (double, double, double),
    ] {
        elementwise::map(&gpu, "mul", [0.0; 2], &[a, b], y).unwrap_err();
    }
    elementwise::map(&gpu, "mul", [0.0; 2], &[], wide).unwrap_err();
}

#[test]
#[ignore = "needs a CUDA device"]
fn integers_are_cast() {
    let gpu = gpu();
    for n in [0, 1, 4097, 10_000] {
        let integers = (0..n as u32).map(|i| i * 37 % 251);
        let integers: Vec<u32> = integers.collect();
        let bytes: Vec<u8> = integers.iter().map(|i| *i as u8).collect();
        let signed: Vec<i64> = integers.iter().map(|i| i64::from(*i) - 100).collect();
        cast_of(&gpu, &integers);
        cast_of(&gpu, &bytes);
        cast_of(&gpu, &signed);
    }
}

fn cast_of<T: Element>(gpu: &CudaDevice, x: &[T]) {
    cast_to::<T, f32>(gpu, x);
    cast_to::<T, f16>(gpu, x);
    cast_to::<T, bf16>(gpu, x);
}

fn cast_to<T: Element, Y: Element>(gpu: &CudaDevice, x: &[T]) {
    let exact: Vec<Y> = x.iter().map(|x| Y::from_f64(x.to_f64())).collect();
    let from = gpu.clone_htod(&[x, &[T::zero()]].concat()).unwrap();
    let y = Buffer::<Y>::unwritten(gpu, x.len(), 1);
    let view = super::view_of(gpu, &from, x.len());
    cast::cast(gpu, view, y.view(gpu)).unwrap();
    assert_eq!(bits(&y.read(gpu)), bits(&exact), "{:?}", T::DTYPE);
}
