//! Forward and backward have the same bits with any number of threads and in each repetition, on sizes that are split
//! into many tasks.

use super::case::{Case, KERNEL, bits};
use super::every::large;
use candle_core::DType;
use rstest::rstest;
use tallow::internals::TASK_ELEMENTS;

fn all_bits(case: &Case, dtype: DType) -> Vec<Vec<u64>> {
    let run = case.run(dtype, KERNEL);
    let gradients = run.gradients.iter().map(|(_, gradient)| bits(gradient));
    std::iter::once(bits(&run.out)).chain(gradients).collect()
}

#[rstest]
#[case(DType::F32)]
#[case(DType::F64)]
#[case(DType::F16)]
#[case(DType::BF16)]
fn threads_do_not_change_a_bit(#[case] dtype: DType) {
    let cases = large();
    let with_threads = |threads: usize| -> Vec<Vec<Vec<u64>>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let run = || cases.iter().map(|case| all_bits(case, dtype)).collect();
        pool.unwrap().install(run)
    };
    let one = with_threads(1);
    for (case, bits) in cases.iter().zip(&one) {
        let largest = bits.iter().map(Vec::len).max();
        assert!(
            largest > Some(2 * TASK_ELEMENTS),
            "{}: too small to be cut",
            case.name
        );
    }
    for threads in [2, 3, 3] {
        for ((case, one), many) in cases.iter().zip(&one).zip(with_threads(threads)) {
            assert!(
                *one == many,
                "{}: other bits with {threads} threads",
                case.name
            );
        }
    }
}
