//! Planned attention against exact results, with the error of eager naive attention in the same dtype as the bound; and
//! tests for half precision only.

use super::attention::{self, naive_plan, run};
use crate::flash::judge::{check_against, naive};
use crate::flash::oracle::Oracle;
use crate::flash::problem::{Problem, Results, Sizes, elements};
use candle_core::{DType, Var};
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;
use rstest::rstest;
use tallow::attention::{Algorithm, AttentionConfig, Mask};
use tallow::internals::Category;

fn planned(problem: &Problem, dtype: DType) -> Results {
    let [q, k, v] = problem
        .operands(dtype)
        .map(|x| Var::from_tensor(&x).unwrap());
    let mut planned = attention::planned(Algorithm::Naive, [&q, &k, &v], &problem.config);
    let [out, dq, dk, dv] = run(&mut planned, &problem.d_out(dtype));
    for tensor in [&out, &dq, &dk, &dv] {
        assert_eq!((tensor.dtype(), tensor.dims()), (dtype, q.dims()));
    }
    let [out, dq, dk, dv] = [out, dq, dk, dv].map(|x| elements(&x));
    Results {
        out,
        lse: Vec::new(), // a planned run returns none
        dq,
        dk,
        dv,
        d_bias: Vec::new(),
    }
}

/// Checks that errors are at most twice those of eager naive for the output, three times for gradients: in norm, and at
/// the worst element.
fn judge(problem: &Problem, dtype: DType) {
    let mut oracle = Oracle::of(problem);
    oracle.results.lse.clear();
    oracle.terms.lse.clear();
    let mut judge = naive(problem, dtype);
    judge.lse.clear();
    let found = planned(problem, dtype);
    let held = check_against(problem, &oracle, &oracle.results, &found, &judge, dtype);
    let shares = held.unwrap_or_else(|error| panic!("{dtype:?} {:?}: {error}", problem.sizes));
    println!("{dtype:?} {:?}: {shares:?}", problem.sizes);
}

#[rstest]
fn as_near_as_eager(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(Mask::Full, Mask::Causal)] mask: Mask,
    #[values(
        (1, 1, 1, 8), (1, 1, 2, 9), (2, 3, 64, 16), (1, 2, 123, 24), (1, 5, 257, 40), (8, 1, 300, 64), (1, 1, 1100, 16),
    )]
    (batch, heads, length, head_dim): (usize, usize, usize, usize),
) {
    let sizes = Sizes::new((batch, heads, heads), (length, length), head_dim);
    judge(&Problem::random(sizes, mask, None, 3), dtype);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 50, ..Default::default() })]

    #[test]
    fn drawn(
        (batch, heads, length, head_dim) in (1usize..4, 1usize..4, 1usize..200, 1usize..70),
        dtype in prop::sample::select(&[DType::F32, DType::BF16, DType::F16][..]),
        mask in prop::sample::select(&[Mask::Full, Mask::Causal][..]),
        seed in any::<u64>(),
    ) {
        let sizes = Sizes::new((batch, heads, heads), (length, length), head_dim);
        judge(&Problem::random(sizes, mask, None, seed), dtype);
    }
}

/// Rows whose largest score comes late and is far above the earlier ones.
#[rstest]
fn growing_scores(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(0.25, -1.0)] scale: f64,
) {
    let sizes = Sizes::new((1, 2, 2), (1200, 1200), 8);
    let mut problem = Problem::random(sizes, Mask::Full, Some(scale), 4);
    for (i, k) in problem.k.iter_mut().enumerate() {
        *k *= 1.0 + (i / 8 % 1200) as f64 / 300.0;
    }
    judge(&problem.rounded_to(dtype), dtype);
}

#[rstest]
fn same_bits_on_any_number_of_threads(
    #[values((1, 1, 1100, 24), (5, 1, 130, 32))] (batch, heads, length, head_dim): (
        usize,
        usize,
        usize,
        usize,
    ),
) {
    let sizes = Sizes::new((batch, heads, heads), (length, length), head_dim);
    let problem = Problem::random(sizes, Mask::Causal, None, 5);
    let run = |threads: usize| {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build();
        pool.unwrap()
            .install(|| planned(&problem, DType::BF16).bits())
    };
    let alone = run(1);
    for threads in [2, 3, 8] {
        assert!(run(threads) == alone, "{threads}");
    }
}

/// In half precision tensors have half the size, and probabilities stay f32.
#[test]
fn the_plan_in_half() {
    let config = AttentionConfig::default();
    let plan = |dtype| naive_plan((4, 2, 500, 64), dtype, &config);
    let single = plan(DType::F32);
    let n = 8 * 500 * 64;
    for dtype in [DType::BF16, DType::F16] {
        let half = plan(dtype);
        assert_eq!(half.category_bytes(Category::Input), 2 * n);
        assert_eq!(half.category_bytes(Category::Parameter), 2 * 3 * n);
        assert_eq!(half.category_bytes(Category::Gradient), 2 * 3 * n);
        assert_eq!(half.category_bytes(Category::Activation), 4 * 8 * 500 * 500);
        assert_eq!(half.flops(), single.flops());
    }
}
