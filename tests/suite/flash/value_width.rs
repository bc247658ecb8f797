//! Value heads of another width than the heads of queries and keys, with every mask and option, as in latent attention
//! (192 and 128).

use super::judge::judge_each;
use super::masks::{dropout, padded, with_bias};
use super::packed::{naive_on_test_device, naive_reference, of_lengths, window};
use super::problem::{Attend, DTYPES, FLASH, MASKS, Problem, REFERENCE, Sizes, device};
use super::same_bits::check_threads;
use candle_core::{DType, Tensor};
use rstest::rstest;
use tallow::attention::{Algorithm, AttentionConfig, Mask};

/// Dh and Dv.
pub type Widths = (usize, usize);

/// Grouped heads over several tiles: every mask, documents, padding, a bias, dropout and a soft cap, apart and together.
pub fn problems((head_dim, value_dim): Widths) -> Vec<Problem> {
    let sizes = |heads, lengths| Sizes::new(heads, lengths, head_dim).with_value_dim(value_dim);
    let uneven = sizes((2, 4, 2), (230, 201));
    let masks = MASKS.into_iter().chain([window(90)]);
    let masked = masks.map(|mask| Problem::random(uneven, mask, None, 81));
    let padded_and_biased = Problem::random(uneven, Mask::Full, None, 82);
    let padded_and_biased = with_bias(padded(padded_and_biased, &[0, 130]), 0b1110, 0.1, 4);
    let packed = Problem::random(sizes((2, 2, 1), (264, 264)), Mask::Causal, Some(0.2), 83);
    let packed = packed.with_first_keys(of_lengths(&[&[64, 3, 192, 5], &[1, 263]]));
    let mut all = with_bias(padded(packed.clone(), &[264, 200]), 0b1010, 0.0, 5);
    all.config.soft_cap = Some(1.5);
    let few = Problem::random(sizes((1, 1, 1), (1, 3)), Mask::Full, None, 84);
    let others = [
        padded_and_biased,
        packed,
        all.clone(),
        all.with_dropout(dropout()),
        few,
    ];
    masked.chain(others).collect()
}

/// A GPU has kernels of several widths; the CPU has one.
#[rstest]
fn over_tiles(
    #[values((24, 40), (40, 16), (16, 64), (64, 128), (128, 64), (192, 128), (128, 192), (256, 8))]
    widths: Widths,
) {
    if widths.0.max(widths.1) > 64 && widths != (192, 128) && !device().is_cuda() {
        return;
    }
    judge_each(problems(widths), &DTYPES, FLASH);
}

#[rstest]
fn by_others(
    #[values(REFERENCE, naive_on_test_device, naive_reference)] attend: Attend,
    #[values(DType::F32, DType::F64)] dtype: DType,
    #[values((8, 5), (3, 16))] widths: Widths,
) {
    judge_each(problems(widths), &[dtype], attend);
}

/// Widths that fill no register, and a value of one element.
#[rstest]
fn odd_widths(#[values((5, 1), (1, 7), (33, 50))] widths: Widths) {
    judge_each(
        problems(widths),
        &[DType::F32, DType::F64, DType::BF16],
        FLASH,
    );
}

#[test]
fn threads_do_not_change_a_bit() {
    check_threads(&problems((24, 40)), DType::F32);
    check_threads(&problems((40, 16)), DType::BF16);
}

/// Values of no elements have an output of none.
#[test]
fn values_without_elements() {
    let [q, k, v] = [(3, 8), (5, 8), (5, 0)].map(|(length, width)| {
        Tensor::zeros((1, 2, length, width), DType::F32, &candle_core::Device::Cpu).unwrap()
    });
    for algorithm in Algorithm::ALL {
        let out = algorithm.attend(&q, &k, &v, &AttentionConfig::default());
        assert_eq!(out.unwrap().dims(), [1, 2, 3, 0]);
    }
}
