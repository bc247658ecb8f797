//! Attention in the model's dimension as calls of kernels.

use super::InModel;
use crate::attention::lowering::reads;
use crate::kernels::workspace;
use crate::ops::lowering::{Calls, Check, Kernel, Named, Signature, Slot};
use candle_core::DType;

/// Projections cut into heads, rotated to their positions, compared, and merged again.
///
/// Inputs: the projections q, k, v, (B, T, H Dh) and twice (B, T, Hkv Dh), or all three as one, which are rotated in
/// place. Reads: cosines and sines (T, Dh/2) where positions rotate, then first keys (B, T), the key of dropout (4).
/// Output: (B, T, H Dh). Kept: the probabilities; or the log-sum-exp of the scores, and in half precision what rounding
/// took from the output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ModelAttention {
    pub sizes: InModel,
    pub is_naive: bool,
    pub rotates: bool,
    /// Whether the gradient of its output is needed.
    pub is_wanted: bool,
}

impl ModelAttention {
    pub fn forward(&self, signature: &Signature<'_>) -> Calls {
        let mut calls = Calls::default();
        if let [Some(read), _] = self.reads(signature) {
            calls = calls.checked(read, Check::FirstKeys);
        }
        let qkv = self.heads(&["qkv"], &["q", "k", "v"], Slot::Input);
        self.rotate(&mut calls, InModel::rotate, &qkv);
        let reads = qkv.and(self.beside(signature));
        let mut writes = Named::from([("out", Slot::Output)]);
        if self.is_naive {
            writes.push("p", Slot::Kept(0));
            if is_half(signature) {
                let scores = calls.scratch(&self.scores_at_once(signature), DType::F32);
                writes.push("scores", scores);
            }
            return calls.call(self.sizes.naive(), reads, writes);
        }
        writes.push("lse", Slot::Kept(0));
        let workspace = calls.scratch(&[workspace::flash_forward()], DType::U32);
        writes.push("workspace", workspace);
        // Out's own rounding would be in every gradient.
        if self.is_wanted && signature.kept.len() > 1 {
            writes.push("rounding_error", Slot::Kept(1));
        }
        calls.call(self.sizes.tiled(), reads, writes)
    }

    pub fn backward(&self, signature: &Signature<'_>) -> Calls {
        let mut calls = Calls::default();
        let gradients = self.heads(&["dqkv"], &["dq", "dk", "dv"], Slot::Gradient);
        let qkv = self.heads(&["qkv"], &["q", "k", "v"], Slot::Input);
        let reads = Named::from([("d_out", Slot::OutputGradient)]);
        let mut reads = reads.and(qkv).and(self.beside(signature));
        let mut writes = gradients.clone();
        if self.is_naive {
            reads.push("p", Slot::Kept(0));
            let some = self.scores_at_once(signature);
            writes.push("dp", calls.scratch(&some, DType::F32));
            if is_half(signature) {
                writes.push("dscores", calls.scratch(&some, signature.output.dtype));
            }
            calls.push(self.sizes.naive_backward(), reads, writes);
        } else {
            reads.push("out", Slot::Output);
            reads.push("lse", Slot::Kept(0));
            if signature.kept.len() > 1 {
                reads.push("rounding_error", Slot::Kept(1));
            }
            let words = workspace::flash_backward(&self.sizes.flash());
            writes.push("workspace", calls.scratch(&[words], DType::U32));
            calls.push(self.sizes.tiled_backward(), reads, writes);
        }
        self.rotate(&mut calls, InModel::rotate_back, &gradients);
        calls
    }

    /// First keys and the key of dropout among what is read, which stand behind the angles.
    fn reads(&self, signature: &Signature<'_>) -> [Option<usize>; 2] {
        let angles = if self.rotates { 2 } else { 0 };
        let beside = reads(signature.reads.len() - angles, self.sizes.dropout.is_some());
        beside.map(|read| Some(angles + read?))
    }

    fn beside(&self, signature: &Signature<'_>) -> Named<Slot> {
        let [first_keys, key] = self.reads(signature).map(|read| read.map(Slot::Read));
        let beside = Named::from([]).with_some("first_keys", first_keys);
        beside.with_some("dropout_key", key)
    }

    /// q, k and v or their gradients, or what they are packed in.
    fn heads(
        &self,
        packed: &[&'static str; 1],
        apart: &[&'static str; 3],
        slot: fn(usize) -> Slot,
    ) -> Named<Slot> {
        let names: &[&'static str] = if self.sizes.packed { packed } else { apart };
        let names = names.iter().enumerate();
        Named::from(names.map(|(i, name)| (*name, slot(i))).collect::<Vec<_>>())
    }

    /// Rotates what positions rotate of q, k and v or of their gradients, in place.
    fn rotate(&self, calls: &mut Calls, kernel: fn(&InModel) -> Kernel, heads: &Named<Slot>) {
        let s = &self.sizes;
        let sizes = match s.packed {
            true => vec![*s],
            false => vec![s.only(s.heads), s.only(s.kv_heads)],
        };
        for (x, sizes) in heads.iter().zip(sizes).filter(|_| self.rotates) {
            let angles = [("cos", Slot::Table(0)), ("sin", Slot::Table(1))];
            calls.push(kernel(&sizes), angles, [("x", *x)]);
        }
    }

    /// Naive attention's scores, of as many heads as it has at once.
    fn scores_at_once(&self, signature: &Signature<'_>) -> [usize; 3] {
        let (heads, t) = (self.sizes.batch * self.sizes.heads, self.sizes.length);
        let at_once = workspace::naive_heads_at_once(heads, t * t, signature.output.dtype);
        [at_once, t, t]
    }
}

fn is_half(signature: &Signature<'_>) -> bool {
    signature.output.dtype != DType::F32
}
