//! Soft-capped scores against the oracle, with every mask, packed documents and dropout.

use super::judge::judge_each;
use super::packed::{naive_on_test_device, of_lengths};
use super::problem::{Attend, DTYPES, FLASH, MASKS, Problem, REFERENCE, Sizes, device};
use candle_core::DType;
use rstest::rstest;
use tallow::attention::{AttentionConfig, Mask};
use tallow::ops::{Dropout, DropoutKey};

fn capped(problem: Problem, cap: f64) -> Problem {
    let config = AttentionConfig {
        soft_cap: Some(cap),
        ..problem.config
    };
    Problem { config, ..problem }
}

/// Caps that scores reach often, almost never, or exceed by far.
pub fn problems(head_dim: usize) -> Vec<Problem> {
    let odd = Sizes::new((2, 4, 2), (300, 331), head_dim);
    let each = MASKS.map(|mask| capped(Problem::random(odd, mask, None, 71), 2.0));
    let small = Sizes::new((1, 2, 1), (70, 70), head_dim);
    let few = [(0.5, 50.0), (0.5, 1e5), (3.0, 0.1)].map(|(scale, cap)| {
        let problem = Problem::random(small, Mask::Causal, Some(scale), 72);
        capped(problem, cap)
    });
    let packed = Problem::random(
        Sizes::new((2, 2, 2), (424, 424), head_dim),
        Mask::Causal,
        None,
        73,
    );
    let packed = packed.with_first_keys(of_lengths(&[&[64, 3, 192, 165], &[1, 423]]));
    let dropout = Dropout {
        probability: 0.3,
        key: DropoutKey::new(5, 9).unwrap(),
    };
    let packed = [
        capped(packed.clone(), 1.0),
        capped(packed.with_dropout(dropout), 1.0),
    ];
    each.into_iter().chain(few).chain(packed).collect()
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
