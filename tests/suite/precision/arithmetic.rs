//! Type promotion, broadcasting, and sums in half precision.

use super::*;
use crate::check::refusal;
use rstest::rstest;
use tallow::ops::{KernelPolicy, with_kernel_policy};
use tallow::{Error, Result, autocast, no_grad, ops};

type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;

const OPS: [(&str, Binary); 4] = [
    ("add", ops::add),
    ("sub", ops::sub),
    ("mul", ops::mul),
    ("div", ops::div),
];

#[test]
fn dtypes_are_promoted_as_in_pytorch_inside_and_outside() {
    use DType::{BF16, F16, F32, F64, I64, U32};
    let table = [
        (F16, F16, F16),
        (BF16, BF16, BF16),
        (F16, BF16, F32),
        (F16, F32, F32),
        (BF16, F32, F32),
        (F32, F32, F32),
        (F16, F64, F64),
        (BF16, F64, F64),
        (F32, F64, F64),
        (F16, U32, F16),
        (I64, F32, F32),
    ];
    for (left, right, wanted) in table {
        for (a, b_dtype) in [(left, right), (right, left)] {
            let a = numbers(&[2, 3], a, 1);
            let b = (numbers(&[2, 3], F32, 2) + 1.0).unwrap(); // so that an integer is not 0
            let b = b.to_dtype(b_dtype).unwrap();
            for (name, op) in OPS {
                let outside = op(&a, &b).unwrap();
                assert_eq!(outside.dtype(), wanted, "{name}");
                let by_hand = op(&a.to_dtype(wanted).unwrap(), &b.to_dtype(wanted).unwrap());
                same(&outside, &by_hand.unwrap());
                for (_, _, policy) in policies() {
                    same(&autocast(policy, || op(&a, &b)).unwrap(), &outside);
                }
            }
        }
    }
}

/// `torch.result_type` of a tensor with dimensions and a scalar, and PyTorch's values for them: the scalar is not
/// rounded to the tensor's dtype before the computation.
#[test]
fn scalars_are_promoted_as_in_pytorch() {
    use DType::{BF16, F16, F32, F64, I64};
    let scalar = |value: f64, dtype| Tensor::new(value, &Device::Cpu)?.to_dtype(dtype);
    for (dims, none, wanted) in [
        (BF16, F32, BF16),
        (BF16, F64, BF16),
        (BF16, F16, BF16),
        (F16, F64, F16),
        (F32, F64, F32),
        (F64, F32, F64),
        (F64, BF16, F64),
        (I64, BF16, BF16),
        (I64, F64, F64),
        (F16, I64, F16),
    ] {
        let x = numbers(&[2, 3], F32, 1).to_dtype(dims).unwrap();
        let s = scalar(3.0, none).unwrap();
        for (name, op) in OPS {
            assert_eq!(
                op(&x, &s).unwrap().dtype(),
                wanted,
                "{name} {dims:?} {none:?}"
            );
            assert_eq!(
                op(&s, &x).unwrap().dtype(),
                wanted,
                "{name} {none:?} {dims:?}"
            );
        }
    }
    let (half, wide) = (scalar(3.0, BF16).unwrap(), scalar(1.003, F32).unwrap());
    assert_eq!(ops::mul(&half, &wide).unwrap().dtype(), F32); // neither has dimensions
    let x = Var::from_tensor(&half.broadcast_as(5).unwrap()).unwrap();
    let s = Var::from_tensor(&wide).unwrap();
    for (op, wanted) in [(ops::mul as Binary, 3.015_625), (ops::div, 2.984_375)] {
        for y in [op(&x, &s), autocast(Autocast::cpu(BF16), || op(&x, &s))] {
            let y = y.unwrap();
            assert_eq!((y.dtype(), elements(&y)), (BF16, vec![wanted; 5]));
        }
    }
    let gradients = ops::mul(&x, &s).unwrap().backward().unwrap();
    assert_eq!(elements(gradients.get(&x).unwrap()), [1.0; 5]);
    let ds = gradients.get(&s).unwrap();
    assert_eq!((ds.dtype(), elements(ds)), (F32, vec![15.0]));
}

/// Checks equality up to a few roundings: candle's gradient of a divisor is `-(dy a) / b^2`, this crate's is `-(dy a /
/// b) / b`, in which no square can overflow.
fn nearly_same(got: &Tensor, wanted: &Tensor) {
    let epsilon = match got.dtype() {
        DType::F64 => f64::EPSILON,
        DType::F16 => f64::from(half::f16::EPSILON),
        _ => f64::from(half::bf16::EPSILON),
    };
    for (got, wanted) in elements(got).into_iter().zip(elements(wanted)) {
        assert!(
            (got - wanted).abs() <= 2.0 * epsilon * wanted.abs(),
            "{got} {wanted}"
        );
    }
}

#[test]
fn values_and_gradients_are_candles() {
    let candle: [Binary; 4] = [
        |a, b| Ok(a.broadcast_add(b)?),
        |a, b| Ok(a.broadcast_sub(b)?),
        |a, b| Ok(a.broadcast_mul(b)?),
        |a, b| Ok(a.broadcast_div(b)?),
    ];
    let shapes: [(&[usize], &[usize]); 4] = [
        (&[2, 3], &[2, 3]),
        (&[2, 3], &[3]),
        (&[2, 1], &[1, 3]),
        (&[], &[2, 3]),
    ];
    for ((name, ours), theirs) in OPS.into_iter().zip(candle) {
        for (a, b) in shapes {
            let (a, b) = (var(a, DType::F64, 1), var(b, DType::F64, 2));
            let (got, wanted) = (ours(&a, &b).unwrap(), theirs(&a, &b).unwrap());
            same(&got, &wanted);
            let (got, wanted) = (got.backward().unwrap(), wanted.backward().unwrap());
            for x in [&a, &b] {
                let pair = (got.get(x).expect(name), wanted.get(x).unwrap());
                match name {
                    "div" => nearly_same(pair.0, pair.1),
                    _ => same(pair.0, pair.1),
                }
            }
            assert!(!no_grad(|| ours(&a, &b)).unwrap().track_op());
        }
    }
}

/// candle's own sum over a broadcast dimension would stop at 256 in bf16.
#[rstest]
fn a_broadcast_operands_gradient_is_summed_in_f32(
    #[values(DType::BF16, DType::F16)] dtype: DType,
    #[values(0, 1)] which: usize,
) {
    let rows = Tensor::zeros((4096, 3), dtype, &Device::Cpu).unwrap();
    let bias = Var::zeros(3, dtype, &Device::Cpu).unwrap();
    let sum = match which {
        0 => ops::add(&bias, &rows),
        _ => ops::add(&rows, &bias),
    };
    let sum = sum.unwrap();
    assert_eq!((sum.dtype(), sum.dims()), (dtype, &[4096, 3][..]));
    let gradients = sum.backward().unwrap(); // from a gradient of ones
    assert_eq!(elements(gradients.get(&bias).unwrap()), [4096.0; 3]);
}

#[rstest]
fn sums_and_means_of_half_precision_keep_their_digits(
    #[values(DType::BF16, DType::F16)] dtype: DType,
) {
    let ones = Tensor::ones(4096, dtype, &Device::Cpu).unwrap();
    let total = ops::sum(&ones).unwrap();
    assert_eq!((total.dtype(), elements(&total)), (dtype, vec![4096.0]));
    assert_eq!(elements(&ops::mean(&ones).unwrap()), [1.0]);
    let rows = ones.reshape((2048, 2)).unwrap();
    let totals = ops::sum_over(&rows, 0).unwrap();
    assert_eq!(
        (totals.dtype(), elements(&totals)),
        (dtype, vec![2048.0; 2])
    );
    // A total that only f32 can hold: CUDA's policy computes sums in f32.
    let hundreds = (ones * 100.0).unwrap();
    let total = autocast(Autocast::cuda(dtype), || ops::sum(&hundreds)).unwrap();
    assert_eq!(
        (total.dtype(), elements(&total)),
        (DType::F32, vec![409_600.0])
    );
}

#[test]
fn functions_and_their_derivatives() {
    type Unary = fn(&Tensor) -> Result<Tensor>;
    type Real = fn(f64) -> f64;
    let table: [(Unary, Real, Real); 8] = [
        (ops::exp, f64::exp, f64::exp),
        (ops::log, f64::ln, f64::recip),
        (|x| ops::pow(x, 2.5), |x| x.powf(2.5), |x| 2.5 * x.powf(1.5)),
        (ops::rsqrt, |x| x.sqrt().recip(), |x| -0.5 * x.powf(-1.5)),
        (ops::sqrt, f64::sqrt, |x| 0.5 / x.sqrt()),
        (ops::abs, f64::abs, f64::signum),
        (|x| ops::clamp(x, -9.0, 9.0), |x| x, |_| 1.0),
        (|x| ops::affine(x, 1.5, 0.25), |x| 1.5 * x + 0.25, |_| 1.5),
    ];
    for (f, value, derivative) in table {
        for (dtype, bound) in [
            (DType::F64, 1e-14),
            (DType::F32, 1e-6),
            (DType::F16, 5.1e-4),
            (DType::BF16, 4e-3),
        ] {
            let x = var(&[3, 5], dtype, 1);
            let y = f(&x).unwrap();
            assert_eq!(y.dtype(), dtype);
            let gradient = y.backward().unwrap().get(&x).unwrap().clone();
            for ((x, y), dx) in elements(&x)
                .into_iter()
                .zip(elements(&y))
                .zip(elements(&gradient))
            {
                let close = |got: f64, wanted: f64| (got - wanted).abs() <= bound * wanted.abs();
                assert!(close(y, value(x)), "{dtype:?}: {y} of {x}");
                assert!(close(dx, derivative(x)), "{dtype:?}: {dx} at {x}");
            }
        }
    }
    // exp(log_softmax) sums to one, and -log_softmax of the target is the cross-entropy.
    let logits = numbers(&[3, 7], DType::F64, 2);
    let p = ops::log_softmax(&logits).unwrap();
    let sums = p.exp().unwrap().sum(1).unwrap();
    assert!(elements(&sums).iter().all(|s| (s - 1.0).abs() < 1e-14));
    let targets = Tensor::new(&[3u32, 0, 6], &Device::Cpu).unwrap();
    let picked = p.gather(&targets.unsqueeze(1).unwrap(), 1).unwrap();
    let loss = elements(&ops::cross_entropy(&logits, &targets).unwrap())[0];
    assert!((elements(&picked.mean_all().unwrap())[0] + loss).abs() < 1e-14);
}

/// The values and gradients are PyTorch's.
#[test]
fn roots_absolute_values_and_bounds_of_special_numbers() {
    let x = [
        f64::NAN,
        f64::NEG_INFINITY,
        -1.0,
        -0.0,
        0.0,
        1.0,
        f64::INFINITY,
    ];
    let nan = f64::NAN;
    let infinite = f64::INFINITY;
    type Row = (fn(&Tensor) -> Result<Tensor>, [f64; 7], [f64; 7]);
    let table: [Row; 4] = [
        (
            ops::sqrt,
            [nan, nan, nan, 0.0, 0.0, 1.0, infinite],
            [nan, nan, nan, -infinite, infinite, 0.5, 0.0],
        ),
        (
            ops::abs,
            [nan, infinite, 1.0, 0.0, 0.0, 1.0, infinite],
            [0.0, -1.0, -1.0, 0.0, 0.0, 1.0, 1.0],
        ),
        (
            |x| ops::clamp(x, -1.0, f64::INFINITY),
            [nan, -1.0, -1.0, 0.0, 0.0, 1.0, infinite],
            [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0],
        ),
        (
            |x| ops::affine(x, 0.0, 2.0),
            [nan, nan, 2.0, 2.0, 2.0, 2.0, nan],
            [0.0; 7],
        ),
    ];
    for policy in [KernelPolicy::Strict, KernelPolicy::Reference] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            for (f, value, gradient) in &table {
                let x = Tensor::new(&x, &Device::Cpu).unwrap();
                let x = Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
                let y = with_kernel_policy(policy, || f(&x)).unwrap();
                let found = elements(&y);
                let dx = elements(y.backward().unwrap().get(&x).unwrap());
                let same = |a: &[f64], b: &[f64; 7]| {
                    let mut pairs = a.iter().zip(b);
                    pairs.all(|(a, b)| a == b || a.is_nan() && b.is_nan())
                };
                assert!(same(&found, value), "{dtype:?}: {found:?} for {value:?}");
                assert!(same(&dx, gradient), "{dtype:?}: {dx:?} for {gradient:?}");
            }
        }
    }
}

/// In f64 the numbers of `affine` are not rounded to f32.
#[test]
fn affine_is_exact_in_f64() {
    let x = numbers(&[3, 5], DType::F64, 1);
    let y = elements(&ops::affine(&x, 0.1, 1e-9).unwrap());
    for (x, y) in elements(&x).into_iter().zip(y) {
        assert_eq!(y, 0.1 * x + 1e-9);
    }
}

#[test]
fn bad_input_is_refused_in_words() {
    let x = numbers(&[2, 3], DType::F32, 1);
    let ids = x.to_dtype(DType::U32).unwrap();
    for (name, op) in OPS {
        refusal(op(&ids, &ids), &[name, "bf16", "u32 and u32"]);
        let error = refusal(
            op(&x, &x.t().unwrap()),
            &[name, "[2, 3] and [3, 2]", "broadcast"],
        );
        assert!(matches!(error, Error::Shape { .. }));
    }
    for (name, result) in [
        ("exp", ops::exp(&ids)),
        ("pow", ops::pow(&ids, 2.0)),
        ("abs", ops::abs(&ids)),
        ("clamp", ops::clamp(&ids, 0.0, 1.0)),
        ("sum", ops::sum(&ids)),
        ("log_softmax", ops::log_softmax(&ids)),
    ] {
        refusal(result, &[name, "floating-point", "u32"]);
    }
    let empty = Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap();
    refusal(ops::mean(&empty), &["mean", "at least one element"]);
    refusal(ops::mean_over(&empty, 1), &["mean", "at least one element"]);
    for (name, result) in [
        ("max", ops::max_over(&empty, 1)),
        ("min", ops::min_keepdim(&empty, 1)),
    ] {
        refusal(result, &[name, "at least one element in each"]);
    }
    refusal(ops::var(&x, 0, 2), &["var", "more than 2 elements"]);
    refusal(
        ops::logsumexp(&x, 2),
        &["logsumexp", "dimensions of [2, 3]"],
    );
    refusal(ops::var(&ids, 0, 1), &["var", "floating-point", "u32"]);
    refusal(
        ops::sum_over(&x, 2),
        &["sum", "dimensions of [2, 3]", "out of range"],
    );
    refusal(ops::mean_over(&x, (0, 0)), &["mean", "each given once"]);
    refusal(
        ops::sum_keepdim(&x, ()),
        &["sum", "none", "without dims reduces all"],
    );
    refusal(ops::sum_over(&ids, 0), &["sum", "floating-point", "u32"]);
    for (lowest, highest) in [(1.0, 0.0), (f64::NAN, 0.0), (0.0, f64::NAN)] {
        refusal(
            ops::clamp(&x, lowest, highest),
            &["clamp", "ascending order", "an infinite bound is no bound"],
        );
    }
    refusal(
        ops::cast(&x, DType::U32),
        &["cast", "floating-point dtype", "u32"],
    );
}

/// In half precision, on odd sizes and strides, values and gradients equal candle's, which round once. Quotients are
/// compared with candle in f32, because its own gradients in half precision round three times.
#[rstest]
fn half_precision_is_candles(
    #[values(DType::BF16, DType::F16)] dtype: DType,
    #[values(true, false)] transposed: bool,
) {
    let candle: [Binary; 4] = [
        |a, b| Ok((a + b)?),
        |a, b| Ok((a - b)?),
        |a, b| Ok((a * b)?),
        |a, b| {
            let [a, b] = [a, b].map(|x| x.to_dtype(DType::F32));
            Ok((a? / b?)?)
        },
    ];
    let (a, b) = (var(&[33, 1031], dtype, 1), var(&[33, 1031], dtype, 2));
    let upstream = numbers(&[33, 1031], dtype, 3);
    let run = |op: Binary| {
        let turn = |x: &Tensor| {
            if transposed {
                x.t().unwrap()
            } else {
                x.clone()
            }
        };
        let y = op(&turn(&a), &turn(&b)).unwrap().to_dtype(dtype).unwrap();
        let mut gradients = (&y * turn(&upstream)).unwrap().backward().unwrap();
        [
            y.detach(),
            gradients.remove(&a).expect("a's gradient"),
            gradients.remove(&b).expect("b's gradient"),
        ]
    };
    for ((name, ours), theirs) in OPS.into_iter().zip(candle) {
        for (got, wanted) in run(ours).iter().zip(&run(theirs)) {
            assert_eq!(got.dtype(), dtype, "{name}");
            match name {
                "div" => nearly_same(got, wanted),
                _ => same(got, wanted),
            }
        }
    }
}
