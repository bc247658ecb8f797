//! Operands at the edge: empty views, too many elements, scalars, 8-bit floats, broadcast views.

use super::case::{cast, elements, normal};
use crate::check::refusal;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::ops::{self, Gelu, KernelPolicy, with_kernel_policy};
use tallow::{Error, Result};

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap()
}

fn var(dims: &[usize], dtype: DType, seed: u64) -> Var {
    Var::from_tensor(&cast(&normal(dims, seed), dtype)).unwrap()
}

const POLICIES: [KernelPolicy; 2] = [KernelPolicy::Prefer, KernelPolicy::Reference];

/// An empty view whose offset is beyond its storage is valid.
#[test]
fn views_of_nothing_beyond_their_storage() {
    let base = var(&[4, 4], DType::F32, 1);
    let view = base.narrow(0, 4, 0).unwrap().narrow(1, 4, 0).unwrap(); // (0, 0) at offset 20 of 16
    let wide = base.narrow(0, 4, 0).unwrap().narrow(1, 1, 3).unwrap(); // (0, 3) at offset 17
    let (w, gain) = (var(&[5, 3], DType::F32, 2), var(&[3], DType::F32, 3));
    let bias = var(&[5], DType::F32, 4);
    let flash = |x: &Tensor| {
        let x = x.reshape((1, 1, 0, 3))?;
        let keys = w.reshape((1, 1, 5, 3))?;
        attention::flash(&x, &keys, &keys, &AttentionConfig::default())
    };
    for policy in POLICIES {
        with_kernel_policy(policy, || {
            let results = [
                ops::relu(&view),
                ops::softmax(&view, 1.0, Mask::Full),
                ops::exp(&view),
                ops::add(&view, &view),
                ops::cast(&view, DType::BF16),
                ops::swiglu(&view, &view),
                ops::linear(&wide, &w),
                ops::swiglu_linear(&wide, &w, &w),
                ops::rms_norm(&wide, &gain, 1e-5),
                ops::matmul_transposed(&wide, &w),
                ops::mul(&wide, &gain),
                flash(&wide),
                ops::gelu(&view, Gelu::Erf),
                ops::tanh(&view),
                ops::linear_bias(&wide, &w, &bias),
                ops::repeat_heads(&view.reshape((1, 0, 0)).unwrap(), 3),
                ops::add_scaled(&wide, &gain, 0.5),
                ops::concat(&[&wide, &wide], 1),
                ops::contiguous(&wide.t().unwrap()),
            ];
            for (i, y) in results.into_iter().enumerate() {
                let y = y.unwrap();
                assert_eq!(y.elem_count(), 0, "{i}");
                let gradient = y.backward().unwrap().remove(&base).expect("a gradient");
                assert_eq!(elements(&gradient), [0.0; 16], "{i}");
            }
        });
    }
}

/// Every operand of an empty result has a gradient of zeros. (In candle, an empty matmul depends on its first operand
/// only.)
#[test]
fn a_result_without_elements_gives_every_operand_zeros() {
    for policy in POLICIES {
        with_kernel_policy(policy, || {
            let (x, b) = (var(&[0, 3], DType::F32, 1), var(&[3], DType::F32, 2));
            for op in [ops::add, ops::sub, ops::mul, ops::div] {
                for y in [op(&x, &b), op(&b, &x)] {
                    let gradients = y.unwrap().backward().unwrap();
                    assert_eq!(elements(gradients.get(&b).expect("b's")), [0.0; 3]);
                    assert_eq!(gradients.get(&x).expect("x's").dims(), [0, 3]);
                }
            }
            let gradients = ops::rms_norm(&x, &b, 1e-5).unwrap().backward().unwrap();
            assert_eq!(elements(gradients.get(&b).expect("b's")), [0.0; 3]);
        });
    }
}

/// Matmuls over an empty dimension are zeros.
#[test]
fn weights_without_inputs() {
    for policy in POLICIES {
        with_kernel_policy(policy, || {
            let (x, w) = (var(&[3, 0], DType::F32, 1), var(&[5, 0], DType::F32, 2));
            for y in [ops::linear(&x, &w), ops::swiglu_linear(&x, &w, &w)] {
                let y = y.unwrap();
                assert_eq!(y.dims(), [3, 5]);
                assert_eq!(elements(&y), [0.0; 15]);
                let gradients = y.backward().unwrap();
                assert_eq!(gradients.get(&x).unwrap().dims(), [3, 0]);
                assert_eq!(gradients.get(&w).unwrap().dims(), [5, 0]);
            }
        });
    }
}

/// Without inputs the result is the bias.
#[test]
fn a_bias_without_inputs() {
    for policy in POLICIES {
        with_kernel_policy(policy, || {
            let (x, w) = (var(&[3, 0], DType::F32, 1), var(&[5, 0], DType::F32, 2));
            let b = var(&[5], DType::F32, 3);
            let y = ops::linear_bias(&x, &w, &b).unwrap();
            assert_eq!(elements(&y), elements(&b).repeat(3));
            let gradients = y.backward().unwrap();
            assert_eq!(gradients.get(&x).unwrap().dims(), [3, 0]);
            assert_eq!(gradients.get(&w).unwrap().dims(), [5, 0]);
            assert_eq!(elements(gradients.get(&b).unwrap()), [3.0; 5]);
        });
    }
}

/// Equal to `torch.softmax(x, -1)` and `torch.log_softmax(x, -1)`.
#[test]
fn softmax_of_scalars_and_of_nothing_is_pytorchs() {
    for policy in POLICIES {
        with_kernel_policy(policy, || {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                let x = Var::from_tensor(&cast(&Tensor::new(3f64, &Device::Cpu).unwrap(), dtype));
                let x = x.unwrap();
                let p = ops::softmax(&x, 2.0, Mask::Full).unwrap();
                let log_p = ops::log_softmax(&x).unwrap();
                for (y, wanted) in [(p, 1.0), (log_p, 0.0)] {
                    assert_eq!((y.dims(), y.dtype()), (&[][..], dtype));
                    assert_eq!(elements(&y), [wanted]);
                    let gradients = y.backward().unwrap();
                    assert_eq!(elements(gradients.get(&x).unwrap()), [0.0]);
                }
                for dims in [&[2, 0][..], &[0], &[0, 3], &[2, 0, 0]] {
                    let x = Var::zeros(dims, dtype, &Device::Cpu).unwrap();
                    for y in [ops::softmax(&x, 1.0, Mask::Full), ops::log_softmax(&x)] {
                        let y = y.unwrap();
                        assert_eq!((y.dims(), y.dtype()), (dims, dtype));
                        assert_eq!(y.backward().unwrap().get(&x).unwrap().dims(), dims);
                    }
                }
                let masked = ops::softmax(&cast(&zeros(&[2, 0]), dtype), 1.0, Mask::Causal);
                assert_eq!(masked.unwrap().dims(), [2, 0]);
            }
        });
    }
}

/// Equal to `torch.sum(x, dim)` and `torch.mean(x, dim)`.
#[test]
fn sums_over_nothing_are_zeros() {
    for policy in POLICIES {
        with_kernel_policy(policy, || {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                let x = Var::zeros((2, 0, 3), dtype, &Device::Cpu).unwrap();
                let y = ops::sum_over(&x, 1).unwrap();
                assert_eq!((y.dims(), y.dtype()), (&[2, 3][..], dtype));
                assert_eq!(elements(&y), [0.0; 6]);
                assert_eq!(y.backward().unwrap().get(&x).unwrap().dims(), [2, 0, 3]);
                let means = ops::mean_keepdim(&x, (0, 2)).unwrap();
                assert_eq!(means.dims(), [1, 0, 1]);
                assert_eq!(means.backward().unwrap().get(&x).unwrap().dims(), [2, 0, 3]);
            }
        });
    }
}

/// Equal to `torch.max(x, 1)` and `torch.logsumexp(x, 1)`.
#[test]
fn extremes_and_sums_of_infinities_and_nan() {
    let (nan, infinite) = (f64::NAN, f64::INFINITY);
    let rows = [
        [1.0, infinite, 2.0],
        [-infinite; 3],
        [nan, infinite, nan],
        [3.0, nan, 1.0],
    ];
    let same = |a: &[f64], b: &[f64]| {
        let mut pairs = a.iter().zip(b);
        pairs.all(|(a, b)| a == b || a.is_nan() && b.is_nan())
    };
    for policy in POLICIES {
        with_kernel_policy(policy, || {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                let x = cast(&Tensor::new(&rows, &Device::Cpu).unwrap(), dtype);
                let x = Var::from_tensor(&x).unwrap();
                let y = ops::max_over(&x, 1).unwrap();
                let found = elements(&y);
                assert!(same(&found, &[infinite, -infinite, nan, nan]), "{found:?}");
                let dx = y.backward().unwrap().remove(&x).unwrap();
                let wanted = [0., 1., 0., 1., 0., 0., 1., 0., 0., 0., 1., 0.];
                assert_eq!(elements(&dx), wanted);
                let lowest = elements(&ops::min_over(&x, 1).unwrap());
                assert!(same(&lowest, &[1.0, -infinite, nan, nan]), "{lowest:?}");
                let sums = elements(&ops::logsumexp(&x, 1).unwrap());
                assert!(same(&sums, &[infinite, -infinite, nan, nan]), "{sums:?}");
            }
        });
    }
}

/// Sizes whose element count overflows 64 bits or exceeds the memory are refused.
#[test]
fn elements_that_nothing_can_hold() {
    let huge = 1usize << 40;
    let repeated = |dims: &[usize]| zeros(&[1]).broadcast_as(dims).unwrap();
    let ids = Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap();
    let refusals: [(&str, Result<Tensor>); 18] = [
        ("gelu", ops::gelu(&repeated(&[huge, huge]), Gelu::Erf)),
        ("contiguous", ops::contiguous(&repeated(&[huge, huge]))),
        (
            "repeat_heads",
            ops::repeat_heads(&repeated(&[1, 1, 1 << 20]), 1 << 50),
        ),
        (
            "concat",
            ops::concat(
                &[&repeated(&[huge, 1 << 22]), &repeated(&[huge, 1 << 22])],
                1,
            ),
        ),
        (
            "linear_bias",
            ops::linear_bias(
                &zeros(&[huge, 0]),
                &zeros(&[1 << 30, 0]),
                &repeated(&[1 << 30]),
            ),
        ),
        ("relu", ops::relu(&repeated(&[huge, huge]))),
        ("exp", ops::exp(&repeated(&[huge, huge]))),
        (
            "softmax",
            ops::softmax(&repeated(&[huge, huge]), 1.0, Mask::Full),
        ),
        ("add", ops::add(&repeated(&[huge, huge]), &zeros(&[1]))),
        (
            "swiglu",
            ops::swiglu(&repeated(&[huge, huge]), &repeated(&[huge, huge])),
        ),
        (
            "matmul",
            ops::matmul(&zeros(&[huge, 0]), &zeros(&[0, huge])),
        ),
        (
            "linear",
            ops::linear(&zeros(&[huge, 0]), &zeros(&[huge, 0])),
        ),
        (
            "swiglu_linear",
            ops::swiglu_linear(&zeros(&[huge, 0]), &zeros(&[huge, 0]), &zeros(&[huge, 0])),
        ),
        (
            "embedding",
            ops::embedding(&ids.broadcast_as((huge, huge)).unwrap(), &zeros(&[1, 2])),
        ),
        (
            "split_heads",
            ops::split_heads(&repeated(&[huge, huge, 2]), 2),
        ),
        ("relu", ops::relu(&repeated(&[huge, huge, 0]))),
        ("log_softmax", ops::log_softmax(&repeated(&[huge, huge]))),
        ("sum", ops::sum_over(&repeated(&[huge, 0, huge]), 1)),
    ];
    for (op, refusal) in refusals {
        let text = refusal.expect_err(op).to_string();
        assert!(
            text.starts_with(op) && text.contains("can be addressed"),
            "{text}"
        );
    }
    // The count fits in 64 bits, but not in this machine's memory.
    for y in [
        ops::relu(&repeated(&[huge])),
        ops::exp(&repeated(&[huge])),
        ops::mul(&repeated(&[huge]), &zeros(&[1])),
        ops::mul(&repeated(&[1 << 24, 1]), &repeated(&[1, 1 << 24])),
        ops::matmul(&repeated(&[1 << 24, 1]), &repeated(&[1, 1 << 24])),
    ] {
        let error = y.unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    }
}

/// candle's conversion from these never ends at subnormal numbers.
#[test]
fn floats_of_eight_bits_are_refused() {
    let x = cast(
        &Tensor::new(&[0.004f32, 1.0], &Device::Cpu).unwrap(),
        DType::F8E4M3,
    );
    for result in [
        ops::cast(&x, DType::F32),
        ops::cast(&zeros(&[2]), DType::F8E4M3),
        ops::exp(&x),
        ops::softmax(&x, 1.0, Mask::Full),
        ops::add(&x, &zeros(&[2])),
        ops::swiglu(&x, &x),
        ops::rms_norm(&x, &x, 1e-5),
    ] {
        refusal(result, &["f16, bf16, f32 or f64"]);
    }
}

/// Checks that the sum over a broadcast dimension is within one rounding of f64 from the same rounded operands.
fn rounded_once(name: &str, got: &Tensor, exact: &Tensor, dtype: DType) {
    let unit = match dtype {
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-11),
    };
    for (got, exact) in elements(got).into_iter().zip(elements(exact)) {
        let of_f32 = 2e-5; // the rounding error of f32 sums whose terms cancel
        let bound = unit * exact.abs() + of_f32;
        assert!(
            (got - exact).abs() <= bound,
            "{name}: {got}, exactly {exact}"
        );
    }
}

#[rstest]
fn gradients_of_broadcast_operands_are_rounded_once(
    #[values(DType::BF16, DType::F16)] dtype: DType,
) {
    type Op = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let repeat = |b: &Tensor| Ok::<_, Error>(b.reshape((1, 33, 1))?.broadcast_as((64, 33, 1))?);
    let table: [(&str, &[usize], &[usize], Op); 8] = [
        ("div by a row", &[300, 5], &[5], ops::div),
        ("div by a matrix", &[30, 10, 5], &[10, 5], ops::div),
        ("div by a scalar", &[300, 5], &[], ops::div),
        ("div of a row", &[5], &[300, 5], ops::div),
        ("mul", &[300, 5], &[5], ops::mul),
        ("mul by a view", &[300, 5], &[5], |a, b| {
            ops::mul(a, &b.broadcast_as(a.shape())?)
        }),
        ("matmul", &[64, 7, 33], &[33], |_, _| unreachable!()),
        (
            "matmul_transposed",
            &[64, 7, 33],
            &[33],
            |_, _| unreachable!(),
        ),
    ];
    for (name, a, b, op) in table {
        let (a, b) = (var(a, dtype, 1), (cast(&normal(b, 2), dtype)));
        // Away from 0, where quotients are large.
        let b = Var::from_tensor(&(b.sign().unwrap() + &b).unwrap()).unwrap();
        let apply = |a: &Tensor, b: &Tensor| match name {
            "matmul" => ops::matmul(a, &repeat(b)?),
            "matmul_transposed" => ops::matmul_transposed(a, &repeat(b)?.transpose(1, 2)?),
            _ => op(a, b),
        };
        let wide = |x: &Var| Var::from_tensor(&cast(x, DType::F64)).unwrap();
        let (exact_a, exact_b) = (wide(&a), wide(&b));
        let exact = apply(&exact_a, &exact_b).unwrap().backward().unwrap();
        let y = apply(&a, &b).unwrap();
        assert_eq!(y.dtype(), dtype, "{name}");
        let got = y.backward().unwrap();
        for (x, exact_x) in [(&a, &exact_a), (&b, &exact_b)] {
            let (got, exact) = (got.get(x).unwrap(), exact.get(exact_x).unwrap());
            assert_eq!(got.dtype(), dtype, "{name}");
            rounded_once(name, got, exact, dtype);
        }
    }
}
