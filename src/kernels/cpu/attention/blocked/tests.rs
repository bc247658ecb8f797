//! Against naive attention, matrix by matrix.

use super::*;
use crate::kernels::attention;
use crate::kernels::cpu::attention::naive;
use rayon::ThreadPoolBuilder;

fn wave(n: usize, phase: f64) -> Vec<f64> {
    (0..n).map(|i| (i as f64 * 0.37 + phase).sin()).collect()
}

fn close(what: &str, got: &[f64], wanted: &[f64]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (got, wanted) in got.iter().zip(wanted) {
        assert!((got - wanted).abs() < 1e-12, "{what}: {got} for {wanted}");
    }
}

/// out, dq, dk, dv; nothing may be read before it is written.
fn run(sizes: &Sizes, [q, k, v, d_out]: &[Vec<f64>; 4], threads: usize) -> [Vec<f64>; 4] {
    let nan = |len: usize| vec![f64::NAN; len];
    let n = q.len();
    let (mut out, mut e) = (nan(n), nan(sizes.exponentials_len()));
    let mut inv_row_sum = nan(sizes.matrices * sizes.length);
    let (mut dq, mut dk, mut dv) = (nan(n), nan(n), nan(n));
    let inputs = Inputs { q, k, v };
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    pool.unwrap().install(|| {
        let outputs = Outputs {
            out: &mut out,
            rounding_error: &mut [],
            e: &mut e,
            inv_row_sum: &mut inv_row_sum,
        };
        let mut scratch = nan(threads * sizes.forward_scratch_len());
        forward(sizes, inputs, outputs, &mut scratch);
        let gradients = Gradients {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        let saved = Saved {
            e: &e,
            inv_row_sum: &inv_row_sum,
            out: &out,
            rounding_error: &[],
            d_out,
        };
        let mut scratch = nan(threads * sizes.backward_scratch_len(false));
        let mut partial = nan(sizes.partial_sums_len(false));
        backward(sizes, inputs, saved, gradients, &mut partial, &mut scratch);
    });
    [out, dq, dk, dv]
}

#[test]
fn as_naive_in_f64() {
    for (matrices, length, head_dim) in [
        (1, 1, 1),
        (3, 13, 2),
        (2, 64, 16),
        (40, 33, 24),
        (3, 123, 40),
        (1, 1000, 8), // in chunks, over several strips
        (2, 2200, 3),
    ] {
        for mask in [Mask::Full, Mask::Causal, Mask::CausalEnd] {
            let sizes = Sizes {
                matrices,
                length,
                head_dim,
                mask,
                scale: 0.3,
            };
            assert_eq!(sizes.chunks() > 1, length >= 1000);
            let n = matrices * length * head_dim;
            as_naive(&sizes, &[0.0, 1.0, 2.0, 3.0].map(|phase| wave(n, phase)));
        }
    }
}

/// Tops that change from strip to strip, by more than the slack and by less, upwards for some rows and downwards for
/// others.
#[test]
fn scores_that_grow_with_the_keys() {
    for (mask, scale) in [(Mask::Full, 0.3), (Mask::Causal, -0.3), (Mask::Full, 0.01)] {
        let sizes = Sizes {
            matrices: 2,
            length: 1500,
            head_dim: 4,
            mask,
            scale,
        };
        let mut inputs = [0.0, 1.0, 2.0, 3.0].map(|phase| wave(2 * 1500 * 4, phase));
        for (i, k) in inputs[1].iter_mut().enumerate() {
            *k = 1.0 + 0.1 * *k + (i / 4 % 1500) as f64 / 40.0;
        }
        as_naive(&sizes, &inputs);
    }
}

fn as_naive(sizes: &Sizes, inputs: &[Vec<f64>; 4]) {
    let Sizes {
        matrices,
        length,
        head_dim,
        mask,
        scale,
    } = *sizes;
    let [q, k, v, d_out] = inputs;
    let all = attention::Sizes {
        batch: 1,
        heads: matrices,
        kv_heads: matrices,
        queries: length,
        keys: length,
        head_dim,
        value_dim: head_dim,
        mask,
        scale,
    };
    let mut p = vec![0f64; matrices * length * length];
    let [mut out, mut dq, mut dk, mut dv] = [(); 4].map(|()| vec![0f64; q.len()]);
    let of_naive = naive::Inputs {
        q,
        k,
        v,
        first_keys: &[],
    };
    naive::forward(&all, of_naive, &mut p, &mut [], &mut out);
    naive::backward(&all, of_naive, d_out, &p, [&mut dq, &mut dk, &mut dv]);
    let got = run(sizes, inputs, 1);
    let wanted = [out, dq, dk, dv];
    for (i, name) in ["out", "dq", "dk", "dv"].iter().enumerate() {
        close(name, &got[i], &wanted[i]);
    }
    assert_eq!(run(sizes, inputs, 3), got, "on three threads");
}

/// Whole strips of scores of -inf before the first that is a number, and a row of NaN, which stays alone.
#[test]
fn what_is_not_finite() {
    let length = 1200;
    let sizes = Sizes {
        matrices: 1,
        length,
        head_dim: 1,
        mask: Mask::Full,
        scale: 1.0,
    };
    let mut q = vec![1.0; length];
    q[7] = f64::NAN;
    let mut k = wave(length, 0.0);
    k[..1000].fill(f64::NEG_INFINITY);
    let v = wave(length, 1.0);
    let [out, ..] = run(&sizes, &[q, k.clone(), v.clone(), vec![0.0; length]], 1);
    let sum: f64 = k.iter().map(|k| k.exp()).sum();
    let wanted: f64 = k.iter().zip(&v).map(|(k, v)| k.exp() * v / sum).sum();
    for (row, out) in out.iter().enumerate() {
        match row {
            7 => assert!(out.is_nan()),
            _ => assert!((out - wanted).abs() < 1e-12, "{row}: {out} for {wanted}"),
        }
    }
}

/// Blocks of exponentials follow each other without gap or overlap.
#[test]
fn blocks_in_a_row() {
    for mask in [Mask::Full, Mask::Causal] {
        for length in [1, 63, 64, 65, 2048, 2049, 5000] {
            let sizes = Sizes {
                matrices: 1,
                length,
                head_dim: 16,
                mask,
                scale: 1.0,
            };
            let mut end = 0;
            for block in 0..sizes.blocks() {
                assert_eq!(sizes.start(block), end);
                let queries = sizes.queries(block);
                end += queries.len() * sizes.score_row(queries.end);
            }
            assert_eq!(sizes.matrix_len(), end);
            let blocks = (0..sizes.tasks()).map(|task| sizes.task(task).2.len());
            assert_eq!(blocks.sum::<usize>(), sizes.blocks());
        }
    }
}
