//! Flash attention on a GPU: out, lse and gradients in f32 against f64 and naive f32, as on the CPU; and how far values
//! that are not finite spread.

use super::judge::judge;
use super::masks::{combined, of_shape, with_bias};
use super::oracle::Oracle;
use super::packed::problems;
use super::problem::{Attend, MASKS, Problem, Sizes, elements, on, tensor};
use super::value_width::{self, Widths};
use super::wide_scores::no_worse_than_naive;
use candle_core::{DType, Device, Tensor, Var};
use rstest::rstest;
use tallow::attention::{self, AttentionConfig, Mask, ScoreBias};
use tallow::ops::{KernelPolicy, with_kernel_policy};

/// The GPU's kernel, on inputs copied from the CPU, with results copied back.
pub const ON_CARD: Attend = |q, k, v, config| {
    let strict: Attend = |q, k, v, config| {
        with_kernel_policy(KernelPolicy::Strict, || {
            attention::flash_with_lse(q, k, v, config)
        })
    };
    on(&tallow::device("cuda:0")?, strict, [q, k, v], config)
};

/// Multiplies each input by 4/3, so that values use all digits of f32 and a matmul of fewer digits would show.
pub fn thirds(problem: Problem) -> Problem {
    let thirds = |values: &[f64]| values.iter().map(|x| 4.0 / 3.0 * x).collect();
    let wide = Problem {
        q: thirds(&problem.q),
        k: thirds(&problem.k),
        v: thirds(&problem.v),
        d_out: thirds(&problem.d_out),
        ..problem
    };
    wide.rounded_to(DType::F32)
}

/// A NaN in one row reaches everything that depends on it. What the mask hides from it keeps its bits, except in nearby
/// rows that a tile may hold together with the NaN.
#[rstest]
#[ignore = "needs a CUDA device"]
fn what_is_not_finite_stays_near(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values(32, 64, 128, 256)] head_dim: usize,
) {
    const NEAR: usize = 320;
    let (length, row) = (700, 350);
    let sizes = Sizes::new((1, 1, 1), (length, length), head_dim);
    let problem = Problem::random(sizes, Mask::Causal, None, 92);
    let clean = problem.run(dtype, ON_CARD);
    let inputs: [fn(&mut Problem) -> &mut Vec<f64>; 4] =
        [|p| &mut p.q, |p| &mut p.k, |p| &mut p.v, |p| &mut p.d_out];
    for (i, input) in inputs.into_iter().enumerate() {
        let mut sick = problem.clone();
        input(&mut sick)[row * head_dim + 2] = f64::NAN;
        let wanted = Oracle::of(&sick).results;
        let found = sick.run(dtype, ON_CARD);
        let (clean, found) = (clean.named(), found.named());
        for (which, (name, wanted)) in wanted.named().into_iter().enumerate() {
            let width = wanted.len() / length;
            for (at, wanted) in wanted.iter().enumerate() {
                let (clean, found) = (clean[which].1[at], found[which].1[at]);
                let near = (at / width).abs_diff(row) < NEAR;
                let fine = match wanted.is_nan() {
                    true => found.is_nan(),
                    false => found == clean || (near && found.is_nan()),
                };
                assert!(
                    fine,
                    "input {i}: {name}[{at}] is {found}, without it {clean}"
                );
            }
        }
    }
}

/// Grouped heads, queries that see no key, tails of tiles, and several tiles in both directions.
#[rstest]
#[ignore = "needs a CUDA device"]
fn in_f32(
    #[values(4, 16, 28, 32, 64, 96, 128, 256)] head_dim: usize,
    #[values((1, 1), (37, 5), (5, 37), (129, 65), (130, 197))] lengths: (usize, usize),
    #[values(None, Some(0.7))] scale: Option<f64>,
) {
    for mask in MASKS {
        let sizes = Sizes::new((2, 4, 2), lengths, head_dim);
        let problem = thirds(Problem::random(sizes, mask, scale, 91));
        let oracle = Oracle::of(&problem);
        judge(&problem, &oracle, DType::F32, ON_CARD)
            .unwrap_or_else(|error| panic!("{:?} {sizes:?}: {error}", problem.config));
        let [first, second] = [(), ()].map(|()| problem.run(DType::F32, ON_CARD).bits());
        assert!(first == second, "{:?} {sizes:?}", problem.config);
    }
}

/// Documents and windows, with the same bits each time. (Half precision and TF32 are tested with `TALLOW_TEST_DEVICE`,
/// and in `tf32`.)
#[rstest]
#[ignore = "needs a CUDA device"]
fn packed(#[values(16, 64, 80, 128, 256)] head_dim: usize) {
    for problem in problems(head_dim) {
        let exact = thirds(problem.clone());
        let oracle = Oracle::of(&exact);
        judge(&exact, &oracle, DType::F32, ON_CARD)
            .unwrap_or_else(|error| panic!("{:?} {head_dim}: {error}", problem.config));
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let [first, second] = [(), ()].map(|()| problem.run(dtype, ON_CARD).bits());
            assert!(first == second, "{:?} {head_dim} {dtype:?}", problem.config);
        }
    }
}

/// Key masks and biases of every broadcast shape, that hide complete tiles, and with all other options; the same bits
/// each time.
#[rstest]
#[ignore = "needs a CUDA device"]
fn masked(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values(24, 64, 128, 256)] head_dim: usize,
) {
    let of_shapes = (0..16).flat_map(|which| of_shape(head_dim, which));
    for problem in of_shapes.chain(combined(head_dim)) {
        let [first, second] = [(), ()].map(|()| problem.run(dtype, ON_CARD));
        assert!(
            first.bits() == second.bits(),
            "{:?} {dtype:?}",
            problem.config
        );
        if dtype == DType::F32 {
            judge(&problem, &Oracle::of(&problem), dtype, ON_CARD)
                .unwrap_or_else(|error| panic!("{:?} {head_dim}: {error}", problem.config));
        }
    }
}

/// A bias in half precision gives the bits of the same bias in f32, however its terms are read: one by one, or in
/// vectors. Its gradient is that of f32, rounded.
#[rstest]
#[ignore = "needs a CUDA device"]
fn a_bias_of_either_dtype(
    #[values(DType::F16, DType::BF16)] dtype: DType,
    #[values(16, 64, 128, 256)] head_dim: usize,
    #[values((64, 64), (130, 200), (300, 264), (129, 201))] lengths: (usize, usize),
    #[values(None, Some(2.0))] soft_cap: Option<f64>,
) {
    let gpu = crate::gpu();
    let there = |x: &Tensor| Var::from_tensor(&x.to_device(&gpu).unwrap()).unwrap();
    let sizes = Sizes::new((2, 4, 2), lengths, head_dim);
    for which in 0..16 {
        let problem = Problem::random(sizes, Mask::CausalEnd, None, 95);
        let problem = with_bias(problem, which, 0.2, 7);
        let terms = problem.bias.as_ref().unwrap();
        let terms = tensor(&terms.data, &terms.dims, dtype);
        let run = |of_bias: DType| {
            let [q, k, v] = problem.operands(dtype).map(|x| there(&x));
            let bias = there(&terms.to_dtype(of_bias).unwrap());
            let config = AttentionConfig {
                bias: Some(ScoreBias::new(&bias).unwrap()),
                soft_cap,
                ..problem.config.clone()
            };
            let strict = || attention::flash(&q, &k, &v, &config);
            let out = with_kernel_policy(KernelPolicy::Strict, strict).unwrap();
            let loss = (&out * there(&problem.d_out(dtype)).as_tensor()).unwrap();
            let gradients = loss.sum_all().unwrap().backward().unwrap();
            let gradients = [&q, &k, &v, &bias].map(|x| gradients.get(x).unwrap());
            assert_eq!(gradients[3].dtype(), of_bias);
            let all = [&out].into_iter().chain(gradients);
            let on_cpu = |x: &Tensor| x.to_dtype(dtype)?.to_device(&Device::Cpu);
            all.map(|x| elements(&on_cpu(x).unwrap()))
                .collect::<Vec<_>>()
        };
        let (wide, narrow) = (run(DType::F32), run(dtype));
        for (i, name) in ["out", "dq", "dk", "dv", "d_bias"].into_iter().enumerate() {
            assert!(wide[i] == narrow[i], "{name}, dimensions {which:04b}");
        }
    }
}

/// Values of another width than queries and keys, in every width that a kernel is compiled for; the same bits each
/// time. (Half precision is judged with `TALLOW_TEST_DEVICE`.)
#[rstest]
#[ignore = "needs a CUDA device"]
fn value_widths(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[values(
        (8, 16), (32, 8), (24, 64), (64, 40), (96, 72), (64, 128), (128, 64), (192, 128), (128, 192), (256, 64),
    )]
    widths: Widths,
) {
    for problem in value_width::problems(widths) {
        let [first, second] = [(), ()].map(|()| problem.run(dtype, ON_CARD).bits());
        assert!(first == second, "{:?} {widths:?} {dtype:?}", problem.config);
        if dtype == DType::F32 {
            let exact = thirds(problem);
            judge(&exact, &Oracle::of(&exact), dtype, ON_CARD)
                .unwrap_or_else(|error| panic!("{:?} {widths:?}: {error}", exact.config));
        }
    }
}

/// Scores above 100. A matmul made of three TF32 matmuls has 23 bits. Short sums hardly round in f32 itself, so their
/// bound is that of `judge`, twice naive's error.
#[test]
#[ignore = "needs a CUDA device"]
fn wide_scores() {
    no_worse_than_naive(ON_CARD, [1.6, 2.0]);
}

/// No keys, queries, heads or batch: out is zero, lse -inf, and gradients are zeros of the right size.
#[rstest]
#[ignore = "needs a CUDA device"]
#[case::no_keys((1, 2, 3), 0)]
#[case::no_queries((1, 2, 0), 3)]
#[case::no_heads((1, 0, 3), 3)]
#[case::no_batch((0, 2, 3), 3)]
fn nothing_to_attend_to(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
    #[case] (batch, heads, queries): (usize, usize, usize),
    #[case] keys: usize,
) {
    let gpu = crate::gpu();
    // Empty views, because candle cannot create empty tensors on a GPU, nor start a backward from one.
    let cut = |length: usize| {
        let whole = tensor(&vec![1.0; 2 * 3 * 8], &[1, 2, 3, 8], dtype).to_device(&gpu);
        let cut = whole.and_then(|x| {
            x.narrow(0, 0, batch)?
                .narrow(1, 0, heads)?
                .narrow(2, 0, length)
        });
        cut.unwrap()
    };
    let (q, k, v) = (cut(queries), cut(keys), cut(keys));
    let q = match q.elem_count() {
        0 => q,
        _ => Var::from_tensor(&q).unwrap().into_inner(),
    };
    let config = AttentionConfig::default();
    let (out, lse) = attention::flash_with_lse(&q, &k, &v, &config).unwrap();
    let naive = attention::naive(&q, &k, &v, &config).unwrap();
    let all = |x: &Tensor, value: f64| elements(x).iter().all(|found| *found == value);
    assert_eq!((out.dims(), naive.dims()), (q.dims(), q.dims()));
    assert_eq!(lse.dims(), &q.dims()[..3]);
    if q.elem_count() == 0 {
        return;
    }
    assert!(all(&lse, f64::NEG_INFINITY));
    for out in [out, naive] {
        assert!(all(&out, 0.0));
        let gradients = out.backward().unwrap();
        assert!(all(gradients.get(&q).expect("a gradient"), 0.0));
    }
}
