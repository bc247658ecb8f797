//! Bounds for errors against the exact result.
//!
//! A rounding of a score is an error of |score| eps in an exponent, hence a relative error of the probability. Every
//! other rounding is a relative error of a few eps. Together, each summand has a relative error of at most r = 4 eps
//! max|score| + 8 eps. A sum whose terms each have an error of r of their size has an error of at most r times the sum
//! of their sizes, element by element. So r times [`Oracle::terms`] is the floor that arithmetic with that eps can
//! guarantee: |v| weighted by the probabilities for out (never more than max|v|), and similarly for the gradients. The
//! floor is small where the terms are small. Where they cancel, it is the error of any algorithm that rounds them
//! first.
//!
//! A log-sum-exp has the error of its scores, which no average reduces as it does for out. Dh roundings of half an eps
//! add up statistically to sqrt(Dh) / 2 eps of a score's terms (Higham and Mary, "A New Approach to Probabilistic
//! Rounding Error Analysis", 2019). Three more come from scale, sum and result, and the logarithm adds a few eps.
//!
//! Above the floor, the allowed error of f32 is that of naive f32 attention on the same inputs (out and lse: twice,
//! gradients: three times). TF32 is compared with naive attention in TF32 in the same way, and half precision with the
//! error of rounding the exact result to it (1.1 times). f64, in which the oracle itself is no more accurate, has only
//! the floor, with 1e-12 in place of the few eps. All bounds hold by norm and for the largest error.
//!
//! A GPU's matmuls in half precision read probabilities and score gradients rounded to it, which adds half an eps of
//! that precision to each term ([`on_a_gpu`]).

use super::oracle::Oracle;
use super::problem::{
    Attend, Problem, Results, Sizes, device, dtypes_with_kernels, elements, rounded, tensor,
};
use candle_core::{DType, Tensor};
use std::ops::Range;
use tallow::attention::{self, AttentionConfig};
use tallow::ops;

/// Returns eps of the arithmetic that `dtype` is computed in, and a few of them.
fn eps_of(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (2.0 * f64::EPSILON, 1e-12), // the roundings of the oracle and of the tested code
        _ => (f64::from(f32::EPSILON), 8.0 * f64::from(f32::EPSILON)),
    }
}

/// Returns the floor of the error of each element.
pub fn floors(oracle: &Oracle, head_dim: usize, (eps, few_eps): (f64, f64)) -> Results {
    let r = 4.0 * eps * oracle.largest_score + few_eps;
    let of_score = eps * ((head_dim as f64).sqrt() + 3.0) / 2.0;
    let terms = &oracle.terms;
    let off = |terms: &[f64]| terms.iter().map(|term| r * term).collect();
    Results {
        out: off(&terms.out),
        lse: (terms.lse.iter().map(|term| of_score * term + few_eps)).collect(),
        dq: off(&terms.dq),
        dk: off(&terms.dk),
        dv: off(&terms.dv),
        d_bias: off(&terms.d_bias),
    }
}

/// Returns the floors of a GPU's tensor cores: the factors of v, dO, k and q were rounded to half precision first.
fn on_a_gpu(floors: Results, oracle: &Oracle, dtype: DType) -> Results {
    let off = 2.0 * half_eps(dtype); // the rounding of a probability, and of the score gradient computed from it
    let add = |floors: Vec<f64>, terms: &[f64]| -> Vec<f64> {
        let both = floors.into_iter().zip(terms);
        both.map(|(floor, term)| floor + off * term).collect()
    };
    let terms = &oracle.terms;
    Results {
        out: add(floors.out, &terms.out),
        dq: add(floors.dq, &terms.dq),
        dk: add(floors.dk, &terms.dk),
        dv: add(floors.dv, &terms.dv),
        d_bias: add(floors.d_bias, &terms.d_bias),
        lse: floors.lse,
    }
}

/// Returns the largest relative rounding error of a dtype.
fn half_eps(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-9),
        DType::F16 => 2f64.powi(-12),
        _ => 0.0,
    }
}

/// The norm of a tensor, and its largest element.
#[derive(Clone, Copy, Debug)]
struct Size {
    norm: f64,
    largest: f64,
}

fn size(values: impl Iterator<Item = f64>) -> Size {
    let (mut squares, mut largest) = (0.0, 0.0f64);
    for value in values {
        squares += value * value;
        largest = largest.max(value.abs()); // ignores NaN, which the norm keeps
    }
    Size {
        norm: squares.sqrt(),
        largest,
    }
}

fn error(found: &[f64], exact: &[f64]) -> Size {
    assert_eq!(found.len(), exact.len());
    // Where both are -inf (the lse of a query that sees no key) the error is 0.
    let off = |(a, b): (&f64, &f64)| if a == b { 0.0 } else { a - b };
    size(found.iter().zip(exact).map(off))
}

/// The largest error of each result, as a share of its bound.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shares(pub [f64; 6]);

impl Shares {
    pub fn keep_largest(&mut self, other: Self) {
        for (a, b) in self.0.iter_mut().zip(other.0) {
            *a = a.max(b);
        }
    }
}

/// The multiple of the judge's error that is allowed.
pub struct Factors {
    out: f64,
    lse: f64,
    gradients: f64,
    /// An additional error from rounding a result, as a share of the largest element.
    rounding: Option<f64>,
}

/// Factors for a comparison with another computation in the same dtype.
pub const FACTORS_OTHER: Factors = Factors {
    out: 2.0,
    lse: 2.0,
    gradients: 3.0,
    rounding: None,
};
/// Factors for a comparison with exact results rounded to half precision; lse is f32 and is compared with naive's.
const FACTORS_ROUNDING: Factors = Factors {
    out: 1.1,
    lse: 2.0,
    gradients: 1.1,
    rounding: None,
};
/// Factors that allow the floor alone.
const FLOOR_ONLY: Factors = Factors {
    out: 0.0,
    lse: 0.0,
    gradients: 0.0,
    rounding: None,
};

/// Checks that errors of `found` are at most `factors` times those of `judge`, plus the floors.
pub fn check_errors(
    exact: &Results,
    found: &Results,
    judge: &Results,
    factors: Factors,
    floors: &Results,
) -> Result<Shares, String> {
    let (exact, found) = (exact.named(), found.named());
    let (judge, floors) = (judge.named(), floors.named());
    let mut shares = Shares::default();
    for i in 0..exact.len() {
        let (what, exact) = exact[i];
        let factor = match what {
            "out" => factors.out,
            "lse" => factors.lse,
            _ => factors.gradients,
        };
        let (ours, theirs) = (error(found[i].1, exact), error(judge[i].1, exact));
        let floor = size(floors[i].1.iter().copied());
        let of_largest = |share| share * size(exact.iter().copied()).largest;
        let rounding = factors.rounding.map_or(0.0, of_largest);
        let bound = Size {
            norm: factor * theirs.norm + floor.norm,
            largest: factor * theirs.largest + floor.largest + rounding,
        };
        // Negated, so that NaN fails.
        if !(ours.norm <= bound.norm && ours.largest <= bound.largest) {
            return Err(format!(
                "{what} is off by {ours:?}, over {bound:?}; the judge is off by {theirs:?}, the floor is {floor:?}"
            ));
        }
        if bound.norm > 0.0 {
            shares.0[i] = (ours.norm / bound.norm).max(ours.largest / bound.largest);
        }
    }
    Ok(shares)
}

/// Runs `problem`, whose inputs `dtype` represents exactly, and checks the results against the oracle.
pub fn judge(
    problem: &Problem,
    oracle: &Oracle,
    dtype: DType,
    attend: Attend,
) -> Result<Shares, String> {
    let found = problem.run(dtype, attend);
    let mut floors = floors(oracle, problem.sizes.head_dim, eps_of(dtype));
    if device().is_cuda() {
        floors = on_a_gpu(floors, oracle, dtype);
    }
    let exact = &oracle.results;
    match dtype {
        DType::F64 => check_errors(exact, &found, exact, FLOOR_ONLY, &floors),
        DType::F32 => check_errors(
            exact,
            &found,
            &naive(problem, dtype),
            FACTORS_OTHER,
            &floors,
        ),
        _ => {
            let round = |values: &[f64]| rounded(values, dtype);
            let nearest = Results {
                out: round(&exact.out),
                lse: naive(problem, DType::F32).lse,
                dq: round(&exact.dq),
                dk: round(&exact.dk),
                dv: round(&exact.dv),
                d_bias: round(&exact.d_bias),
            };
            check_errors(exact, &found, &nearest, FACTORS_ROUNDING, &floors)
        }
    }
}

/// Checks `found` against the exact results `wanted` of another source; in lower precision the judge is `narrow` from
/// the same source.
pub fn check_against(
    problem: &Problem,
    oracle: &Oracle,
    wanted: &Results,
    found: &Results,
    narrow: &Results,
    dtype: DType,
) -> Result<Shares, String> {
    let floors = floors(oracle, problem.sizes.head_dim, eps_of(dtype));
    match dtype {
        DType::F64 => check_errors(wanted, found, wanted, FLOOR_ONLY, &floors),
        _ => check_errors(wanted, found, narrow, FACTORS_OTHER, &floors),
    }
}

/// Checks `found` against the exact results, with a judge that rounds in the same places. The last rounding of a large
/// element is random: it may have been lucky for the judge only.
#[cfg(feature = "cuda")]
pub fn check_against_same_rounding(
    problem: &Problem,
    oracle: &Oracle,
    found: &Results,
    judge: &Results,
    dtype: DType,
) -> Result<Shares, String> {
    let floors = floors(oracle, problem.sizes.head_dim, eps_of(dtype));
    let rounding = match dtype {
        DType::BF16 => Some(2f64.powi(-8)),
        DType::F16 => Some(2f64.powi(-11)),
        _ => None,
    };
    let factors = Factors {
        rounding,
        ..FACTORS_OTHER
    };
    check_errors(&oracle.results, found, judge, factors, &floors)
}

/// Checks `attend` on each of these problems, in each of these dtypes that the device has kernels for.
pub fn judge_each(problems: impl IntoIterator<Item = Problem>, dtypes: &[DType], attend: Attend) {
    for problem in problems {
        let oracle = Oracle::of(&problem);
        for dtype in dtypes_with_kernels().filter(|dtype| dtypes.contains(dtype)) {
            judge(&problem, &oracle, dtype, attend)
                .unwrap_or_else(|error| panic!("{dtype:?} {:?}: {error}", problem.config));
        }
    }
}

/// Runs naive attention in `dtype`.
pub fn naive(problem: &Problem, dtype: DType) -> Results {
    with_own_heads(problem, |problem| problem.run(dtype, naive_with_lse))
}

/// Runs `attend` with a head of keys for each head of queries, and sums their gradients in f64.
pub fn with_own_heads(problem: &Problem, attend: impl FnOnce(&Problem) -> Results) -> Results {
    let sizes = problem.sizes;
    let group = sizes.heads / sizes.kv_heads;
    let [of_k, of_v] = [sizes.head_dim, sizes.value_dim].map(|dim| sizes.keys * dim);
    let repeat = |x: &[f64], head_size: usize| -> Vec<f64> {
        let heads = x.chunks(head_size);
        heads.flat_map(|head| head.repeat(group)).collect()
    };
    let expanded = Problem {
        sizes: Sizes {
            kv_heads: sizes.heads,
            ..sizes
        },
        k: repeat(&problem.k, of_k),
        v: repeat(&problem.v, of_v),
        ..problem.clone()
    };
    let results = attend(&expanded);
    let add_up = |x: Vec<f64>, head_size: usize| -> Vec<f64> {
        let groups = x.chunks(group * head_size);
        let sum = |heads: &[f64], i: usize| heads.chunks(head_size).map(|head| head[i]).sum();
        groups
            .flat_map(|heads| (0..head_size).map(move |i| sum(heads, i)))
            .collect()
    };
    Results {
        dk: add_up(results.dk, of_k),
        dv: add_up(results.dv, of_v),
        ..results
    }
}

/// Naive attention with the log-sum-exp of its scores. The scores have the inputs' dtype and are summed in f64.
pub fn naive_with_lse(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> tallow::Result<(Tensor, Tensor)> {
    let scores = ops::matmul_transposed(q, k)?; // (B, H, Tq, Tk)
    let (_, heads, queries, keys) = scores.dims4()?;
    let first_keys = config
        .first_keys
        .as_ref()
        .map(|first_keys| first_keys.tensor());
    let first_keys: Vec<u32> = first_keys.map_or(Ok(Vec::new()), |x| x.flatten_all()?.to_vec1())?;
    let scores = (scores * config.scale_for(q.dim(3)?))?;
    let scores = match config.soft_cap {
        None => scores,
        Some(cap) => ops::soft_cap(&scores, cap)?,
    };
    let scores = match &config.bias {
        None => scores,
        Some(bias) => scores.broadcast_add(&bias.tensor().to_dtype(scores.dtype())?)?,
    };
    let shown = match &config.key_mask {
        None => scores.ones_like()?.to_dtype(DType::U8)?,
        Some(mask) => mask.tensor().broadcast_as(scores.shape())?.contiguous()?,
    };
    let shown: Vec<u8> = shown.flatten_all()?.to_vec1()?;
    let lse_of_row = |(row, scores): (usize, &[f64])| {
        let query = row % queries;
        let Range { start, end } = config.mask.visible(query, queries, keys);
        let first = first_keys.get(row / queries / heads * queries + query);
        let start = first.map_or(start, |first| start.max(*first as usize));
        let seen = (start.min(end)..end).filter(|key| shown[row * keys + key] != 0);
        let scores: Vec<f64> = seen.map(|key| scores[key]).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if top == f64::NEG_INFINITY {
            return top;
        }
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        top + sum.ln()
    };
    let scores = elements(&scores);
    let lse: Vec<f64> = scores.chunks(keys).enumerate().map(lse_of_row).collect();
    let dtype = match q.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let lse = tensor(&lse, &q.dims()[..3], dtype);
    Ok((attention::naive(q, k, v, config)?, lse))
}
