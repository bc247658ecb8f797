//! Scores above 100, where the log-sum-exp has lost digits that probabilities need. f32 is compared with the exact
//! results and with naive f32's own error, without a floor. Errors are summed over many problems, so that no single one
//! decides.

use super::judge;
use super::oracle::Oracle;
use super::problem::{Attend, FLASH, Problem, REFERENCE, Results, Sizes, skips_on_gpu};
use candle_core::DType;
use rstest::rstest;
use tallow::attention::Mask;

/// Sums of the squared errors of out, dq, dk and dv, relative to the sizes of their terms. Relative to its own size, a
/// result that nearly cancels would dominate all others.
type Errors = [f64; 4];

fn add(errors: &mut Errors, found: &Results, oracle: &Oracle) {
    let named = |results: &Results| {
        let Results {
            out, dq, dk, dv, ..
        } = results.clone();
        [out, dq, dk, dv]
    };
    let exact = named(&oracle.results).into_iter().zip(named(&oracle.terms));
    for ((sum, found), (exact, terms)) in errors.iter_mut().zip(named(found)).zip(exact) {
        let off = found.iter().zip(&exact).map(|(a, b)| (a - b).powi(2));
        *sum += off.sum::<f64>() / terms.iter().map(|x| x * x).sum::<f64>();
    }
}

/// Checks that errors by norm are at most `allowed` times naive's: with 64 keys, and with at most 6 keys and a head
/// dimension of 8.
pub fn no_worse_than_naive(attend: Attend, allowed: [f64; 2]) {
    let many = Sizes::new((1, 2, 2), (64, 64), 32);
    let few = Sizes::new((4, 1, 1), (3, 6), 8);
    // With a constant d_out, backward subtracts large numbers and the differences are small.
    let cases = [
        (many, 40.0, 16, false, allowed[0]),
        (few, 25.0, 64, false, allowed[1]),
        (few, 25.0, 64, true, allowed[1]),
    ];
    for (sizes, spread, problems, ones, allowed) in cases {
        for mask in [Mask::Causal, Mask::Full] {
            let (mut of_attend, mut of_naive) = (Errors::default(), Errors::default());
            for seed in 0..problems {
                let mut problem = Problem::random(sizes, mask, None, 300 + seed);
                problem.q.iter_mut().for_each(|x| *x *= spread / 3.0); // uses all digits of f32
                if ones {
                    problem.d_out.fill(1.0);
                    problem.v.iter_mut().for_each(|x| *x *= 5.0);
                }
                let problem = problem.rounded_to(DType::F32);
                let oracle = Oracle::of(&problem);
                add(&mut of_attend, &problem.run(DType::F32, attend), &oracle);
                let naive = judge::naive(&problem, DType::F32);
                add(&mut of_naive, &naive, &oracle);
            }
            let sums = of_attend.into_iter().zip(of_naive);
            for (name, (found, naive)) in ["out", "dq", "dk", "dv"].into_iter().zip(sums) {
                let ratio = (found / naive).sqrt();
                println!("{sizes:?} {mask:?}: {name} {ratio:.2}");
                assert!(
                    ratio <= allowed,
                    "{name} has {ratio:.2} times naive's error, {sizes:?} {mask:?}"
                );
            }
        }
    }
}

#[rstest]
fn as_exact_as_naive(#[values(FLASH, REFERENCE)] attend: Attend) {
    no_worse_than_naive(attend, [1.6; 2]);
}

/// If one key has the whole probability of a query, backward subtracts from its dP exactly that dP. Only the other
/// keys' share of dq remains.
#[test]
fn one_key_takes_all() {
    if skips_on_gpu("a GPU adds the two up in different orders") {
        return;
    }
    let (queries, head_dim) = (37, 24);
    let mut problem = Problem::random(
        Sizes::new((2, 2, 1), (queries, 41), head_dim),
        Mask::Causal,
        None,
        310,
    );
    problem.q.iter_mut().for_each(|x| *x *= 1000.0 / 3.0);
    problem.v.iter_mut().for_each(|x| *x /= 3.0);
    let problem = problem.rounded_to(DType::F32);
    let exact = Oracle::of(&problem).results.dq;
    let found = problem.run(DType::F32, FLASH).dq;
    let mut rows = 0;
    for (exact, found) in exact.chunks(head_dim).zip(found.chunks(head_dim)) {
        if exact.iter().all(|x| x.abs() < 1e-30) {
            assert!(found.iter().all(|x| x.abs() < 1e-28), "{found:?}");
            rows += 1;
        }
    }
    assert!(rows > 100, "{rows} of {}", 4 * queries);
}
