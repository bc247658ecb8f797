//! The plan of attention alone: its sizes, buffers and two calls.

use super::super::buffer::{Buffer, BufferId, Category, Home};
use super::super::op::Op;
use super::super::plan::{Call, Operand, Phase, Plan, Runs};
use super::OP;
use crate::attention::{AttentionConfig, Mask};
use crate::kernels::cpu::blocked_attention as kernel;
use crate::{Error, Result};
use candle_core::{DType, Shape};

/// The sizes of an attention over heads that lie one after another: as many queries as keys, as many heads of k and v as
/// of q.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadAttentionSizes {
    /// B H.
    pub matrices: usize,
    /// T.
    pub length: usize,
    /// Dh.
    pub head_dim: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// What scores are multiplied by.
    pub scale: f64,
}

impl HeadAttentionSizes {
    /// Those of q, k and v of this shape, if it can be planned.
    pub(super) fn new(shape: &Shape, config: &AttentionConfig) -> Result<Self> {
        let refuse = |hint: &str| {
            Err(Error::Shape {
                op: OP,
                expected: "(..., T, Dh), each size at least 1".into(),
                got: format!("{:?}", shape.dims()),
                hint: hint.into(),
            })
        };
        let [leading @ .., length, head_dim] = shape.dims() else {
            return refuse("plan for the shape of q, k and v, which are the same");
        };
        if shape.dims().contains(&0) {
            return refuse("there is nothing to attend to, and nothing to plan");
        }
        let sizes = Self {
            matrices: leading.iter().product(),
            length: *length,
            head_dim: *head_dim,
            mask: config.mask,
            scale: config.scale_for(*head_dim),
        };
        // In f64, which does not overflow; scratch and gradients are of that order too.
        let [m, t, d] = [sizes.matrices, sizes.length, sizes.head_dim].map(|size| size as f64);
        let wanted_bytes = 4.0 * (m * t * (t + 8.0 * d) + 8.0 * t * d);
        if wanted_bytes >= 2f64.powi(56) {
            return Err(Error::OutOfMemory {
                what: "the arena of a planned attention".into(),
                wanted_bytes: wanted_bytes as u64, // saturates
                available_bytes: crate::device::available_bytes().unwrap_or(u64::MAX),
            });
        }
        Ok(sizes)
    }

    /// As the kernel takes them.
    pub(in super::super) fn kernel(&self) -> kernel::Sizes {
        kernel::Sizes {
            matrices: self.matrices,
            length: self.length,
            head_dim: self.head_dim,
            mask: self.mask,
            scale: self.scale,
        }
    }
}

/// One call forward, one backward.
pub(super) fn of(sizes: HeadAttentionSizes) -> Plan {
    let kernel = sizes.kernel();
    let threads = rayon::current_num_threads();
    let heads = vec![sizes.matrices, sizes.length, sizes.head_dim];
    let mut buffers = Vec::new();
    let mut buffer = |name: &str, shape: Vec<usize>, category, home| {
        buffers.push(Buffer {
            name: name.into(),
            shape,
            dtype: DType::F32,
            category,
            home,
            live: 0..0, // the plan finds out
        });
        BufferId(buffers.len() - 1)
    };
    let names = ["q", "k", "v", "d_out"];
    let arguments =
        [0, 1, 2, 3].map(|i| buffer(names[i], heads.clone(), Category::Input, Home::Argument(i)));
    let mut arena = |name, shape, category| {
        let home = Home::Arena { offset_bytes: 0 };
        buffer(name, shape, category, home)
    };
    let out = arena("out", heads.clone(), Category::Output);
    let exponentials = vec![kernel.exponentials_len()];
    let exponentials = arena("exponentials", exponentials, Category::Temporary);
    let share = vec![sizes.matrices, sizes.length];
    let share = arena("share", share, Category::Temporary);
    let forward_scratch = vec![threads, kernel.forward_scratch_len()];
    let forward_scratch = arena("forward/scratch", forward_scratch, Category::Scratch);
    let gradients = ["dq", "dk", "dv"].map(|name| arena(name, heads.clone(), Category::Gradient));
    let partial = vec![kernel.partial_sums_len()];
    let partial = arena("backward/partial sums", partial, Category::Scratch);
    let backward_scratch = vec![threads, kernel.backward_scratch_len()];
    let backward_scratch = arena("backward/scratch", backward_scratch, Category::Scratch);

    let whole = |id: &BufferId| Operand {
        buffer: *id,
        elements: 0..buffers[id.0].elements(),
    };
    let call = |op, phase, reads: &[BufferId], writes: &[BufferId]| Call {
        op,
        path: "attention".into(),
        phase,
        reads: reads.iter().map(whole).collect(),
        writes: writes.iter().map(whole).collect(),
    };
    let [q, k, v, d_out] = arguments;
    let [dq, dk, dv] = gradients;
    let forward = call(
        Op::HeadAttention(sizes),
        Phase::Forward,
        &[q, k, v],
        &[out, exponentials, share, forward_scratch],
    );
    let backward = call(
        Op::HeadAttentionBackward(sizes),
        Phase::Backward,
        &[d_out, q, k, v, exponentials, share, out],
        &[dq, dk, dv, partial, backward_scratch],
    );
    let kept = [out, dq, dk, dv];
    let runs = Runs {
        lasting: 0..0,
        repeated: 0..1,
        micro_batches: 1,
    };
    Plan::new(vec![forward, backward], buffers, Vec::new(), runs, &kept)
}
