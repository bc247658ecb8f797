//! The cast kernel: candle's values, bit for bit, and gradients in the inputs' dtypes.

use super::*;
use rstest::rstest;
use tallow::ops::{self, KernelPolicy, with_kernel_policy};

/// Returns every bit pattern of a 16-bit dtype.
fn every_pattern(dtype: DType) -> Tensor {
    let patterns = 0..=u16::MAX;
    match dtype {
        DType::F16 => {
            let all: Vec<half::f16> = patterns.map(half::f16::from_bits).collect();
            Tensor::from_vec(all, 1 << 16, &Device::Cpu).unwrap()
        }
        _ => {
            let all: Vec<half::bf16> = patterns.map(half::bf16::from_bits).collect();
            Tensor::from_vec(all, 1 << 16, &Device::Cpu).unwrap()
        }
    }
}

/// Returns f32 values of every sign and exponent: at, next to and between the ties of both half dtypes, and some
/// scattered ones. NaN is last.
fn many_f32() -> Tensor {
    let upper = (0..=u16::MAX).map(|bits| u32::from(bits) << 16);
    let ties = upper.flat_map(|upper| {
        let lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        lower.map(|lower| upper | lower)
    });
    let scattered = (0..300_007u32).map(|i| i.wrapping_mul(2_654_435_761));
    let (mut numbers, mut nans) = (Vec::new(), Vec::new());
    for bits in ties.chain(scattered) {
        let value = f32::from_bits(bits);
        match value.is_nan() {
            true => nans.push(value),
            false => numbers.push(value),
        }
    }
    numbers.extend(nans);
    let count = numbers.len();
    Tensor::from_vec(numbers, count, &Device::Cpu).unwrap()
}

/// Returns the bits of each number, or `None` for NaN.
fn bits(x: &Tensor) -> Vec<Option<u32>> {
    let of = |is_nan: bool, bits: u32| (!is_nan).then_some(bits);
    match x.dtype() {
        DType::F16 => {
            let all = x.to_vec1::<half::f16>().unwrap();
            all.iter()
                .map(|x| of(x.is_nan(), x.to_bits().into()))
                .collect()
        }
        DType::BF16 => {
            let all = x.to_vec1::<half::bf16>().unwrap();
            all.iter()
                .map(|x| of(x.is_nan(), x.to_bits().into()))
                .collect()
        }
        _ => {
            let all = x.to_vec1::<f32>().unwrap();
            all.iter().map(|x| of(x.is_nan(), x.to_bits())).collect()
        }
    }
}

#[test]
fn every_value_is_candles() {
    for from in [DType::F32, DType::F16, DType::BF16] {
        let x = match from {
            DType::F32 => many_f32(),
            _ => every_pattern(from),
        };
        for to in [DType::F32, DType::F16, DType::BF16] {
            let wanted = bits(&x.to_dtype(to).unwrap());
            let got = ops::cast(&x, to).unwrap();
            assert_eq!(got.dtype(), to);
            let got = bits(&got);
            let wrong = got
                .iter()
                .zip(&wanted)
                .position(|(got, wanted)| got != wanted);
            assert_eq!(wrong, None, "{from:?} to {to:?}");
        }
    }
}

/// Odd lengths, views with offsets, and strided views, which candle converts.
#[rstest]
fn views_and_lengths(#[values(DType::F16, DType::BF16)] dtype: DType) {
    let x = numbers(&[7, 2477], DType::F32, 1);
    let views = [
        x.narrow(0, 1, 5).unwrap(),
        x.narrow(1, 3, 513).unwrap(),
        x.t().unwrap(),
        x.narrow(0, 0, 0).unwrap(),
    ];
    for view in views {
        let got = ops::cast(&view, dtype).unwrap();
        assert!(got.is_contiguous());
        let wanted = view.to_dtype(dtype).unwrap();
        same(&got, &wanted);
        same(
            &ops::cast(&got, DType::F32).unwrap(),
            &wanted.to_dtype(DType::F32).unwrap(),
        );
    }
}

/// Casts to half precision and back; the gradient is cast too.
#[rstest]
fn gradients_are_candles(
    #[values(KernelPolicy::Strict, KernelPolicy::Reference)] policy: KernelPolicy,
    #[values(DType::F16, DType::BF16)] dtype: DType,
) {
    let x = var(&[3, 1031], DType::F32, 1);
    let scale = numbers(&[3, 1031], DType::F32, 2);
    let gradient = |cast: fn(&Tensor, DType) -> tallow::Result<Tensor>| {
        let y = cast(&cast(&x, dtype).unwrap(), DType::F32).unwrap();
        let loss = (y * &scale).unwrap().sum_all().unwrap();
        loss.backward().unwrap().remove(&x).expect("a gradient")
    };
    let got = with_kernel_policy(policy, || gradient(ops::cast));
    assert_eq!(got.dtype(), DType::F32);
    same(&got, &gradient(|x, dtype| Ok(x.to_dtype(dtype)?)));
    same(
        &got,
        &scale.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap(),
    );
    assert!(!tallow::no_grad(|| ops::cast(&x, dtype)).unwrap().track_op());
}
