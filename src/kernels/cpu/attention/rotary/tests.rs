//! Against the ops that it takes in: split, rope, naive attention, merge.

use super::*;
use crate::kernels::cpu::attention::naive;
use crate::kernels::cpu::{Real, heads, rope};
use crate::kernels::{Mask, attention};
use half::bf16;

/// One call: q, k, v and the gradient of the output, each (B, T, H*Dh), and the angles' tables, (T, Dh/2). The tables
/// are no rotation's, but the transpose of what is done to x is undone all the same.
struct Case<T: Stored> {
    sizes: Sizes,
    inputs: [Vec<T>; 4],
    cos: Vec<T::Wide>,
    sin: Vec<T::Wide>,
}

impl<T: Stored> Case<T> {
    fn new(batch: usize, length: usize, heads: usize, head_dim: usize) -> Self {
        let heads = HeadSizes {
            batch,
            length,
            heads,
            head_dim,
        };
        let wave = |n: usize, phase: f64| (0..n).map(move |i| (i as f64 * 0.37 + phase).sin());
        let n = batch * length * heads.heads * head_dim;
        let tables: Vec<_> = wave(length * head_dim, 0.5).map(T::Wide::real).collect();
        let (cos, sin) = tables.split_at(length * head_dim / 2);
        Self {
            sizes: Sizes { heads, scale: 0.3 },
            inputs: [0.0, 1.0, 2.0, 3.0].map(|phase| wave(n, phase).map(T::from_f64).collect()),
            cos: cos.to_vec(),
            sin: sin.to_vec(),
        }
    }

    fn fused_inputs(&self) -> Inputs<'_, T> {
        let [q, k, v, _] = &self.inputs;
        let (cos, sin) = (&self.cos, &self.sin);
        Inputs {
            q,
            k,
            v,
            angles: Angles { cos, sin },
        }
    }

    /// The output, dq, dk and dv by one op after another.
    fn unfused(&self) -> [Vec<T>; 4] {
        let HeadSizes {
            batch,
            length,
            heads,
            head_dim,
        } = self.sizes.heads;
        let zeros = || vec![T::zero(); self.inputs[0].len()];
        let split = |x: &[T]| {
            let mut y = zeros();
            heads::split(self.sizes.heads, x, &mut y);
            y
        };
        let rotated = |x: &[T], inverse: bool| {
            let mut y = zeros();
            rope::rotate(x, &self.cos, &self.sin, head_dim, inverse, &mut y);
            y
        };
        let merged = |x: &[T]| {
            let mut y = zeros();
            heads::merge(self.sizes.heads, x, &mut y);
            y
        };
        let sizes = attention::Sizes {
            batch,
            heads,
            kv_heads: heads,
            queries: length,
            keys: length,
            head_dim,
            value_dim: head_dim,
            mask: Mask::Causal,
            scale: self.sizes.scale,
        };
        let [q, k, v, d_out] = self.inputs.each_ref().map(|x| split(x));
        let (q, k) = (rotated(&q, false), rotated(&k, false));
        let mut p = vec![T::Wide::ZERO; batch * heads * length * length];
        let mut out = zeros();
        let inputs = naive::Inputs {
            q: &q,
            k: &k,
            v: &v,
            first_keys: &[],
        };
        naive::forward(&sizes, inputs, &mut p, &mut [], &mut out);
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| zeros());
        naive::backward(&sizes, inputs, &d_out, &p, [&mut dq, &mut dk, &mut dv]);
        [
            merged(&out),
            merged(&rotated(&dq, true)),
            merged(&rotated(&dk, true)),
            merged(&dv),
        ]
    }

    /// The same by the fused kernel. Nothing may be read before it is written; scratch for two threads.
    fn fused(&self) -> [Vec<T>; 4] {
        let nan = || vec![T::from_f64(f64::NAN); self.inputs[0].len()];
        let scratch = |len: usize| vec![T::Wide::real(f64::NAN); len];
        let mut p = scratch(self.sizes.probabilities_len());
        let [mut out, mut dq, mut dk, mut dv] = [(); 4].map(|()| nan());
        let outputs = Outputs {
            p: Some(&mut p),
            out: &mut out,
        };
        let mut room = scratch(2 * self.sizes.forward_scratch_len());
        forward(&self.sizes, self.fused_inputs(), outputs, &mut room);
        let gradients = Gradients {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        let mut room = scratch(2 * self.sizes.backward_scratch_len());
        let inputs = self.fused_inputs();
        backward(
            &self.sizes,
            inputs,
            &p,
            &self.inputs[3],
            gradients,
            &mut room,
        );
        [out, dq, dk, dv]
    }
}

const NAMES: [&str; 4] = ["out", "dq", "dk", "dv"];

#[test]
fn as_the_unfused_in_f64() {
    for (batch, length, heads, head_dim) in [
        (1, 1, 1, 2),
        (3, 13, 2, 24),
        (2, 64, 1, 16),
        (1, 123, 3, 40),
        (2, 257, 2, 32),
    ] {
        let case = Case::<f64>::new(batch, length, heads, head_dim);
        let (fused, unfused) = (case.fused(), case.unfused());
        for (what, (got, wanted)) in NAMES.iter().zip(fused.iter().zip(&unfused)) {
            assert_eq!(got.len(), wanted.len(), "{what}");
            for (got, wanted) in got.iter().zip(wanted) {
                assert!((got - wanted).abs() < 1e-12, "{what}: {got} for {wanted}");
            }
        }

        // Without the probabilities, and with scratch for one thread: the same bits.
        let mut alone = vec![f64::NAN; fused[0].len()];
        let outputs = Outputs {
            p: None,
            out: &mut alone,
        };
        let mut room = vec![f64::NAN; case.sizes.forward_scratch_len()];
        forward(&case.sizes, case.fused_inputs(), outputs, &mut room);
        assert_eq!(alone, fused[0]);
    }
}

/// In half precision too: rounded where the ops in a row are, but for sums in another order.
#[test]
fn as_the_unfused_in_bf16() {
    let case = Case::<bf16>::new(2, 123, 3, 40);
    for (what, (got, wanted)) in NAMES.iter().zip(case.fused().iter().zip(case.unfused())) {
        // A few of a hundred fall on the other side of a tie.
        let others = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
        assert!(others * 50 < got.len(), "{what}: {others} of {}", got.len());
    }
}
