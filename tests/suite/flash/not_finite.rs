//! A NaN or an infinity reaches only what depends on it: not its neighbours in a tile, nor what the mask hides from it.
//!
//! The oracle visits visible pairs only, so it has NaN exactly where the mathematics does.

use super::oracle::Oracle;
use super::problem::{
    Attend, DTYPES, FLASH, MASKS, Problem, REFERENCE, Results, Sizes, device, skips_on_gpu,
};
use candle_core::DType;
use rstest::rstest;
use tallow::attention::Mask;

/// Lengths (Tq, Tk) of up to several tiles, the last ones partial.
const LENGTHS: [(usize, usize); 4] = [(7, 7), (5, 70), (70, 5), (140, 135)];
const DIM: usize = 5;

/// The reason that a GPU guarantees less: see `gpu::what_is_not_finite_stays_near`.
const WHOLE_TILES: &str = "its products are of whole tiles, with zeros where the mask hides";

#[derive(Clone, Copy, Debug)]
enum Input {
    Q,
    K,
    V,
    DOut,
}

/// Replaces one element of the first head, in its row at the fraction `row` of the length.
fn poisoned(problem: &Problem, input: Input, row: f64, value: f64) -> Problem {
    let mut sick = problem.clone();
    let sizes = problem.sizes;
    let (x, rows) = match input {
        Input::Q => (&mut sick.q, sizes.queries),
        Input::K => (&mut sick.k, sizes.keys),
        Input::V => (&mut sick.v, sizes.keys),
        Input::DOut => (&mut sick.d_out, sizes.queries),
    };
    let row = (row * (rows - 1) as f64).round() as usize;
    x[row * DIM + 2] = value;
    sick
}

/// Checks for NaN where `wanted` has it, and elsewhere for the values of `clean`, up to the order of sums.
fn check(found: &Results, clean: &Results, wanted: &Results, what: &str) {
    let (found, clean) = (found.named(), clean.named());
    for (i, (name, wanted)) in wanted.named().into_iter().enumerate() {
        let (found, clean) = (found[i].1, clean[i].1);
        let finite = clean.iter().filter(|x| x.is_finite());
        let largest = finite.fold(0.0f64, |a, x| a.max(x.abs()));
        for (at, wanted) in wanted.iter().enumerate() {
            let (found, clean) = (found[at], clean[at]);
            if wanted.is_nan() {
                assert!(found.is_nan(), "{what}: {name}[{at}] hides the NaN");
            } else {
                let near = found == clean || (found - clean).abs() <= 1e-5 * largest;
                assert!(near, "{what}: {name}[{at}] is {found}, not {clean}");
            }
        }
    }
}

#[rstest]
fn nan_reaches_what_depends_on_it(
    #[values(FLASH, REFERENCE)] attend: Attend,
    #[values(Input::Q, Input::K, Input::V, Input::DOut)] input: Input,
    #[values(Mask::Full, Mask::Causal, Mask::CausalEnd)] mask: Mask,
) {
    if skips_on_gpu(WHOLE_TILES) {
        return;
    }
    for lengths in LENGTHS {
        let problem = Problem::random(Sizes::new((1, 2, 1), lengths, DIM), mask, None, 5);
        let clean = problem.run(DType::F32, attend);
        for row in [0.0, 0.3, 0.6, 1.0] {
            let sick = poisoned(&problem, input, row, f64::NAN);
            let wanted = Oracle::of(&sick).results;
            let found = sick.run(DType::F32, attend);
            let what = format!("{lengths:?}, {input:?} row {row}");
            check(&found, &clean, &wanted, &what);
        }
    }
}

/// Every dtype, on the most critical shape.
#[rstest]
fn nan_in_every_dtype(#[values(FLASH, REFERENCE)] attend: Attend) {
    if skips_on_gpu(WHOLE_TILES) {
        return;
    }
    let problem = Problem::random(Sizes::new((1, 2, 1), (70, 67), DIM), Mask::Causal, None, 6);
    for dtype in DTYPES {
        let clean = problem.run(dtype, attend);
        for input in [Input::Q, Input::K, Input::V, Input::DOut] {
            let sick = poisoned(&problem, input, 0.5, f64::NAN);
            let wanted = Oracle::of(&sick).results;
            let found = sick.run(dtype, attend);
            check(&found, &clean, &wanted, &format!("{dtype:?}, {input:?}"));
        }
    }
}

/// A NaN in a row of q reaches that row of out, lse and dq, and the keys that it sees. This test does not use the
/// oracle.
#[rstest]
fn nan_in_a_query_stays_in_its_row(#[values(FLASH, REFERENCE)] attend: Attend) {
    if skips_on_gpu(WHOLE_TILES) {
        return;
    }
    let (queries, row) = (75, 20);
    let sizes = Sizes::new((1, 1, 1), (queries, queries), DIM);
    let problem = Problem::random(sizes, Mask::Causal, None, 7);
    let mut sick = problem.clone();
    sick.q[row * DIM] = f64::NAN;
    let found = sick.run(DType::F32, attend);
    let is_nan = |x: &[f64]| x.iter().all(|x| x.is_nan());
    let is_finite = |x: &[f64]| x.iter().all(|x| x.is_finite());
    for (i, lse) in found.lse.iter().enumerate() {
        assert_eq!(lse.is_nan(), i == row, "lse of query {i}");
    }
    for (name, x) in [("out", &found.out), ("dq", &found.dq)] {
        for (i, x) in x.chunks(DIM).enumerate() {
            let as_wanted = if i == row { is_nan(x) } else { is_finite(x) };
            assert!(as_wanted, "{name} of query {i}: {x:?}");
        }
    }
    for (name, x) in [("dk", &found.dk), ("dv", &found.dv)] {
        for (j, x) in x.chunks(DIM).enumerate() {
            let as_wanted = if j <= row { is_nan(x) } else { is_finite(x) };
            assert!(as_wanted, "{name} of key {j}: {x:?}");
        }
    }
}

/// An infinity in k or v has no effect on queries that do not see it. (Those that do see it become NaN or infinite,
/// depending on the order of sums.)
#[rstest]
fn infinities_stay_hidden(#[values(FLASH, REFERENCE)] attend: Attend) {
    if skips_on_gpu(WHOLE_TILES) {
        return;
    }
    for (mask, input, value) in [Mask::Causal, Mask::CausalEnd]
        .into_iter()
        .flat_map(|mask| [Input::K, Input::V].map(|input| (mask, input)))
        .flat_map(|(mask, input)| {
            [f64::INFINITY, f64::NEG_INFINITY].map(|value| (mask, input, value))
        })
    {
        for (queries, keys) in LENGTHS {
            let sizes = Sizes::new((1, 2, 1), (queries, keys), DIM);
            let problem = Problem::random(sizes, mask, None, 8);
            let place = 0.6;
            let key = (place * (keys - 1) as f64).round() as usize;
            let sick = poisoned(&problem, input, place, value);
            let (clean, found) = (
                problem.run(DType::F32, attend),
                sick.run(DType::F32, attend),
            );
            for row in 0..2 * queries {
                let visible = mask.visible(row % queries, queries, keys);
                if visible.contains(&key) {
                    continue;
                }
                let what = format!("{mask:?} {queries}x{keys}, {input:?} {value}: row {row}");
                let row = row * DIM..(row + 1) * DIM;
                for (found, clean) in [(&found.out, &clean.out), (&found.dq, &clean.dq)] {
                    for (found, clean) in found[row.clone()].iter().zip(&clean[row.clone()]) {
                        assert!(
                            (found - clean).abs() <= 1e-5,
                            "{what}: {found}, not {clean}"
                        );
                    }
                }
            }
        }
    }
}

/// A visible infinite value appears in its own column of out, and in no other.
#[rstest]
fn infinite_values_show(#[values(FLASH, REFERENCE)] attend: Attend) {
    if skips_on_gpu(WHOLE_TILES) {
        return;
    }
    for mask in MASKS {
        let problem = Problem::random(Sizes::new((1, 1, 1), (70, 70), DIM), mask, None, 9);
        let sick = poisoned(&problem, Input::V, 0.5, f64::INFINITY);
        let key = (0.5 * 69.0f64).round() as usize;
        let found = sick.run(DType::F32, attend);
        for (place, out) in found.out.iter().enumerate() {
            let (row, column) = (place / DIM, place % DIM);
            let hit = column == 2 && mask.visible(row, 70, 70).contains(&key);
            assert_eq!(!out.is_finite(), hit, "{mask:?}: {out} at {row}, {column}");
        }
    }
}

/// Finite inputs give finite results, also with scores of 1e30 and more (f16 cannot represent such inputs).
#[rstest]
fn huge_scores_are_finite(
    #[values(FLASH, REFERENCE)] attend: Attend,
    #[values(DType::F32, DType::F64, DType::BF16)] dtype: DType,
) {
    for mask in MASKS {
        let mut problem = Problem::random(Sizes::new((1, 2, 1), (70, 67), 24), mask, None, 10);
        // A GPU scales and subtracts in one multiply-add, whose rounding error becomes an exponent; hence scores of 1e8
        // there.
        let factor = if device().is_cuda() { 3e3 } else { 1e16 };
        problem.q.iter_mut().for_each(|x| *x *= factor);
        problem.k.iter_mut().for_each(|x| *x *= factor);
        let found = problem.rounded_to(dtype).run(dtype, attend);
        for (name, x) in found.named() {
            let fine = |x: &f64| x.is_finite() || (name == "lse" && *x == f64::NEG_INFINITY);
            assert!(x.iter().all(fine), "{mask:?}: {name}");
        }
    }
}
