//! Dropout of probabilities against the oracle, which uses the factors that `ops::dropout` gives a tensor of
//! probabilities.

use super::judge::judge_each;
use super::packed::{naive_on_test_device, of_lengths, window};
use super::problem::{Attend, DTYPES, FLASH, MASKS, Problem, REFERENCE, Sizes, device};
use candle_core::DType;
use rstest::rstest;
use tallow::attention::Mask;
use tallow::ops::{Dropout, DropoutKey};

fn dropout(probability: f64) -> Dropout {
    let key = DropoutKey::of_micro_batch(1 << 40 | 3, 9, 2).unwrap();
    let key = key.at(70_000);
    Dropout { probability, key }
}

/// Several tiles with grouped heads; lengths are not multiples of eight keys.
pub fn problems(head_dim: usize) -> Vec<Problem> {
    let odd = Sizes::new((2, 4, 2), (300, 331), head_dim);
    let each = MASKS.map(|mask| Problem::random(odd, mask, None, 61).with_dropout(dropout(0.2)));
    let square = Sizes::new((2, 2, 2), (424, 424), head_dim);
    let packed = [Mask::Causal, window(90)].map(|mask| {
        let problem = Problem::random(square, mask, None, 62);
        let packed = problem.with_first_keys(of_lengths(&[&[64, 3, 192, 165], &[1, 423]]));
        packed.with_dropout(dropout(0.7))
    });
    // One key, fewer than eight, and a probability that drops nothing.
    let few = [(1, 0.5), (5, 0.5), (40, 1e-9)].map(|(keys, probability)| {
        let sizes = Sizes::new((1, 2, 1), (37, keys), head_dim);
        Problem::random(sizes, Mask::Full, None, 63).with_dropout(dropout(probability))
    });
    each.into_iter().chain(packed).chain(few).collect()
}

#[rstest]
fn over_tiles(#[values(16, 32, 64, 80, 96, 128, 256)] head_dim: usize) {
    if ![16, 80].contains(&head_dim) && !device().is_cuda() {
        return; // the CPU has one kernel for all head dimensions
    }
    judge_each(problems(head_dim), &DTYPES, FLASH);
}

#[rstest]
fn by_others(
    #[values(REFERENCE, naive_on_test_device)] attend: Attend,
    #[values(DType::F32, DType::F64)] dtype: DType,
) {
    judge_each(problems(8), &[dtype], attend);
}

/// Another key drops other elements; the same key gives the same bits in each run.
#[test]
fn the_key_says_which() {
    let sizes = Sizes::new((1, 2, 2), (90, 90), 16);
    let problem = Problem::random(sizes, Mask::Causal, None, 64);
    let of = |site| {
        let dropout = dropout(0.5);
        let key = dropout.key.at(site);
        let problem = problem.clone().with_dropout(Dropout { key, ..dropout });
        problem.run(DType::F32, FLASH).bits()
    };
    assert_eq!(of(0), of(0));
    let [out, lse, ..] = of(0);
    let [other_out, other_lse, ..] = of(1);
    assert_ne!(out, other_out);
    assert_eq!(lse, other_lse);
}
