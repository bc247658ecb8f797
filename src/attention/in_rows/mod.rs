//! Attention in the layout of the projections, in plans for GPUs: heads stay in the rows of their positions, (B, T, H
//! Dh), so they need not be split, copied and merged.

#[cfg(feature = "cuda")]
mod heads;

#[cfg(feature = "cuda")]
pub(super) use heads::{DQKV, QKV, as_q, as_qkv};

use super::lowering::{Reads, sized};
use super::{attributes, flash, naive as on_heads};
use crate::graph::Attribute;
use crate::kernels::attention::Sizes;
use crate::kernels::{Dropout, workspace};
use crate::ops::lowering::{Calls, Check, Kernel, Named, Signature, Slot};
use crate::ops::rope;
use candle_core::DType;

/// Rotary embedding and attention on projections. Masks are causal or windows. Naive attention needs Hkv = H.
///
/// Inputs: the projections q (B, T, H Dh), k and v (B, T, Hkv Dh), or all three packed in one; q and k are rotated in
/// place. Reads: cosines and sines (T, Dh/2) if there is rotary embedding, then first keys (B, T) and the key of
/// dropout (4), if any. Output: (B, T, H Dh). Saved for backward: naive attention's probabilities; flash attention's
/// log-sum-exp and, in half precision, the rounding error of the output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct InRows {
    /// The sizes, with as many queries as keys.
    pub sizes: Sizes,
    /// Dropout of flash attention's probabilities.
    pub dropout: Option<Dropout>,
    pub is_naive: bool,
    /// Whether q, k and v are column ranges of one input (B, T, (H + 2 Hkv) Dh).
    pub packed: bool,
    /// Whether rotary embedding pairs element i with i + Dh/2 rather than with its neighbour; `None` without rotary
    /// embedding.
    pub by_halves: Option<bool>,
}

/// The attribute of kernels with heads in rows.
const IN_ROWS: &str = "in rows";

/// Whether a kernel has heads in rows.
#[cfg(feature = "cuda")]
pub(super) fn are(kernel: &Kernel) -> bool {
    kernel.flag(IN_ROWS)
}

impl InRows {
    pub fn forward(&self, signature: &Signature<'_>) -> Calls {
        let mut calls = Calls::default();
        if let [Some(read), _] = self.reads(signature) {
            calls = calls.checked(read, Check::FirstKeys);
        }
        let qkv = self.operands(&["qkv"], &["q", "k", "v"], Slot::Input);
        self.rotate(&mut calls, &qkv, false);
        let reads = qkv.and(self.extra_reads(signature));
        let mut writes = Named::from([("out", Slot::Output)]);
        if self.is_naive {
            writes.push("p", Slot::Saved(0));
            if is_half(signature) {
                let scores = calls.scratch(&self.scores_at_once(signature), DType::F32);
                writes.push("scores", scores);
            }
            return calls.call(
                self.kernel(on_heads::lowering::forward_kernel(), 1.0),
                reads,
                writes,
            );
        }
        writes.push("lse", Slot::Saved(0));
        let words = workspace::flash_forward(&self.sizes, None);
        let workspace = calls.scratch(&[words], DType::U32);
        writes.push("workspace", workspace);
        // Without it, every gradient would contain the rounding error of out.
        if signature.needs_grad(0) && signature.saved.len() > 1 {
            writes.push("rounding_error", Slot::Saved(1));
        }
        calls.call(
            self.kernel(flash::lowering::forward_kernel(), 1.0),
            reads,
            writes,
        )
    }

    pub fn backward(&self, signature: &Signature<'_>) -> Calls {
        let mut calls = Calls::default();
        let gradients = self.operands(&["dqkv"], &["dq", "dk", "dv"], Slot::Gradient);
        let qkv = self.operands(&["qkv"], &["q", "k", "v"], Slot::Input);
        let reads = Named::from([("d_out", Slot::OutputGradient)]);
        let mut reads = reads.and(qkv).and(self.extra_reads(signature));
        let mut writes = gradients.clone();
        if self.is_naive {
            reads.push("p", Slot::Saved(0));
            let some = self.scores_at_once(signature);
            writes.push("dp", calls.scratch(&some, DType::F32));
            if is_half(signature) {
                writes.push("dscores", calls.scratch(&some, signature.output.dtype));
            }
            calls.push(
                self.kernel(on_heads::lowering::backward_kernel(), 2.0),
                reads,
                writes,
            );
        } else {
            reads.push("out", Slot::Output);
            reads.push("lse", Slot::Saved(0));
            if signature.saved.len() > 1 {
                reads.push("rounding_error", Slot::Saved(1));
            }
            let words = workspace::flash_backward(&self.sizes, None);
            writes.push("workspace", calls.scratch(&[words], DType::U32));
            calls.push(
                self.kernel(flash::lowering::backward_kernel(), 2.0),
                reads,
                writes,
            );
        }
        self.rotate(&mut calls, &gradients, true);
        calls
    }

    /// Returns a kernel with its sizes, for heads in rows.
    fn kernel(&self, kernel: Kernel, passes: f64) -> Kernel {
        let attributes = attributes(&self.sizes, self.dropout);
        let kernel = sized(kernel, &self.sizes, &attributes, passes);
        kernel.with(IN_ROWS, Attribute::Flag(true))
    }

    /// Returns which reads are the first keys and the key of dropout; they follow the angles.
    fn reads(&self, signature: &Signature<'_>) -> [Option<usize>; 2] {
        let angles = if self.by_halves.is_some() { 2 } else { 0 };
        let dtypes = signature.extra_inputs[angles..].iter().map(|x| x.dtype);
        let dtypes: Vec<DType> = dtypes.collect();
        let extra = Reads::of(&dtypes, self.dropout.is_some());
        [extra.first_keys, extra.dropout_key].map(|read| Some(angles + read?))
    }

    fn extra_reads(&self, signature: &Signature<'_>) -> Named<Slot> {
        let [first_keys, key] = self.reads(signature).map(|read| read.map(Slot::ExtraInput));
        let reads = Named::from([]).with_some("first_keys", first_keys);
        reads.with_some("dropout_key", key)
    }

    /// Returns q, k and v or their gradients, or the packed operand.
    fn operands(
        &self,
        packed: &[&'static str; 1],
        apart: &[&'static str; 3],
        slot: fn(usize) -> Slot,
    ) -> Named<Slot> {
        let names: &[&'static str] = if self.packed { packed } else { apart };
        let names = names.iter().enumerate();
        Named::from(names.map(|(i, name)| (*name, slot(i))).collect::<Vec<_>>())
    }

    /// Rotates q and k or their gradients in place; in a packed operand they are the first heads of a row.
    fn rotate(&self, calls: &mut Calls, operands: &Named<Slot>, back: bool) {
        let Some(by_halves) = self.by_halves else {
            return;
        };
        let s = &self.sizes;
        let heads = match self.packed {
            true => vec![(s.heads + s.kv_heads, s.heads + 2 * s.kv_heads)],
            false => [s.heads, s.kv_heads].map(|heads| (heads, heads)).into(),
        };
        for (x, (heads, of_row)) in operands.iter().zip(heads) {
            let row = of_row * s.head_dim;
            let sizes = [s.batch, s.queries, heads, s.head_dim, row];
            let angles = [("cos", Slot::Table(0)), ("sin", Slot::Table(1))];
            calls.push(rope::in_place(sizes, by_halves, back), angles, [("x", *x)]);
        }
    }

    /// Returns the shape of naive attention's scores, for the heads that are computed together.
    fn scores_at_once(&self, signature: &Signature<'_>) -> [usize; 3] {
        let (heads, t) = (self.sizes.matrices(), self.sizes.queries);
        let at_once = workspace::naive_heads_per_pass(heads, t * t, signature.output.dtype);
        [at_once, t, t]
    }
}

fn is_half(signature: &Signature<'_>) -> bool {
    signature.output.dtype != DType::F32
}
