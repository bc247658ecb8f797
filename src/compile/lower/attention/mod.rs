//! Attention in the model's dimension, on a GPU: projections cut into heads, rotated to their positions, compared, and
//! merged again. Causal; in naive attention with as many heads of k and v as of q. On the CPU copies of heads cost
//! nothing that shows.

mod find;

pub(super) use find::find;

use super::Lower;
use super::form::Form;
use crate::Result;
use crate::attention::in_model::InModel;
use crate::compile::plan::BufferRange;
use crate::graph::{self, ValueId};
use crate::kernels::workspace;
use crate::ops::lowering::{Check, Kernel, Named};
use candle_core::DType;

struct Attention {
    path: String,
    sizes: InModel,
    dtype: DType,
    is_naive: bool,
    /// The projections, (N, H Dh) and twice (N, Hkv Dh), or all three as one beside each other, three times; rotated in
    /// place.
    qkv: [ValueId; 3],
    /// Cosines and sines, (T, Dh/2) each.
    angles: Option<[graph::ValueRef; 2]>,
    /// What is read beside: first keys (B, T), the key of dropout (4).
    reads: [Option<graph::ValueRef>; 2],
    /// What is kept for backward: the probabilities; or the log-sum-exp of the scores, and in half precision what
    /// rounding took from the output.
    kept: Vec<ValueId>,
    /// (N, H Dh).
    output: ValueId,
    is_wanted: bool,
}

impl Attention {
    /// N, H Dh.
    fn shape(&self) -> [usize; 2] {
        let s = &self.sizes;
        [s.batch * s.length, s.heads * s.head_dim]
    }

    fn is_half(&self) -> bool {
        self.dtype != DType::F32
    }

    /// What attention reads: q, k and v, or what they are packed in, and what it reads beside.
    fn compared(&self, lower: &mut Lower<'_>) -> Named<BufferRange> {
        let beside = self.reads.each_ref();
        let [first_keys, key] = beside.map(|value| Some(lower.read(value.as_ref()?)));
        let compared = self.qkv(lower).with_some("first_keys", first_keys);
        compared.with_some("dropout_key", key)
    }

    /// q, k and v, or what they are packed in.
    fn qkv(&self, lower: &mut Lower<'_>) -> Named<BufferRange> {
        let names = self.sizes.names(&["qkv"], &["q", "k", "v"]).iter();
        let values = names.zip(&self.qkv);
        let operands = values.map(|(name, value)| (*name, lower.value(*value)));
        operands.collect::<Vec<_>>().into()
    }

    /// cos and sin, where positions rotate.
    fn angles(&self, lower: &mut Lower<'_>) -> Result<Vec<(&'static str, BufferRange)>> {
        let Some([cos, sin]) = &self.angles else {
            return Ok(Vec::new());
        };
        let cos = lower.table("rope.cos", cos, self.dtype)?;
        let sin = lower.table("rope.sin", sin, self.dtype)?;
        Ok(vec![("cos", cos), ("sin", sin)])
    }

    /// A new buffer of so many f32, or of the dtype that products are computed in.
    fn buffer(
        &self,
        lower: &mut Lower<'_>,
        name: &str,
        shape: &[usize],
        is_wide: bool,
    ) -> BufferRange {
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
    ) -> BufferRange {
        let place = self.buffer(lower, name, shape, is_wide);
        if let Some(value) = self.kept.get(kept) {
            lower.places[value.0] = Some(place.clone());
        }
        place
    }

    /// Rotates what positions rotate of q, k and v or of their gradients, in place.
    fn rotate(
        &self,
        lower: &mut Lower<'_>,
        kernel: fn(&InModel) -> Kernel,
        heads: &Named<BufferRange>,
    ) -> Result<()> {
        let angles = self.angles(lower)?;
        if !angles.is_empty() {
            for (x, sizes) in heads.iter().zip(self.each()).take(2) {
                let writes = [("x", x.clone())];
                lower.plan.call(kernel(&sizes), angles.clone(), writes);
            }
        }
        Ok(())
    }

    /// The sizes of q's, k's and v's heads, or of what they are packed in.
    fn each(&self) -> Vec<InModel> {
        let s = &self.sizes;
        match s.packed {
            true => vec![*s],
            false => [s.heads, s.kv_heads, s.kv_heads]
                .map(|heads| s.only(heads))
                .into(),
        }
    }

    /// Naive attention's scores, of as many heads as it has at once.
    fn scores_at_once(&self) -> [usize; 3] {
        let (heads, t) = (self.sizes.batch * self.sizes.heads, self.sizes.length);
        [
            workspace::naive_heads_at_once(heads, t * t, self.dtype),
            t,
            t,
        ]
    }

    fn naive_forward(&self, lower: &mut Lower<'_>) {
        let reads = self.compared(lower);
        let [b, h, t] = [self.sizes.batch, self.sizes.heads, self.sizes.length];
        let out = lower.make(self.output, "out", &self.shape());
        let p = self.keep(lower, 0, "probabilities", &[b, h, t, t], false);
        let scores = self
            .is_half()
            .then(|| lower.scratch(&self.scores_at_once(), DType::F32));
        let writes = Named::from([("out", out), ("p", p)]).with_some("scores", scores);
        lower.plan.call(self.sizes.naive(), reads, writes);
    }

    fn naive_backward(
        &self,
        lower: &mut Lower<'_>,
        reads: Named<BufferRange>,
        gradients: &Named<BufferRange>,
    ) {
        let some = self.scores_at_once();
        let d_probabilities = lower.scratch(&some, DType::F32);
        let d_scores = self
            .is_half()
            .then(|| self.buffer(lower, "dscores", &some, false));
        let writes = gradients.clone().with("dp", d_probabilities);
        let writes = writes.with_some("dscores", d_scores);
        lower.plan.call(self.sizes.naive_backward(), reads, writes);
    }

    fn flash_forward(&self, lower: &mut Lower<'_>) {
        let reads = self.compared(lower);
        let [b, h, t, d] = [
            self.sizes.batch,
            self.sizes.heads,
            self.sizes.length,
            self.sizes.head_dim,
        ];
        let out = lower.make(self.output, "out", &self.shape());
        let parts = workspace::flash_lse_parts(self.dtype);
        let lse = self.keep(lower, 0, "lse", &[parts, b, h, t], true);
        let workspace = lower.scratch(&[workspace::flash_forward()], DType::U32);
        // Out's own rounding would be in every gradient.
        let rounding_error = (self.is_wanted && self.is_half())
            .then(|| self.keep(lower, 1, "rounded_off", &[b, h, t, d], false));
        let writes = Named::from([("out", out), ("lse", lse), ("workspace", workspace)]);
        let writes = writes.with_some("rounding_error", rounding_error);
        lower.plan.call(self.sizes.tiled(), reads, writes);
    }

    fn flash_backward(
        &self,
        lower: &mut Lower<'_>,
        reads: Named<BufferRange>,
        gradients: &Named<BufferRange>,
    ) {
        let words = workspace::flash_backward(&self.sizes.flash());
        let workspace = lower.scratch(&[words], DType::U32);
        let writes = gradients.clone().with("workspace", workspace);
        lower.plan.call(self.sizes.tiled_backward(), reads, writes);
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
        if let [Some(first_keys), _] = &self.reads {
            lower.checks.push((first_keys.value, Check::FirstKeys));
        }
        let qkv = self.qkv(lower);
        self.rotate(lower, InModel::rotate, &qkv)?;
        match self.is_naive {
            true => self.naive_forward(lower),
            false => self.flash_forward(lower),
        }
        Ok(())
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let Some(d_out) = lower.gradients.take(self.output) else {
            return Ok(());
        };
        let compared = self.compared(lower);
        let [rows, _] = self.shape();
        let names = self.sizes.names(&["dqkv"], &["dq", "dk", "dv"]);
        let columns = self.sizes.columns();
        let columns = match self.sizes.packed {
            true => vec![columns.iter().sum()],
            false => columns.to_vec(),
        };
        let gradients = names.iter().zip(columns).map(|(name, columns)| {
            let gradient = self.buffer(lower, name, &[rows, columns], false);
            (*name, gradient)
        });
        let gradients = Named::from(gradients.collect::<Vec<_>>());
        let out = lower.value(self.output);
        let names: &[_] = match self.is_naive {
            true => &["p"],
            false => &["lse", "rounding_error"],
        };
        let kept = names.iter().zip(&self.kept);
        let kept = kept.filter_map(|(name, kept)| Some((*name, lower.places[kept.0].clone()?)));
        let kept = Named::from(kept.collect::<Vec<_>>());
        let reads = Named::from([("d_out", d_out)]).and(compared);
        match self.is_naive {
            true => self.naive_backward(lower, reads.and(kept), &gradients),
            false => {
                let reads = reads.with("out", out).and(kept);
                self.flash_backward(lower, reads, &gradients);
            }
        }
        self.rotate(lower, InModel::rotate_back, &gradients)?;
        for (value, gradient) in self.qkv.iter().zip(gradients.iter().cycle()) {
            lower.gradients.set(*value, gradient.clone());
        }
        Ok(())
    }
}
