//! Against the ops that it takes in: split, rope, naive attention, merge.

use super::*;
use crate::kernels::Mask;
use crate::kernels::attention;
use crate::kernels::cpu::attention::naive;
use crate::kernels::cpu::{heads, rope};

fn wave(n: usize, phase: f64) -> Vec<f64> {
    (0..n).map(|i| (i as f64 * 0.37 + phase).sin()).collect()
}

fn close(what: &str, got: &[f64], wanted: &[f64]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (got, wanted) in got.iter().zip(wanted) {
        assert!((got - wanted).abs() < 1e-12, "{what}: {got} for {wanted}");
    }
}

#[test]
fn as_the_unfused_in_f64() {
    for (batch, length, heads, head_dim) in [
        (1, 1, 1, 2),
        (3, 13, 2, 24),
        (2, 64, 1, 16),
        (1, 123, 3, 40),
        (2, 257, 2, 32),
    ] {
        let sizes = Sizes {
            heads: HeadSizes {
                batch,
                length,
                heads,
                head_dim,
            },
            scale: 0.3,
        };
        let n = batch * length * heads * head_dim;
        let [q, k, v, d_out] = [0.0, 1.0, 2.0, 3.0].map(|phase| wave(n, phase));
        let tables = wave(length * head_dim, 0.5);
        let (cos, sin) = tables.split_at(length * head_dim / 2);
        // The angles' tables are no rotation's, but the transpose of what is done to x is undone all the same.
        let split = |x: &[f64]| {
            let mut y = vec![0f64; n];
            heads::split(sizes.heads, x, &mut y);
            y
        };
        let turned = |x: &[f64], inverse: bool| {
            let mut y = vec![0f64; n];
            rope::rotate(x, cos, sin, head_dim, inverse, &mut y);
            y
        };
        let merged = |x: &[f64]| {
            let mut y = vec![0f64; n];
            heads::merge(sizes.heads, x, &mut y);
            y
        };
        let unfused = attention::Sizes {
            batch,
            heads,
            kv_heads: heads,
            queries: length,
            keys: length,
            head_dim,
            value_dim: head_dim,
            mask: Mask::Causal,
            scale: sizes.scale,
        };
        let (qh, kh, vh) = (
            turned(&split(&q), false),
            turned(&split(&k), false),
            split(&v),
        );
        let mut p = vec![0f64; batch * heads * length * length];
        let mut out = vec![0f64; n];
        naive::forward(&unfused, &qh, &kh, &vh, &mut p, &mut out);
        let (mut dq, mut dk, mut dv) = (vec![0f64; n], vec![0f64; n], vec![0f64; n]);
        let d_heads = split(&d_out);
        naive::backward(
            &unfused, &d_heads, &qh, &kh, &vh, &p, &mut dq, &mut dk, &mut dv,
        );

        let inputs = Inputs {
            q: &q,
            k: &k,
            v: &v,
            angles: Angles { cos, sin },
        };
        // Nothing may be read before it is written; scratch for two threads.
        let nan = |len: usize| vec![f64::NAN; len];
        let (mut got_p, mut got) = (nan(sizes.probabilities_len()), nan(n));
        let outputs = Outputs {
            p: Some(&mut got_p),
            out: &mut got,
        };
        forward(
            &sizes,
            inputs,
            outputs,
            &mut nan(2 * sizes.forward_scratch_len()),
        );
        close("out", &got, &merged(&out));
        let mut alone = nan(n);
        let outputs = Outputs {
            p: None,
            out: &mut alone,
        };
        forward(
            &sizes,
            inputs,
            outputs,
            &mut nan(sizes.forward_scratch_len()),
        );
        assert_eq!(alone, got);

        let (mut got_dq, mut got_dk, mut got_dv) = (nan(n), nan(n), nan(n));
        let gradients = Gradients {
            dq: &mut got_dq,
            dk: &mut got_dk,
            dv: &mut got_dv,
        };
        let mut scratch = nan(2 * sizes.backward_scratch_len());
        backward(&sizes, inputs, &got_p, &d_out, gradients, &mut scratch);
        close("dq", &got_dq, &merged(&turned(&dq, true)));
        close("dk", &got_dk, &merged(&turned(&dk, true)));
        close("dv", &got_dv, &merged(&dv));
    }
}

/// In half precision too: rounded where the ops in a row are, but for sums in another order.
#[test]
fn as_the_unfused_in_bf16() {
    use half::bf16;

    let (batch, length, heads, head_dim) = (2, 123, 3, 40);
    let sizes = Sizes {
        heads: HeadSizes {
            batch,
            length,
            heads,
            head_dim,
        },
        scale: 0.3,
    };
    let n = batch * length * heads * head_dim;
    let narrow = |x: Vec<f64>| x.into_iter().map(bf16::from_f64).collect::<Vec<_>>();
    let [q, k, v, d_out] = [0.0, 1.0, 2.0, 3.0].map(|phase| narrow(wave(n, phase)));
    let tables = wave(length * head_dim, 0.5).into_iter();
    let tables: Vec<f32> = tables.map(|x| x as f32).collect();
    let (cos, sin) = tables.split_at(length * head_dim / 2);
    let zeros = || vec![bf16::ZERO; n];
    let split = |x: &[bf16]| {
        let mut y = zeros();
        heads::split(sizes.heads, x, &mut y);
        y
    };
    let turned = |x: &[bf16], inverse: bool| {
        let mut y = zeros();
        rope::rotate(x, cos, sin, head_dim, inverse, &mut y);
        y
    };
    let merged = |x: &[bf16]| {
        let mut y = zeros();
        heads::merge(sizes.heads, x, &mut y);
        y
    };
    let unfused = attention::Sizes {
        batch,
        heads,
        kv_heads: heads,
        queries: length,
        keys: length,
        head_dim,
        value_dim: head_dim,
        mask: Mask::Causal,
        scale: sizes.scale,
    };
    let [qh, kh] = [&q, &k].map(|x| turned(&split(x), false));
    let vh = split(&v);
    let mut p = vec![0f32; batch * heads * length * length];
    let mut out = zeros();
    naive::forward(&unfused, &qh, &kh, &vh, &mut p, &mut out);
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| zeros());
    let d_heads = split(&d_out);
    naive::backward(
        &unfused, &d_heads, &qh, &kh, &vh, &p, &mut dq, &mut dk, &mut dv,
    );

    let inputs = Inputs {
        q: &q,
        k: &k,
        v: &v,
        angles: Angles { cos, sin },
    };
    let nan = |len: usize| vec![f32::NAN; len];
    let mut got_p = nan(sizes.probabilities_len());
    let [mut got, mut got_dq, mut got_dk, mut got_dv] = [(); 4].map(|()| vec![bf16::NAN; n]);
    let outputs = Outputs {
        p: Some(&mut got_p),
        out: &mut got,
    };
    let mut scratch = nan(2 * sizes.forward_scratch_len());
    forward(&sizes, inputs, outputs, &mut scratch);
    let gradients = Gradients {
        dq: &mut got_dq,
        dk: &mut got_dk,
        dv: &mut got_dv,
    };
    let mut scratch = nan(2 * sizes.backward_scratch_len());
    backward(&sizes, inputs, &got_p, &d_out, gradients, &mut scratch);
    for (what, got, wanted) in [
        ("out", got, merged(&out)),
        ("dq", got_dq, merged(&turned(&dq, true))),
        ("dk", got_dk, merged(&turned(&dk, true))),
        ("dv", got_dv, merged(&dv)),
    ] {
        // A few of a hundred fall on the other side of a tie.
        let others = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
        assert!(others * 50 < n, "{what}: {others} of {n}");
    }
}
