//! The log-sum-exp of naive attention against the oracle and against flash attention's, in every dtype, by kernel and
//! by candle's own ops.

use super::judge::judge;
use super::oracle::Oracle;
use super::problem::{
    Attend, DTYPES, FLASH, MASKS, Problem, Sizes, dtypes_with_kernels, elements, on_test_device,
    skips_on_gpu,
};
use crate::settings::with_mask;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::{self, AttentionConfig, Mask};
use tallow::graph::{self, Target};
use tallow::no_grad;
use tallow::ops::{KernelPolicy, with_kernel_policy};

const KERNEL: Attend =
    |q, k, v, config| on_test_device(attention::naive_with_lse, [q, k, v], config);
const REFERENCE: Attend =
    |q, k, v, config| with_kernel_policy(KernelPolicy::Reference, || KERNEL(q, k, v, config));

/// Fewer matrices than threads and more, queries that see no key, grouped heads.
fn problems() -> impl Iterator<Item = Problem> {
    let sizes = [
        Sizes::new((1, 1, 1), (257, 123), 24),
        Sizes::new((2, 4, 2), (123, 131), 40),
        Sizes::new((4, 6, 3), (9, 5), 8),
    ];
    let masked = sizes
        .into_iter()
        .flat_map(|sizes| MASKS.map(|mask| (sizes, mask)));
    masked.map(|(sizes, mask)| Problem::random(sizes, mask, None, 101))
}

#[rstest]
fn is_as_near_as_it_must_be(#[values(KERNEL, REFERENCE)] attend: Attend) {
    for problem in problems() {
        let oracle = Oracle::of(&problem);
        for dtype in DTYPES {
            judge(&problem, &oracle, dtype, attend)
                .unwrap_or_else(|error| panic!("{:?} {dtype:?}: {error}", problem.config));
        }
    }
}

/// It is within a few eps of flash attention's, relative to the scores, and -inf for the same queries.
#[rstest]
fn is_that_of_flash_attention(#[values(KERNEL, REFERENCE)] attend: Attend) {
    for problem in problems() {
        for dtype in dtypes_with_kernels() {
            let [lse, of_flash] = [attend, FLASH].map(|attend| problem.run(dtype, attend).lse);
            let eps = if dtype == DType::F64 { 1e-14 } else { 5e-6 };
            for (ours, theirs) in lse.iter().zip(&of_flash) {
                let near = ours == theirs || (ours - theirs).abs() <= eps * (1.0 + theirs.abs());
                assert!(
                    near,
                    "{ours} for {theirs} in {dtype:?}, {:?}",
                    problem.config
                );
            }
            let blind = |x: &[f64]| x.iter().filter(|x| **x == f64::NEG_INFINITY).count();
            assert_eq!(blind(&lse), blind(&of_flash));
        }
    }
}

/// Computing it changes no bit of the other results.
#[test]
fn costs_no_bit_of_the_others() {
    let plain: Attend = |q, k, v, config| {
        let (_, lse) = no_grad(|| KERNEL(q, k, v, config))?;
        let naive: Attend = |q, k, v, config| {
            let out = attention::naive(q, k, v, config)?;
            Ok((out.clone(), out))
        };
        Ok((on_test_device(naive, [q, k, v], config)?.0, lse))
    };
    for problem in problems() {
        for dtype in DTYPES {
            let [with, without] = [KERNEL, plain].map(|attend| problem.run(dtype, attend).bits());
            assert!(with == without, "{dtype:?}");
        }
    }
}

#[test]
fn of_no_keys_and_of_one_head_without_a_batch() {
    let config = with_mask(Mask::CausalEnd);
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let (q, k) = (zeros(&[2, 3, 5, 8]), zeros(&[2, 3, 0, 8]));
    let (out, lse) = KERNEL(&q, &k, &k, &config).unwrap();
    assert_eq!((out.dims(), lse.dims()), (q.dims(), &[2, 3, 5][..]));
    assert_eq!(elements(&lse), vec![f64::NEG_INFINITY; 30]);

    let (_, lse) = KERNEL(&zeros(&[2, 8]), &zeros(&[3, 8]), &zeros(&[3, 4]), &config).unwrap();
    assert_eq!(lse.dims(), [2]);
    let lse: Vec<f32> = lse.to_vec1().unwrap();
    let near = |lse: f32, keys: f32| (lse - keys.ln()).abs() < 1e-6;
    assert!(near(lse[0], 2.0) && near(lse[1], 3.0), "{lse:?}");
}

/// In a trace it is a composed node next to the op, and is not tracked.
#[test]
fn is_traced() {
    if skips_on_gpu("a trace is on no device") {
        return;
    }
    let q = graph::input("q", (2, 3, 5, 8), DType::BF16).unwrap();
    let w = Var::zeros((2, 3, 5, 8), DType::BF16, &Device::Cpu).unwrap();
    let config = AttentionConfig::default();
    let trace = graph::trace(Target::Cpu, || {
        attention::naive_with_lse(&w, &q, &q, &config)
    });
    let trace = trace.unwrap();
    let ops: Vec<_> = trace.nodes().map(|node| (node.op, node.composed)).collect();
    assert_eq!(
        ops,
        [("attention::naive", false), ("attention::naive lse", true)]
    );
    let outputs: Vec<_> = trace
        .outputs()
        .iter()
        .map(|x| trace.get(x.value).unwrap())
        .collect();
    assert_eq!(outputs[1].shape, [2, 3, 5]);
    assert_eq!(outputs[1].dtype, DType::F32);
    assert_eq!([outputs[0].tracked, outputs[1].tracked], [true, false]);
}
