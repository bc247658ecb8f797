//! Attention in the model's dimension: projections cut into heads, rotated to their positions, compared, and merged
//! again. Causal, with as many heads of k and v as of q.

mod find;

pub(super) use find::find;

use super::form::Form;
use super::{Lower, Target};
use crate::Result;
use crate::compile::op::Op;
use crate::compile::plan::Operand;
use crate::compile::sizes::AttentionSizes;
use crate::graph::{self, ValueId};
use crate::kernels::workspace;
use candle_core::DType;

struct Attention {
    path: String,
    sizes: AttentionSizes,
    dtype: DType,
    is_naive: bool,
    /// The projections, (N, D) each, or all three as one, (N, 3 D), three times; rotated in place where a kernel does
    /// not rotate by itself.
    qkv: [ValueId; 3],
    /// Cosines and sines, (T, Dh/2) each.
    angles: Option<[graph::Operand; 2]>,
    /// What is kept for backward: the probabilities; or the log-sum-exp of the scores, and in half precision what
    /// rounding took from the output.
    kept: Vec<ValueId>,
    /// (N, D).
    output: ValueId,
    is_wanted: bool,
}

impl Attention {
    /// N, D.
    fn shape(&self) -> [usize; 2] {
        let s = &self.sizes;
        [s.batch * s.length, s.heads * s.head_dim]
    }

    fn is_half(&self) -> bool {
        self.dtype != DType::F32
    }

    /// How many operands q, k and v are.
    fn count(&self) -> usize {
        if self.sizes.packed { 1 } else { 3 }
    }

    fn qkv(&self, lower: &mut Lower<'_>) -> Vec<Operand> {
        let values = self.qkv.iter().take(self.count());
        values.map(|value| lower.value(*value)).collect()
    }

    fn angles(&self, lower: &mut Lower<'_>) -> Result<Vec<Operand>> {
        let Some([cos, sin]) = &self.angles else {
            return Ok(Vec::new());
        };
        let cos = lower.table("rope.cos", cos, self.dtype)?;
        Ok(vec![cos, lower.table("rope.sin", sin, self.dtype)?])
    }

    /// A new buffer of so many f32, or of the dtype that products are computed in.
    fn buffer(&self, lower: &mut Lower<'_>, name: &str, shape: &[usize], is_wide: bool) -> Operand {
        let dtype = if is_wide { DType::F32 } else { self.dtype };
        lower.temporary(name, shape, dtype)
    }

    /// As [`buffer`](Self::buffer), for what backward reads.
    fn keep(
        &self,
        lower: &mut Lower<'_>,
        kept: usize,
        name: &str,
        shape: &[usize],
        is_wide: bool,
    ) -> Operand {
        let place = self.buffer(lower, name, shape, is_wide);
        if let Some(value) = self.kept.get(kept) {
            lower.places[value.0] = Some(place.clone());
        }
        place
    }

    /// Rotates what positions rotate of q, k and v or of their gradients, in place.
    fn rotate(&self, lower: &mut Lower<'_>, op: &Op, heads: &[Operand]) -> Result<()> {
        let angles = self.angles(lower)?;
        if !angles.is_empty() {
            for x in &heads[..heads.len().min(2)] {
                lower
                    .plan
                    .call_on(op.clone(), angles.clone(), vec![x.clone()]);
            }
        }
        Ok(())
    }

    /// Naive attention's scores on a GPU, of as many heads as it has there at once.
    fn scores_at_once(&self) -> [usize; 3] {
        let (heads, t) = (self.sizes.batch * self.sizes.heads, self.sizes.length);
        [
            workspace::naive_heads_at_once(heads, t * t, self.dtype),
            t,
            t,
        ]
    }

    fn naive_forward(&self, lower: &mut Lower<'_>, threads: usize) -> Result<()> {
        let kernel = self.sizes.rotary();
        let reads = [self.qkv(lower), self.angles(lower)?].concat();
        let out = lower.make(self.output, "out", &self.shape());
        let scratch = lower.scratch(&[threads, kernel.forward_scratch_len()], DType::F32);
        let p = self.is_wanted.then(|| {
            let len = [kernel.probabilities_len()];
            self.keep(lower, 0, "probabilities", &len, true)
        });
        let writes = [out, scratch].into_iter().chain(p).collect();
        lower.plan.call_on(Op::Attention(self.sizes), reads, writes);
        Ok(())
    }

    fn naive_forward_on_gpu(&self, lower: &mut Lower<'_>) {
        let qkv = self.qkv(lower);
        let [b, h, t] = [self.sizes.batch, self.sizes.heads, self.sizes.length];
        let out = lower.make(self.output, "out", &self.shape());
        let p = self.keep(lower, 0, "probabilities", &[b, h, t, t], false);
        let scores = self
            .is_half()
            .then(|| lower.scratch(&self.scores_at_once(), DType::F32));
        let writes = [out, p].into_iter().chain(scores).collect();
        lower
            .plan
            .call_on(Op::NaiveAttention(self.sizes), qkv, writes);
    }

    fn flash_forward(&self, lower: &mut Lower<'_>) {
        let qkv = self.qkv(lower);
        let [b, h, t, d] = [
            self.sizes.batch,
            self.sizes.heads,
            self.sizes.length,
            self.sizes.head_dim,
        ];
        let on_gpu = lower.is_on_gpu();
        let heads = match on_gpu {
            true => lower.make(self.output, "out", &self.shape()),
            false => self.buffer(lower, "heads", &[b, h, t, d], false),
        };
        let parts = workspace::flash_lse_parts(self.dtype);
        let lse = self.keep(lower, 0, "lse", &[parts, b, h, t], true);
        let workspace = on_gpu.then(|| lower.scratch(&[workspace::flash_forward()], DType::U32));
        // Out's own rounding would be in every gradient.
        let rounding_error = (self.is_wanted && self.is_half())
            .then(|| self.keep(lower, 1, "rounded_off", &[b, h, t, d], false));
        let writes = [heads.clone(), lse]
            .into_iter()
            .chain(workspace)
            .chain(rounding_error);
        let writes = writes.collect();
        lower
            .plan
            .call_on(Op::FlashAttention(self.sizes), qkv, writes);
        if !on_gpu {
            let out = lower.make(self.output, "out", &self.shape());
            lower
                .plan
                .call_on(Op::MergeHeads(self.sizes), vec![heads], vec![out]);
        }
    }

    fn flash_backward(
        &self,
        lower: &mut Lower<'_>,
        reads: Vec<Operand>,
        gradients: &[Operand],
    ) -> Result<()> {
        let op = Op::FlashAttentionBackward(self.sizes);
        let [b, h, t, d] = [
            self.sizes.batch,
            self.sizes.heads,
            self.sizes.length,
            self.sizes.head_dim,
        ];
        if lower.is_on_gpu() {
            let words = workspace::flash_backward(&self.sizes.flash());
            let workspace = lower.scratch(&[words], DType::U32);
            let writes = gradients.iter().cloned().chain([workspace]).collect();
            lower.plan.call_on(op, reads, writes);
            return self.rotate(lower, &Op::RotateBack(self.sizes), gradients);
        }
        let names = ["dq_heads", "dk_heads", "dv_heads"];
        let heads = names.map(|name| self.buffer(lower, name, &[b, h, t, d], false));
        lower.plan.call_on(op, reads, heads.to_vec());
        let angles = self.angles(lower)?;
        for (i, (from, to)) in heads.into_iter().zip(gradients).enumerate() {
            let rotates = i < 2 && !angles.is_empty();
            let (op, after) = match rotates {
                true => (Op::MergeRotatedBack(self.sizes), angles.clone()),
                false => (Op::MergeHeads(self.sizes), Vec::new()),
            };
            let reads = [from].into_iter().chain(after).collect();
            lower.plan.call_on(op, reads, vec![to.clone()]);
        }
        Ok(())
    }
}

impl Form for Attention {
    fn path(&self) -> &str {
        &self.path
    }

    fn outputs(&self) -> Vec<ValueId> {
        vec![self.output]
    }

    fn forward(&self, lower: &mut Lower<'_>) -> Result<()> {
        if let (Target::Cpu { threads }, true) = (lower.job.function.target, self.is_naive) {
            return self.naive_forward(lower, threads);
        }
        let qkv = self.qkv(lower);
        self.rotate(lower, &Op::Rotate(self.sizes), &qkv)?;
        match self.is_naive {
            true => self.naive_forward_on_gpu(lower),
            false => self.flash_forward(lower),
        }
        Ok(())
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let Some(d_out) = lower.gradients.take(self.output) else {
            return Ok(());
        };
        let qkv = self.qkv(lower);
        let [rows, width] = self.shape();
        let columns = width * 3 / self.count();
        let names = ["dq", "dk", "dv"].iter().take(self.count());
        let gradients: Vec<Operand> = names
            .map(|name| self.buffer(lower, name, &[rows, columns], false))
            .collect();
        let out = lower.value(self.output);
        let kept: Vec<Operand> = self
            .kept
            .iter()
            .filter_map(|kept| lower.places[kept.0].clone())
            .collect();
        let mut reads: Vec<Operand> = [d_out].into_iter().chain(qkv).collect();
        match (self.is_naive, lower.job.function.target) {
            (true, Target::Cpu { threads }) => {
                reads.extend(kept);
                reads.extend(self.angles(lower)?);
                let scratch = [threads, self.sizes.rotary().backward_scratch_len()];
                let scratch = lower.scratch(&scratch, DType::F32);
                let writes = gradients.iter().cloned().chain([scratch]).collect();
                lower
                    .plan
                    .call_on(Op::AttentionBackward(self.sizes), reads, writes);
            }
            (true, Target::Cuda) => {
                let some = self.scores_at_once();
                let d_probabilities = lower.scratch(&some, DType::F32);
                let d_scores = self
                    .is_half()
                    .then(|| self.buffer(lower, "dscores", &some, false));
                reads.extend(kept);
                let writes = gradients
                    .iter()
                    .cloned()
                    .chain([d_probabilities])
                    .chain(d_scores);
                let op = Op::NaiveAttentionBackward(self.sizes);
                let writes = writes.collect();
                lower.plan.call_on(op, reads, writes);
                self.rotate(lower, &Op::RotateBack(self.sizes), &gradients)?;
            }
            (false, _) => {
                reads.push(out);
                reads.extend(kept);
                self.flash_backward(lower, reads, &gradients)?;
            }
        }
        for (value, gradient) in self.qkv.iter().zip(gradients.iter().cycle()) {
            lower.gradients.set(*value, gradient.clone());
        }
        Ok(())
    }
}
