//! Naive attention on the CPU, on heads one after another: a block of queries goes through scores, softmax and weighted
//! sum while it is in cache. With as many heads and keys as queries have.

use super::super::plan::BufferRange;
use super::form::{Form, Forms};
use super::program::Program;
use super::{Job, Lower, Target, attribute, place_of};
use crate::Result;
use crate::attention::blocked::{self, Sizes, dtype_of_exponentials};
use crate::graph::{self, Attribute, ValueId};
use crate::ops::lowering::Named;
use candle_core::DType;
use std::cell::RefCell;

struct Heads {
    path: String,
    sizes: Sizes,
    dtype: DType,
    threads: usize,
    /// q, k and v, (B H, T, Dh) each.
    qkv: [graph::ValueRef; 3],
    /// (B H, T, Dh).
    output: ValueId,
    /// What forward leaves: the scores' exponentials, what each row of them is multiplied by, and in half precision
    /// what rounding took from the output.
    kept: RefCell<Option<Named<BufferRange>>>,
}

impl Heads {
    fn shape(&self) -> [usize; 3] {
        let s = &self.sizes;
        [s.matrices, s.length, s.head_dim]
    }

    fn qkv(&self, lower: &mut Lower<'_>) -> [(&'static str, BufferRange); 3] {
        let [q, k, v] = &self.qkv;
        [("q", q), ("k", k), ("v", v)].map(|(name, x)| (name, lower.read(x)))
    }

    fn rounds(&self) -> bool {
        self.dtype != DType::F32
    }
}

impl Form for Heads {
    fn path(&self) -> &str {
        &self.path
    }

    fn outputs(&self) -> Vec<ValueId> {
        vec![self.output]
    }

    fn forward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let (sizes, shape) = (self.sizes, self.shape());
        let reads = self.qkv(lower);
        let out = lower.make(self.output, "out", &shape);
        let exponentials = [sizes.exponentials_len()];
        let dtype = dtype_of_exponentials(self.dtype);
        let exponentials = lower.temporary("exponentials", &exponentials, dtype);
        let inv_row_sum = lower.temporary("share", &shape[..2], DType::F32);
        let rounding_error = self
            .rounds()
            .then(|| lower.temporary("rounded_off", &shape, self.dtype));
        let scratch = [self.threads, sizes.forward_scratch_len()];
        let scratch = lower.scratch(&scratch, DType::F32);
        let kept = Named::from([("exponentials", exponentials), ("inv_row_sum", inv_row_sum)]);
        let kept = kept.with_some("rounding_error", rounding_error);
        self.kept.replace(Some(kept.clone()));
        let writes = Named::from([("out", out)]).and(kept);
        let writes = writes.with("scratch", scratch);
        lower.plan.call(blocked::forward(&sizes), reads, writes);
        Ok(())
    }

    fn backward(&self, lower: &mut Lower<'_>) -> Result<()> {
        let Some(d_out) = lower.gradients.take(self.output) else {
            return Ok(());
        };
        let (sizes, shape) = (self.sizes, self.shape());
        let Some(kept) = self.kept.take() else {
            return Ok(()); // a forward has been
        };
        let out = lower.value(self.output);
        let partial = [sizes.partial_sums_len(self.rounds())];
        let partial = lower.scratch(&partial, DType::F32);
        let scratch = [self.threads, sizes.backward_scratch_len(self.rounds())];
        let scratch = lower.scratch(&scratch, DType::F32);
        let gradients = ["dq", "dk", "dv"].map(|name| {
            let gradient = lower.temporary(name, &shape, self.dtype);
            (name, gradient)
        });
        let reads = Named::from([("d_out", d_out)]).and(self.qkv(lower));
        let reads = reads.with("out", out).and(kept);
        let writes = Named::from(gradients.clone());
        let writes = writes.and([("partial_sums", partial), ("scratch", scratch)]);
        lower.plan.call(blocked::backward(&sizes), reads, writes);
        let program = lower.program.clone();
        for (operand, (_, gradient)) in self.qkv.iter().zip(gradients) {
            if program.is_wanted(operand.value) && operand.tracked {
                lower.contribute(operand, gradient);
            }
        }
        Ok(())
    }
}

/// Naive attention's nodes whose heads are alike.
pub(super) fn find(program: &Program<'_>, job: &Job<'_>, forms: &mut Forms) {
    let Target::Cpu { threads } = job.function.target else {
        return;
    };
    for (i, node) in program.nodes.iter().enumerate() {
        if node.op != "attention::naive" || node.composed || !forms.is_free(i) {
            continue;
        }
        let [q, k, v] = &node.inputs[..] else {
            continue;
        };
        let dims = program.graph.shape_of(q);
        let alike = [k, v].iter().all(|x| program.graph.shape_of(x) == dims);
        let dtype = program.graph.value(node.output).dtype;
        let known = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        let [leading @ .., length, head_dim] = dims else {
            continue;
        };
        let (Some(Attribute::Number(scale)), Some(Attribute::Mask(mask))) =
            (attribute(node, "scale"), attribute(node, "mask"))
        else {
            continue;
        };
        let leaves_prefix = mask.window().is_none() && node.reads.is_empty();
        if !alike || !known || !leaves_prefix || dims.contains(&0) {
            continue;
        }
        let form = Heads {
            path: place_of(node),
            sizes: Sizes {
                matrices: leading.iter().product(),
                length: *length,
                head_dim: *head_dim,
                mask,
                scale,
            },
            dtype,
            threads,
            qkv: [q, k, v].map(Clone::clone),
            output: node.output,
            kept: RefCell::default(),
        };
        forms.add(i, [], form);
    }
}
