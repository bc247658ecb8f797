//! Kernel policies of flash attention: the CPU has a kernel for every dtype, a GPU for all except f64, and the
//! reference runs on request.

use super::judge::judge;
use super::oracle::Oracle;
use super::problem::{
    Attend, DTYPES, FLASH, MASKS, Problem, REFERENCE, Sizes, dtypes_with_kernels, skips_on_gpu,
};
use tallow::ops::{KernelPolicy, fallbacks, with_kernel_policy};

fn problems() -> impl Iterator<Item = Problem> {
    let sizes = Sizes::new((2, 4, 2), (123, 131), 40);
    MASKS
        .into_iter()
        .map(move |mask| Problem::random(sizes, mask, None, 81))
}

#[test]
fn strict_finds_a_kernel_for_every_dtype() {
    let strict: Attend =
        |q, k, v, config| with_kernel_policy(KernelPolicy::Strict, || FLASH(q, k, v, config));
    for problem in problems() {
        for dtype in dtypes_with_kernels() {
            let preferred = problem.run(dtype, FLASH).bits();
            assert!(problem.run(dtype, strict).bits() == preferred, "{dtype:?}");
        }
    }
    if skips_on_gpu("other tests run in f64, which has no kernel there") {
        return;
    }
    let flash = fallbacks().into_iter().find(|f| f.op == "attention::flash");
    assert_eq!(flash, None);
}

#[test]
fn the_reference_is_taken_where_asked_for() {
    let asked: Attend =
        |q, k, v, config| with_kernel_policy(KernelPolicy::Reference, || FLASH(q, k, v, config));
    for problem in problems() {
        for dtype in DTYPES {
            let reference = problem.run(dtype, REFERENCE).bits();
            assert!(problem.run(dtype, asked).bits() == reference, "{dtype:?}");
        }
    }
}

/// Kernel and reference are both within the bounds of the oracle, in every dtype.
#[test]
fn kernel_and_reference_agree() {
    for problem in problems() {
        let oracle = Oracle::of(&problem);
        for dtype in DTYPES {
            for attend in [FLASH, REFERENCE] {
                judge(&problem, &oracle, dtype, attend)
                    .unwrap_or_else(|error| panic!("{:?} {dtype:?}: {error}", problem.config));
            }
        }
    }
}
