//! Results have the same bits with any number of threads and in each repetition.

use super::problem::{DTYPES, FLASH, MASKS, Problem, Sizes};
use candle_core::DType;
use rstest::rstest;
use tallow::attention::Mask;

/// Work split by tiles, heads and groups, with more of each than threads and fewer.
fn problems() -> Vec<Problem> {
    let mut problems = Vec::new();
    for (heads, lengths, head_dim) in [
        ((2, 6, 3), (123, 257), 40),
        ((1, 1, 1), (257, 257), 24),
        ((1, 4, 1), (257, 123), 80),
        ((3, 2, 2), (1, 257), 16),
        ((1, 2, 1), (300, 300), 64),
    ] {
        for (mask, seed) in MASKS.into_iter().zip(20..) {
            let sizes = Sizes::new(heads, lengths, head_dim);
            problems.push(Problem::random(sizes, mask, None, seed));
        }
    }
    problems
}

/// Checks that one thread and several give the same bits.
pub fn check_threads(problems: &[Problem], dtype: DType) {
    let with_threads = |threads: usize| -> Vec<_> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let run = || problems.iter().map(|p| p.run(dtype, FLASH).bits());
        pool.unwrap().install(|| run().collect())
    };
    let one = with_threads(1);
    for threads in [2, 3, 4] {
        for ((problem, one), many) in problems.iter().zip(&one).zip(with_threads(threads)) {
            let (sizes, mask) = (problem.sizes, problem.config.mask);
            assert!(*one == many, "{sizes:?} {mask:?}: {threads} threads");
        }
    }
}

#[rstest]
fn threads_do_not_change_a_bit(
    #[values(DType::F32, DType::F64, DType::F16, DType::BF16)] dtype: DType,
) {
    check_threads(&problems(), dtype);
}

/// A hundred repetitions on two threads whose timing varies.
#[test]
fn repeats_do_not_change_a_bit() {
    let sizes = Sizes::new((1, 4, 2), (133, 130), 24);
    let problem = Problem::random(sizes, Mask::Causal, None, 31);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
    pool.unwrap().install(|| {
        for dtype in DTYPES {
            let first = problem.run(dtype, FLASH).bits();
            let repeats = if dtype == DType::F32 { 100 } else { 10 };
            for repeat in 0..repeats {
                assert!(
                    problem.run(dtype, FLASH).bits() == first,
                    "{dtype:?}, {repeat}"
                );
            }
        }
    });
}
