//! Invalid input: each error names the op, what it expected and what it got, under every policy.

use super::problem::{Attend, FLASH, REFERENCE, tensor};
use candle_core::{DType, Tensor};
use rstest::rstest;
use tallow::Error;
use tallow::attention::AttentionConfig;
use tallow::ops::{KernelPolicy, with_kernel_policy};

const POLICIES: [KernelPolicy; 3] = [
    KernelPolicy::Prefer,
    KernelPolicy::Strict,
    KernelPolicy::Reference,
];

fn x(dims: &[usize], dtype: DType) -> Tensor {
    tensor(&vec![1.0; dims.iter().product()], dims, dtype)
}

/// Checks that the error is of this kind and contains all `parts`.
fn refused(kind: fn(&Error) -> bool, parts: &[&str], [q, k, v]: [&Tensor; 3]) {
    for policy in POLICIES {
        for attend in [FLASH, REFERENCE] {
            let run = || attend(q, k, v, &AttentionConfig::default());
            let error = with_kernel_policy(policy, run).expect_err(parts[0]);
            let text = error.to_string();
            for part in [&["attention::flash: expected ", "got "], parts].concat() {
                assert!(text.contains(part), "{part:?} is not in {text:?}");
            }
            assert!(kind(&error), "{policy:?}: {error:?}");
        }
    }
}

fn shape(q: &[usize], k: &[usize], v: &[usize], parts: &[&str]) {
    for dtype in [DType::F32, DType::BF16] {
        let [q, k, v] = [q, k, v].map(|dims| x(dims, dtype));
        refused(
            |error| matches!(error, Error::Shape { .. }),
            parts,
            [&q, &k, &v],
        );
    }
}

#[test]
fn shapes_that_do_not_fit() {
    let wanted = "q (..., H, Tq, Dh), k (..., Hkv, Tk, Dh), v (..., Hkv, Tk, Dv)";
    let good = [1, 2, 5, 4];
    // Lengths and head dimensions that disagree.
    shape(
        &[1, 2, 3, 4],
        &good,
        &[1, 2, 6, 4],
        &[wanted, "k [1, 2, 5, 4]", "v [1, 2, 6, 4]"],
    );
    shape(
        &[1, 2, 3, 6],
        &good,
        &good,
        &[
            wanted,
            "q [1, 2, 3, 6]",
            "k [1, 2, 5, 4]",
            "same head dimension",
        ],
    );
    shape(
        &[1, 2, 3, 4],
        &good,
        &[1, 1, 5, 4],
        &[wanted, "v [1, 1, 5, 4]"],
    );
    let batch = "dimensions before the heads must be the same";
    shape(
        &[2, 2, 3, 4],
        &good,
        &good,
        &[wanted, "q [2, 2, 3, 4]", batch],
    );
    shape(
        &good,
        &good,
        &[2, 2, 5, 4],
        &[wanted, "v [2, 2, 5, 4]", batch],
    );
    shape(
        &[3, 1, 2, 5, 4],
        &good,
        &good,
        &[wanted, "q [3, 1, 2, 5, 4]"],
    );
    shape(&[5, 4], &[1, 5, 4], &[1, 5, 4], &[wanted, "q [5, 4]"]);
    shape(&[4], &[5, 4], &[5, 4], &[wanted, "q [4]", "two dimensions"]);
    shape(&[5, 4], &[5, 4], &[4], &[wanted, "v [4]", "two dimensions"]);
    shape(&[], &[], &[], &[wanted, "q []"]);
}

#[test]
fn heads_that_kv_heads_do_not_divide() {
    for (heads, kv_heads) in [(3, 2), (2, 3), (4, 3), (1, 2), (2, 0)] {
        let parts = [&*format!("divide the {heads} heads")];
        let (q, k) = ([1, heads, 3, 4], [1, kv_heads, 5, 4]);
        shape(&q, &k, &k, &parts);
    }
}

#[test]
fn nothing_to_compare() {
    let parts = ["no elements to compare"];
    shape(&[1, 2, 3, 0], &[1, 2, 5, 0], &[1, 2, 5, 0], &parts);
    shape(&[1, 2, 3, 0], &[1, 2, 0, 0], &[1, 2, 0, 0], &parts);
}

#[rstest]
#[case(257, 257, "257")]
#[case(300, 64, "300")]
#[case(64, 257, "257")]
fn head_dimensions_without_a_kernel(
    #[case] head_dim: usize,
    #[case] value_dim: usize,
    #[case] got: &str,
) {
    let parts = ["head dimensions of at most 256", got, "attention::naive"];
    let q = [1, 2, 3, head_dim];
    shape(&q, &[1, 2, 5, head_dim], &[1, 2, 5, value_dim], &parts);
}

/// The limit itself is accepted.
#[rstest]
fn the_largest_head_dimension(#[values(FLASH, REFERENCE)] attend: Attend) {
    let (q, k) = (
        x(&[1, 2, 3, 256], DType::F32),
        x(&[1, 2, 5, 256], DType::F32),
    );
    attend(&q, &k, &k, &AttentionConfig::default()).unwrap();
}

#[test]
fn dtypes() {
    let kind = |error: &Error| matches!(error, Error::DType { .. });
    let dims = [1, 2, 3, 4];
    let [f32, f64, bf16, f16] =
        [DType::F32, DType::F64, DType::BF16, DType::F16].map(|d| x(&dims, d));
    let mixed = |operands, got: &str, like: &str| {
        let wanted = format!("one dtype, {like} as q has it");
        refused(kind, &[&wanted, got, "to_dtype"], operands);
    };
    mixed([&f32, &f64, &f32], "k in f64", "f32");
    mixed([&f32, &f32, &bf16], "v in bf16", "f32");
    mixed([&f16, &bf16, &f16], "k in bf16", "f16");
    for dtype in [DType::U32, DType::I64, DType::U8] {
        let x = x(&dims, dtype);
        let parts = ["floating-point", dtype.as_str(), "to_dtype"];
        refused(kind, &parts, [&x, &x, &x]);
    }
}
