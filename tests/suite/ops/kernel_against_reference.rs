//! Every kernel against its reference on odd sizes, values and gradients: in f64 up to rounding, in f32 with f64 as the
//! exact result.

use super::case::{Case, KERNEL, REFERENCE};
use super::cases::{self, MASKS};
use super::compare::{assert_agree, assert_no_worse};
use super::every;
use candle_core::DType;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::RngSeed;
use rstest::rstest;
use tallow::attention::Mask;
use tallow::ops::Gelu;

fn check(case: Case) {
    let (kernel, exact) = (
        case.run(DType::F64, KERNEL),
        case.run(DType::F64, REFERENCE),
    );
    assert_agree(&case, &kernel, &exact, 1e-12);
    let narrow = [KERNEL, REFERENCE].map(|policy| case.run(DType::F32, policy));
    assert_no_worse(&case, &narrow[0], &narrow[1], &exact);
}

/// Zero to two leading dimensions.
fn leading() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1..=3usize, 0..=2)
}

fn length() -> impl Strategy<Value = usize> {
    select(vec![1, 2, 7, 31, 32, 33, 64, 123, 257])
}

fn head_dim() -> impl Strategy<Value = usize> {
    select(vec![2, 6, 24, 40, 80])
}

fn mask() -> impl Strategy<Value = Mask> {
    select(MASKS.to_vec())
}

/// (scale, standard deviation of the scores): ordinary, zero, negative, and large.
fn scale() -> impl Strategy<Value = (f64, f64)> {
    select(vec![
        (1.0, 1.0),
        (0.125, 8.0),
        (0.0, 1.0),
        (-0.5, 3.0),
        (0.25, 1e4),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        rng_seed: RngSeed::Fixed(20_240_607), // the same sizes each time
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn elementwise(mut dims in leading(), width in length(), seed in 0..1000u64) {
        dims.push(width);
        check(cases::relu(&dims, seed));
        check(cases::add_scaled(&dims, &dims, 0.3, seed));
        cases::activations(&dims, seed).into_iter().for_each(check);
        check(cases::swiglu(&dims, seed));
        check(cases::geglu(Gelu::Erf, &dims, seed));
        check(cases::geglu(Gelu::Tanh, &dims, seed));
        check(cases::soft_cap(&dims, 2.0, seed));
    }

    #[test]
    fn norms(mut rows in leading(), length in length(), width in length(), seed in 0..1000u64) {
        rows.push(length);
        check(cases::rms_norm(&rows, width, seed));
        check(cases::offset_rms_norm(&rows, width, seed));
        check(cases::layer_norm(&rows, width, seed));
    }

    #[test]
    fn softmax(
        rows in leading(),
        sizes in (length(), length()),
        scale in scale(),
        mask in mask(),
        seed in 0..1000u64,
    ) {
        check(cases::softmax(&rows, sizes, scale, mask, seed));
    }

    #[test]
    fn rope(rows in leading(), length in length(), head_dim in head_dim(), seed in 0..1000u64) {
        check(cases::rope(&rows, length, head_dim, seed));
    }

    #[test]
    fn linear(rows in leading(), sizes in (length(), length()), seed in 0..1000u64) {
        check(cases::linear(&rows, sizes.0, sizes.1, seed));
        check(cases::linear_bias(&rows, sizes.0, sizes.1, seed));
    }

    #[test]
    fn products(rows in leading(), sizes in (length(), head_dim(), length()), seed in 0..1000u64) {
        let (m, k, n) = sizes;
        check(cases::matmul(&rows, [m, k, n], seed));
        check(cases::matmul(&rows, [m, n, k], seed));
        check(cases::matmul_transposed(&rows, [m, k, n], seed));
    }

    #[test]
    fn embedding(mut tokens in leading(), length in length(), sizes in (length(), length()), seed in 0..1000u64) {
        tokens.push(length);
        check(cases::embedding(&tokens, sizes.0, sizes.1, seed));
    }

    #[test]
    fn heads(batch in 1..=3usize, length in length(), heads in 1..=5usize, head_dim in head_dim(), seed in 0..1000u64) {
        check(cases::split_heads([batch, length, heads, head_dim], seed));
        check(cases::merge_heads([batch, length, heads, head_dim], seed));
        check(cases::repeated_heads(&[batch, heads, length, head_dim], 1 + heads, seed));
    }

    #[test]
    fn cross_entropy(
        mut rows in leading(),
        length in length(),
        classes in length(),
        std in select(vec![1.0, 10.0, 1e4]),
        ignoring in any::<bool>(),
        seed in 0..1000u64,
    ) {
        rows.push(length);
        check(cases::cross_entropy(&rows, classes, std, ignoring, seed));
    }

    #[test]
    fn attention(
        leading in (1..=2usize, 1..=3usize),
        sizes in (length(), length()),
        head_dim in head_dim(),
        scale in select(vec![None, Some(0.5), Some(-0.25), Some(0.0)]),
        mask in mask(),
        seed in 0..1000u64,
    ) {
        let leading = [leading.0, leading.1];
        check(cases::attention(&leading, sizes, head_dim, (scale, mask), seed));
    }

    #[test]
    fn grouped_attention(
        batch in prop::collection::vec(1..=2usize, 0..=2),
        heads in (1..=3usize, 1..=4usize),
        sizes in (length(), length()),
        dims in (head_dim(), head_dim()),
        mask in mask(),
        seed in 0..1000u64,
    ) {
        let (kv_heads, group) = heads;
        let heads = (kv_heads * group, kv_heads);
        check(cases::grouped_attention(&batch, heads, sizes, dims, (None, mask), seed));
    }
}

/// Large cases: the tests above are too small for most kernels to split into many tasks.
#[test]
fn many_tasks() {
    every::large().into_iter().for_each(check);
}

/// Here a variance computed as the mean of squares minus the squared mean would lose all digits.
#[rstest]
#[case(1e2)]
#[case(1e4)]
fn layer_norm_far_from_zero(#[case] mean: f64) {
    let mut case = cases::layer_norm(&[33], 123, 12);
    case.inputs[0].value = (&case.inputs[0].value + mean).unwrap();
    check(case.rounded_to(DType::F32));
}

/// Every mask with more queries than keys and with fewer, always tested.
#[rstest]
fn attention_at_odd_lengths(
    #[values((1, 257), (257, 1), (123, 257), (257, 123))] sizes: (usize, usize),
    #[values(24, 40, 80)] head_dim: usize,
) {
    for mask in MASKS {
        check(cases::attention(&[1, 2], sizes, head_dim, (None, mask), 11));
    }
}
