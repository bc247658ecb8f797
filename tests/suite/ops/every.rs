//! Every op as a list of cases: small ones of a few dozen elements, and large ones of many tasks.

use super::case::Case;
use super::cases::{self, MASKS};
use tallow::ops::Gelu;

/// Returns every op once, with masks and ignored targets, on a few dozen elements.
pub fn small() -> Vec<Case> {
    let mut cases = vec![
        cases::relu(&[2, 3, 5], 100),
        cases::dropout(&[2, 3, 5], 0.3, 105),
        cases::swiglu(&[2, 3, 5], 110),
        cases::swiglu_linear(&[2, 3], 5, 4, 115),
        cases::geglu(Gelu::Erf, &[2, 3, 5], 110),
        cases::geglu(Gelu::Tanh, &[2, 3, 5], 110),
        cases::geglu_linear(&[2, 3], 5, 4, 115),
        cases::soft_cap(&[2, 3, 5], 2.0, 117),
        cases::rms_norm(&[2, 3], 7, 120),
        cases::offset_rms_norm(&[2, 3], 7, 120),
        cases::layer_norm(&[2, 3], 7, 130),
        cases::rope(&[2, 3], 5, 6, 140),
        cases::rope_by_halves(&[2, 3], 5, 6, 140),
        cases::linear(&[2, 3], 5, 4, 150),
        cases::matmul(&[2, 3], [4, 5, 3], 160),
        cases::matmul_transposed(&[2, 3], [4, 5, 3], 170),
        cases::embedding(&[2, 5], 7, 3, 180),
        cases::split_heads([2, 3, 4, 2], 190),
        cases::merge_heads([2, 3, 4, 2], 200),
        cases::cross_entropy(&[2, 3], 7, 2.0, false, 210),
        cases::cross_entropy(&[2, 3], 7, 2.0, true, 220),
        cases::linear_bias(&[2, 3], 5, 4, 230),
        cases::repeated_heads(&[2, 3, 4, 2], 3, 240),
    ];
    cases.extend(cases::activations(&[2, 3, 5], 250));
    for (i, mask) in MASKS.into_iter().enumerate() {
        let seed = 300 + 10 * i as u64;
        cases.push(cases::softmax(&[2], (3, 5), (0.7, 2.0), mask, seed));
        cases.push(cases::softmax(&[2], (5, 3), (-0.7, 2.0), mask, seed + 1));
        cases.push(cases::attention(&[2, 1], (3, 5), 4, (None, mask), seed + 2));
        cases.push(cases::attention(
            &[1, 2],
            (5, 3),
            4,
            (Some(0.3), mask),
            seed + 5,
        ));
        cases.push(cases::grouped_attention(
            &[2],
            (4, 2),
            (3, 5),
            (4, 3),
            (None, mask),
            seed + 8,
        ));
    }
    cases
}

/// Returns every op on sizes that kernels split into many tasks.
pub fn large() -> Vec<Case> {
    let mut cases = vec![
        cases::relu(&[257, 323], 1),
        cases::dropout(&[257, 323], 0.3, 10),
        cases::swiglu(&[257, 323], 2),
        cases::geglu(Gelu::Erf, &[257, 323], 2),
        cases::geglu(Gelu::Tanh, &[257, 323], 2),
        cases::soft_cap(&[257, 323], 2.0, 2),
        cases::rms_norm(&[3, 123], 323, 3),
        cases::offset_rms_norm(&[3, 123], 323, 3),
        cases::layer_norm(&[3, 123], 323, 4),
        cases::rope(&[2, 5], 257, 40, 5),
        cases::rope_by_halves(&[2, 5], 257, 40, 5),
        cases::linear(&[3, 123], 257, 301, 6),
        cases::linear(&[1], 512, 1031, 7), // a vector times a matrix
        cases::linear(&[1031], 512, 1, 8), // a matrix times a vector
        cases::matmul(&[7, 5], [65, 24, 123], 9), // more matrices than threads
        cases::matmul(&[1], [257, 131, 301], 10), // threads share one matmul
        cases::matmul_transposed(&[7, 5], [65, 24, 123], 11),
        cases::matmul_transposed(&[1], [257, 131, 301], 12),
        cases::matmul_transposed(&[5], [257, 40, 123], 13), // three threads share a matmul, one does not
        cases::embedding(&[3, 257], 61, 123, 14),
        cases::split_heads([3, 123, 5, 40], 15),
        cases::merge_heads([3, 123, 5, 40], 16),
        cases::cross_entropy(&[3, 123], 257, 3.0, false, 17),
        cases::cross_entropy(&[3, 123], 257, 3.0, true, 18),
        cases::linear_bias(&[3, 123], 257, 301, 22),
        cases::repeated_heads(&[3, 5, 123, 40], 3, 23),
        cases::add_scaled(&[257, 323], &[257, 323], 0.3, 24),
    ];
    cases.extend(cases::activations(&[257, 323], 25));
    cases.extend(cases::maps(&[257, 323], 29));
    cases.extend(cases::selections([7, 123, 65], 30));
    for over in [&[0][..], &[1], &[2], &[0, 1], &[2, 0]] {
        cases.extend(cases::reductions(&[7, 123, 257], over, 26));
    }
    cases.extend(cases::reductions(&[20_011, 3], &[0], 27)); // few sums of many elements
    cases.extend(cases::reductions(&[3, 20_011], &[1], 28));
    for mask in MASKS {
        cases.push(cases::softmax(&[2, 2], (123, 257), (0.3, 3.0), mask, 19));
        cases.push(cases::attention(&[2, 3], (123, 257), 24, (None, mask), 20));
        // Two matrices of k and v, each shared by several threads; then four, distributed over the threads.
        for heads in [(6, 1), (6, 2)] {
            let how = (None, mask);
            cases.push(cases::grouped_attention(
                &[2],
                heads,
                (123, 257),
                (24, 40),
                how,
                21,
            ));
        }
    }
    cases
}
