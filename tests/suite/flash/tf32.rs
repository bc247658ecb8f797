//! Flash attention on a GPU in TF32: against f64 and naive attention in TF32, with reproducible bits, which differ from
//! f32's.

use super::gpu::{ON_CARD, thirds};
use super::judge::{FACTORS_OTHER, Shares, check_errors, floors, naive_with_lse, with_own_heads};
use super::oracle::Oracle;
use super::problem::{Attend, MASKS, Problem, Results, Sizes, elements, on, tensor};
use super::{capped, dropped, packed};
use crate::child;
use crate::compile::distance;
use candle_core::{DType, Device, Tensor};
use tallow::attention::Mask;
use tallow::hardware::{set_tf32, tf32};
use tallow::ops::{matmul, matmul_transposed};

/// Rounds each element to TF32 (11 significant bits); ties are rounded away from zero.
fn to_tf32(x: &Tensor) -> Tensor {
    let rounded = |x: f32| f32::from_bits((x.to_bits() + 0x1000) & 0xffff_e000);
    let values: Vec<f32> = x.flatten_all().and_then(|x| x.to_vec1()).unwrap();
    let values = values.into_iter().map(rounded).collect();
    Tensor::from_vec(values, x.dims(), &Device::Cpu).unwrap()
}

/// Naive attention in f32, with the factors of each matmul rounded to TF32. (A library's TF32 matmuls are computed
/// exactly for some sizes.)
fn naive_in_tf32(problem: &Problem) -> Results {
    let sizes = problem.sizes;
    let scale = problem.config.scale_for(sizes.head_dim);
    let [q, k, v] = problem.operands(DType::F32).map(|x| to_tf32(&x));
    let d_out = to_tf32(&problem.d_out(DType::F32));
    let scores = (matmul_transposed(&q, &k).unwrap() * scale).unwrap(); // (B, H, Tq, Tk)
    let (scores, slopes) = match problem.config.soft_cap {
        None => (scores.clone(), scores.ones_like().unwrap()),
        Some(cap) => {
            let share = (scores / cap).and_then(|x| x.tanh()).unwrap();
            let slopes = share.sqr().and_then(|x| 1.0 - x).unwrap();
            ((share * cap).unwrap(), slopes)
        }
    };
    let mut p = elements(&scores);
    let lse_of_row = |(row, scores): (usize, &mut [f64])| {
        let (matrix, query) = (row / sizes.queries, row % sizes.queries);
        let visible = problem.visible(matrix / sizes.heads, query);
        let sum: f64 = scores[visible.clone()].iter().map(|s| s.exp()).sum();
        for (j, s) in scores.iter_mut().enumerate() {
            *s = if visible.contains(&j) {
                s.exp() / sum
            } else {
                0.0
            };
        }
        sum.ln()
    };
    let lse = p
        .chunks_mut(sizes.keys)
        .enumerate()
        .map(lse_of_row)
        .collect();
    let p = tensor(&p, scores.dims(), DType::F32);
    let factors = match problem.factors.is_empty() {
        true => p.ones_like().unwrap(),
        false => tensor(&problem.factors, scores.dims(), DType::F32),
    };
    let stayed = (&p * &factors).unwrap();
    let turned = |x: &Tensor| x.t().and_then(|x| x.contiguous()).unwrap();
    let out = matmul(&to_tf32(&stayed), &v).unwrap();
    let dv = matmul(&turned(&to_tf32(&stayed)), &d_out).unwrap();
    let dp = (matmul_transposed(&d_out, &v).unwrap() * factors).unwrap();
    let delta = (&p * &dp).and_then(|x| x.sum_keepdim(3)).unwrap();
    let ds = dp.broadcast_sub(&delta).and_then(|x| x * &p).unwrap();
    let ds = (ds * slopes).unwrap();
    let ds = to_tf32(&(ds * scale).unwrap());
    Results {
        out: elements(&out),
        lse,
        dq: elements(&matmul(&ds, &k).unwrap()),
        dk: elements(&matmul(&turned(&ds), &q).unwrap()),
        dv: elements(&dv),
        d_bias: Vec::new(),
    }
}

/// The judge's error has the size of TF32's eps; a larger one would allow too much.
#[test]
fn the_judge_is_off_by_tf32s_eps() {
    let sizes = Sizes::new((2, 4, 2), (70, 33), 64);
    let problem = thirds(Problem::random(sizes, Mask::Causal, None, 90));
    let exact = Oracle::of(&problem).results;
    let judge = with_own_heads(&problem, naive_in_tf32);
    for ((name, exact), (_, judge)) in exact.named().into_iter().zip(judge.named()) {
        let [exact, judge] = [exact, judge].map(|x| tensor(x, &[x.len()], DType::F64));
        let error = distance(&judge, &exact);
        assert!((1e-5..1e-3).contains(&error), "{name}: {error}");
    }
}

/// Runs `problem` and checks it. With a single key P = 1 and dS = 0, which naive attention computes exactly, while
/// delta and dP differ by rounding. So the floor uses TF32's own eps there.
fn judge(problem: &Problem, narrow: &Results) -> Result<Shares, String> {
    let oracle = Oracle::of(problem);
    let queries =
        (0..problem.sizes.batch).flat_map(|i| (0..problem.sizes.queries).map(move |j| (i, j)));
    let mut seen = queries.map(|(batch, query)| problem.visible(batch, query).len());
    let eps = match seen.all(|keys| keys <= 1) {
        true => 2f64.powi(-10),
        false => f64::from(f32::EPSILON),
    };
    let floors = floors(&oracle, problem.sizes.head_dim, (eps, 8.0 * eps));
    let found = problem.run(DType::F32, ON_CARD);
    check_errors(&oracle.results, &found, narrow, FACTORS_OTHER, &floors)
}

/// Grouped heads, queries that see no key, tails of tiles, and several tiles in both directions.
#[test]
#[ignore = "needs a CUDA device"]
fn judged() {
    if child::ran("flash::tf32::judged") {
        return;
    }
    set_tf32(&crate::gpu(), true).unwrap();
    let mut shares = Shares::default();
    for head_dim in [12, 16, 28, 32, 64, 96, 128, 256] {
        for lengths in [(1, 1), (37, 1), (33, 70), (70, 33), (130, 197)] {
            for mask in MASKS {
                let sizes = Sizes::new((2, 4, 2), lengths, head_dim);
                let problem = thirds(Problem::random(sizes, mask, None, 91));
                let narrow = with_own_heads(&problem, naive_in_tf32);
                let judged = judge(&problem, &narrow);
                shares.keep_largest(
                    judged.unwrap_or_else(|error| panic!("{mask:?} {sizes:?}: {error}")),
                );
            }
        }
    }
    println!("shares of the bounds: {shares:?}");
}

/// Documents and windows, dropout, soft caps, and values of another width, over several tiles.
#[test]
#[ignore = "needs a CUDA device"]
fn over_tiles() {
    if child::ran("flash::tf32::over_tiles") {
        return;
    }
    set_tf32(&crate::gpu(), true).unwrap();
    let of_one_width = [16, 64, 80, 128, 256].into_iter().flat_map(|head_dim| {
        let all = [packed::problems, dropped::problems, capped::problems];
        all.into_iter().flat_map(move |problems| problems(head_dim))
    });
    let of_two = [(24, 64), (128, 64), (192, 128)].into_iter();
    let of_two = of_two.flat_map(|(head_dim, value_dim)| {
        let sizes = Sizes::new((2, 4, 2), (230, 201), head_dim).with_value_dim(value_dim);
        MASKS.map(|mask| Problem::random(sizes, mask, None, 81))
    });
    for problem in of_one_width.chain(of_two) {
        let problem = thirds(problem);
        let narrow = with_own_heads(&problem, naive_in_tf32);
        judge(&problem, &narrow).unwrap_or_else(|error| panic!("{:?}: {error}", problem.config));
    }
}

/// Against naive attention by candle's matmuls on the GPU, with sizes that all suit tensor cores.
#[test]
#[ignore = "needs a CUDA device"]
fn judged_by_the_gpus_own() {
    if child::ran("flash::tf32::judged_by_the_gpus_own") {
        return;
    }
    const NAIVE: Attend = |q, k, v, config| {
        let gpu = tallow::device("cuda:0")?;
        on(&gpu, naive_with_lse, [q, k, v], config)
    };
    set_tf32(&crate::gpu(), true).unwrap();
    for head_dim in [64, 128] {
        for mask in MASKS {
            let sizes = Sizes::new((2, 4, 4), (128, 256), head_dim);
            let problem = thirds(Problem::random(sizes, mask, None, 92));
            let narrow = problem.run(DType::F32, NAIVE);
            let shares = judge(&problem, &narrow);
            println!("{mask:?} {sizes:?}: {:?}", shares.unwrap());
        }
    }
}

/// Each arithmetic gives the same bits each time. Backward uses its forward's arithmetic, even if the switch has
/// changed.
#[test]
#[ignore = "needs a CUDA device"]
fn switched() {
    if child::ran("flash::tf32::switched") {
        return;
    }
    const SWITCHED_AFTER: Attend = |q, k, v, config| {
        let gpu = tallow::device("cuda:0")?;
        let results = ON_CARD(q, k, v, config)?;
        set_tf32(&gpu, !tf32(&gpu))?;
        Ok(results)
    };
    let gpu = crate::gpu();
    for head_dim in [16, 28, 64, 96, 128, 256] {
        for mask in MASKS {
            let sizes = Sizes::new((2, 4, 2), (300, 517), head_dim);
            let problem = thirds(Problem::random(sizes, mask, None, 93));
            let run = |on, attend| {
                set_tf32(&gpu, on).unwrap();
                problem.run(DType::F32, attend).bits()
            };
            let (exact, rounded) = (run(false, ON_CARD), run(true, ON_CARD));
            let what = format!("{mask:?} {sizes:?}");
            assert!(rounded == run(true, ON_CARD), "{what}: TF32 again");
            assert!(
                rounded == run(true, SWITCHED_AFTER),
                "{what}: switched off after forward"
            );
            assert!(
                exact == run(false, SWITCHED_AFTER),
                "{what}: switched on after forward"
            );
            assert!(exact == run(false, ON_CARD), "{what}: exact again");
            for (i, result) in ["out", "lse", "dq", "dk", "dv"].into_iter().enumerate() {
                assert!(
                    exact[i] != rounded[i],
                    "{what}: {result} is the same in both"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn half_precision_ignores_the_switch() {
    if child::ran("flash::tf32::half_precision_ignores_the_switch") {
        return;
    }
    let gpu = crate::gpu();
    let sizes = Sizes::new((2, 4, 2), (70, 133), 64);
    let problem = Problem::random(sizes, Mask::Causal, None, 94);
    let run = |on| {
        set_tf32(&gpu, on).unwrap();
        problem.run(DType::BF16, ON_CARD).bits()
    };
    assert!(run(false) == run(true));
}
