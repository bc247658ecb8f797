//! Against naive attention, matrix by matrix.

use super::*;
use crate::kernels::cpu::naive_attention;
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
    let mut share = nan(sizes.matrices * sizes.length);
    let (mut dq, mut dk, mut dv) = (nan(n), nan(n), nan(n));
    let inputs = Inputs { q, k, v };
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    pool.unwrap().install(|| {
        let outputs = Outputs {
            out: &mut out,
            e: &mut e,
            share: &mut share,
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
            share: &share,
            out: &out,
            d_out,
        };
        let mut scratch = nan(threads * sizes.backward_scratch_len());
        let mut partial = nan(sizes.partial_sums_len());
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
        (1, 1000, 8), // in chunks
        (2, 2200, 3), // in chunks of smaller blocks, over several strips
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
            let inputs = [0.0, 1.0, 2.0, 3.0].map(|phase| wave(n, phase));
            let [q, k, v, d_out] = &inputs;
            let naive = naive_attention::Sizes {
                batch: matrices,
                kv_batch: matrices,
                queries: length,
                keys: length,
                head_dim,
                value_dim: head_dim,
            };
            let mut p = vec![0f64; matrices * length * length];
            let [mut out, mut dq, mut dk, mut dv] = [(); 4].map(|()| vec![0f64; n]);
            naive_attention::forward(naive, q, k, v, 0.3, mask, &mut p, &mut out);
            naive_attention::backward(
                naive, d_out, q, k, v, &p, 0.3, mask, &mut dq, &mut dk, &mut dv,
            );
            let got = run(&sizes, &inputs, 1);
            let wanted = [out, dq, dk, dv];
            for (i, name) in ["out", "dq", "dk", "dv"].iter().enumerate() {
                close(name, &got[i], &wanted[i]);
            }
            assert_eq!(run(&sizes, &inputs, 3), got, "on three threads");
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
