//! Queries that see no key (blind queries): out 0, lse -inf and zero gradients, exactly, whatever their values.

use super::oracle::Oracle;
use super::problem::{Attend, DTYPES, FLASH, Problem, REFERENCE, Results, Sizes, skips_on_gpu};
use rstest::rstest;
use tallow::attention::Mask;

/// Lengths (Tq, Tk). With `CausalEnd` the first Tq - Tk queries are blind: within a tile, over complete tiles, and
/// across their edges.
const LENGTHS: [(usize, usize); 5] = [(2, 1), (9, 5), (67, 3), (200, 70), (257, 1)];

/// Splits rows of `width` elements into those of blind queries and the others.
fn split(x: &[f64], width: usize, queries: usize, keys: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut blind, mut others) = (Vec::new(), Vec::new());
    for (row, x) in x.chunks(width).enumerate() {
        let side = if row % queries < queries - keys {
            &mut blind
        } else {
            &mut others
        };
        side.extend_from_slice(x);
    }
    (blind, others)
}

#[rstest]
fn blind_queries_get_zeros(#[values(FLASH, REFERENCE)] attend: Attend) {
    for (queries, keys) in LENGTHS {
        for dtype in DTYPES {
            let sizes = Sizes::new((2, 2, 1), (queries, keys), 24);
            let problem = Problem::random(sizes, Mask::CausalEnd, None, 1);
            let found = problem.run(dtype, attend);
            let what = format!("{queries}x{keys} in {dtype:?}");
            for (name, x) in [("out", &found.out), ("dq", &found.dq)] {
                let (blind, others) = split(x, 24, queries, keys);
                assert!(blind.iter().all(|x| *x == 0.0), "{what}: {name}");
                // With a single key p is 1, and dq is only rounding error.
                let alive = others.iter().any(|x| *x != 0.0) || (name == "dq" && keys == 1);
                assert!(alive, "{what}: {name}");
            }
            let (blind, others) = split(&found.lse, 1, queries, keys);
            assert!(blind.iter().all(|x| *x == f64::NEG_INFINITY), "{what}");
            assert!(others.iter().all(|x| x.is_finite()), "{what}");
            for gradient in [&found.dk, &found.dv] {
                assert!(gradient.iter().all(|x| x.is_finite()), "{what}");
            }
        }
    }
}

/// Keys that no query sees have zero gradients.
#[rstest]
fn unseen_keys_get_zeros(#[values(FLASH, REFERENCE)] attend: Attend) {
    for (queries, keys) in [(1, 2), (3, 67), (70, 200)] {
        let sizes = Sizes::new((2, 2, 1), (queries, keys), 24);
        let problem = Problem::random(sizes, Mask::Causal, None, 2);
        for dtype in DTYPES {
            let found = problem.run(dtype, attend);
            for (row, dv) in found.dv.chunks(24).enumerate() {
                let seen = row % keys < queries;
                assert_eq!(dv.iter().any(|x| *x != 0.0), seen, "{queries}x{keys}");
            }
            for (row, dk) in found.dk.chunks(24).enumerate() {
                let seen = row % keys < queries;
                assert!(seen || dk.iter().all(|x| *x == 0.0), "{queries}x{keys}");
            }
        }
    }
}

/// The values of a blind query, and the gradient of its out, have no effect.
#[rstest]
fn blind_queries_hide_what_they_hold(#[values(FLASH, REFERENCE)] attend: Attend) {
    if skips_on_gpu("its products are of whole tiles, with zeros where the mask hides") {
        return;
    }
    for (queries, keys) in LENGTHS {
        for poison in [f64::NAN, f64::INFINITY] {
            let sizes = Sizes::new((1, 2, 1), (queries, keys), 24);
            let clean = Problem::random(sizes, Mask::CausalEnd, None, 3);
            let mut sick = clean.clone();
            for x in [&mut sick.q, &mut sick.d_out] {
                for (row, x) in x.chunks_mut(24).enumerate() {
                    if row % queries < queries - keys {
                        x.fill(poison);
                    }
                }
            }
            for dtype in DTYPES {
                let [clean, sick] = [&clean, &sick].map(|problem| problem.run(dtype, attend));
                same_values(&clean, &sick, &format!("{queries}x{keys} in {dtype:?}"));
            }
        }
    }
}

fn same_values(one: &Results, other: &Results, what: &str) {
    for ((name, one), (_, other)) in one.named().into_iter().zip(other.named()) {
        assert_eq!(one, other, "{what}: {name}");
    }
}

/// The oracle gives the same results.
#[test]
fn the_oracle_gives_blind_queries_zeros() {
    let sizes = Sizes::new((1, 1, 1), (9, 5), 3);
    let mut problem = Problem::random(sizes, Mask::CausalEnd, None, 4);
    problem.q[..12].fill(f64::NAN);
    let Oracle { results, .. } = Oracle::of(&problem);
    assert!(results.out[..12].iter().all(|x| *x == 0.0));
    assert!(results.dq[..12].iter().all(|x| *x == 0.0));
    assert!(results.dk.iter().chain(&results.dv).all(|x| x.is_finite()));
    assert_eq!(results.lse[..4], [f64::NEG_INFINITY; 4]);
    assert!(results.lse[4..].iter().all(|x| x.is_finite()));
}
