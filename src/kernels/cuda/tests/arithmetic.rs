//! Elementwise sums at any address, with and without repetition of b: the bits of an f32 sum that is rounded once.

use super::super::arithmetic::add;
use super::{Buffer, Element, bits, gpu, numbers};
use candle_core::cuda_backend::CudaDevice;
use half::{bf16, f16};

/// Repeats of b, and its length: less than a pack, rows between vectors, shorter and longer than a block, and lengths
/// that end near the end of a block.
const REPEATED: [(usize, usize); 14] = [
    (1, 1),
    (1, 7),
    (1, 100_003),
    (7, 1),
    (4099, 1),
    (4096, 2),
    (4097, 3),
    (33, 6),
    (200, 65),
    (33, 768),
    (5, 4095),
    (3, 4096),
    (9, 4100),
    (7, 5003),
];

/// Offsets of a, b and y, in elements.
const OFFSETS: [[usize; 3]; 4] = [[0, 0, 0], [1, 1, 1], [0, 1, 2], [3, 0, 0]];

#[test]
#[ignore = "needs a CUDA device"]
fn sums_have_the_bits_of_f32_rounded_once() {
    let gpu = gpu();
    for (times, period) in REPEATED {
        for offsets in OFFSETS {
            let (n, from) = (times * period, (&gpu, period, offsets));
            sums::<f32, f32, f32>(from, n, |sum| sum);
            sums::<f16, f16, f16>(from, n, f16::from_f32);
            sums::<bf16, bf16, bf16>(from, n, bf16::from_f32);
            sums::<f32, f16, f32>(from, n, |sum| sum);
            sums::<f32, bf16, f32>(from, n, |sum| sum);
            sums::<f16, f32, f32>(from, n, |sum| sum);
            sums::<bf16, f32, f32>(from, n, |sum| sum);
        }
    }
}

fn sums<A: Element, B: Element, Y: Element>(
    (gpu, period, offsets): (&CudaDevice, usize, [usize; 3]),
    n: usize,
    round: fn(f32) -> Y,
) {
    let (a, b) = (numbers::<A>(n, 1), numbers::<B>(period, 2));
    let pairs = a.iter().zip(b.iter().cycle());
    let exact: Vec<Y> = pairs
        .map(|(a, b)| round(a.to_f64() as f32 + b.to_f64() as f32))
        .collect();
    let exact = bits(&exact);
    let what = format!("{:?} + {:?}, {n} by {period}", A::DTYPE, B::DTYPE);

    let on_gpu = (
        Buffer::new(gpu, &a, offsets[0]),
        Buffer::new(gpu, &b, offsets[1]),
    );
    let [of_a, of_b] = [on_gpu.0.view(gpu), on_gpu.1.view(gpu)];
    let y = Buffer::<Y>::unwritten(gpu, n, offsets[2]);
    add(gpu, of_a, of_b, y.view(gpu)).unwrap();
    assert_eq!(bits(&y.read(gpu)), exact, "{what}");
    assert_eq!(bits(&on_gpu.1.read(gpu)), bits(&b), "{what}: b");
    // In place of an operand.
    if B::DTYPE == Y::DTYPE && period == n {
        add(gpu, of_a, of_b, of_b).unwrap();
        assert_eq!(bits(&on_gpu.1.read(gpu)), exact, "{what}, in place of b");
    }
    assert_eq!(bits(&on_gpu.0.read(gpu)), bits(&a), "{what}: a");
    if A::DTYPE == Y::DTYPE {
        let of_b = Buffer::new(gpu, &b, offsets[1]);
        add(gpu, of_a, of_b.view(gpu), of_a).unwrap();
        assert_eq!(bits(&on_gpu.0.read(gpu)), exact, "{what}, in place of a");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn sums_of_other_lengths_and_dtypes_are_refused() {
    let gpu = gpu();
    let wide = Buffer::<f32>::unwritten(&gpu, 12, 0);
    let short = Buffer::<f32>::unwritten(&gpu, 5, 0);
    let half = Buffer::<bf16>::unwritten(&gpu, 12, 0);
    let other_half = Buffer::<f16>::unwritten(&gpu, 12, 0);
    let double = Buffer::<f64>::unwritten(&gpu, 12, 0);
    let nothing = wide.view(&gpu).slice(0, 0);
    let [wide, short] = [wide.view(&gpu), short.view(&gpu)];
    let [half, other_half] = [half.view(&gpu), other_half.view(&gpu)];
    let double = double.view(&gpu);
    for (a, b, y) in [
        (wide, short, wide),
        (short, wide, short),
        (wide, wide, short),
        (wide, nothing, wide),
        (half, half, wide),
        (half, wide, half),
        (half, other_half, wide),
        (double, double, double),
    ] {
        add(&gpu, a, b, y).unwrap_err();
    }
    add(&gpu, nothing, nothing, nothing).unwrap();
}
