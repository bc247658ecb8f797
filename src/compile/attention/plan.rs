//! The plan of attention alone: its sizes, buffers and two calls.

use super::super::buffer::{BufferId, Buffers, Category, Home};
use super::super::lower::Target;
use super::super::op::Op;
use super::super::plan::{Call, Operand, Phase, Plan, Runs};
use super::super::sizes::HeadAttentionSizes;
use super::OP;
use crate::attention::{Algorithm, AttentionConfig, flash::MAX_HEAD_DIM};
use crate::kernels::workspace;
use crate::{Error, Result};
use candle_core::{DType, Shape};

/// The sizes of attention on q, k and v of this shape, if it can be planned.
pub(super) fn sizes(
    algorithm: Algorithm,
    shape: &Shape,
    config: &AttentionConfig,
) -> Result<HeadAttentionSizes> {
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
    let sizes = HeadAttentionSizes {
        matrices: (leading.iter()).fold(1, |product: usize, size| product.saturating_mul(*size)),
        length: *length,
        head_dim: *head_dim,
        mask: config.mask,
        scale: config.scale_for(*head_dim),
    };
    if algorithm == Algorithm::Flash && *head_dim > MAX_HEAD_DIM {
        return Err(Error::Shape {
            op: OP,
            expected: format!("heads of at most {MAX_HEAD_DIM} for flash attention"),
            got: format!("{:?}", shape.dims()),
            hint: "plan naive attention".into(),
        });
    }
    // In f64, which does not overflow; scratch and gradients are of that order too.
    let [m, t, d] = [sizes.matrices, sizes.length, sizes.head_dim].map(|size| size as f64);
    let of_scores = match algorithm {
        Algorithm::Naive => t,
        Algorithm::Flash => 0.0,
    };
    let most = 2f64.powi(56);
    let mut wanted_bytes = 4.0 * (m * t * (of_scores + 8.0 * d) + 8.0 * t * d);
    if algorithm == Algorithm::Flash && wanted_bytes < most {
        wanted_bytes += 4.0 * workspace::flash_backward(&sizes.flash()) as f64; // a card's
    }
    if wanted_bytes >= most {
        return Err(Error::OutOfMemory {
            what: "the arena of a planned attention".into(),
            wanted_bytes: wanted_bytes as u64, // saturates
            available_bytes: crate::device::available_bytes().unwrap_or(u64::MAX),
        });
    }
    Ok(sizes)
}

/// What exponentials are kept in: digits to spare. In bf16 itself, or f16, rounding them would cost the gradients as much as
/// their own rounding does, and where the terms of a gradient cancel, more.
fn of_exponentials(dtype: DType) -> DType {
    match dtype {
        DType::BF16 => DType::F16,
        _ => DType::F32,
    }
}

/// One call forward, one backward; tensors in `dtype`.
pub(super) fn of(
    algorithm: Algorithm,
    sizes: HeadAttentionSizes,
    dtype: DType,
    target: Target,
) -> Plan {
    let plan = match (algorithm, target) {
        (Algorithm::Flash, _) => flash(sizes, dtype, matches!(target, Target::Cuda)),
        (Algorithm::Naive, Target::Cpu { threads }) => naive_on_cpu(sizes, dtype, threads),
        (Algorithm::Naive, Target::Cuda) => naive_on_card(sizes, dtype),
    };
    match target {
        Target::Cpu { .. } => plan,
        // The executor has it whatever the calls are.
        Target::Cuda => plan.with_workspace(workspace::PRODUCTS_BYTES),
    }
}

fn flash(sizes: HeadAttentionSizes, dtype: DType, on_card: bool) -> Plan {
    let mut buffers = Buffers::default();
    let [q, k, v, d_out] = buffers.arguments(&sizes, dtype);
    let heads = heads(&sizes);
    let out = buffers.arena("out", &heads, dtype, Category::Output);
    let parts = workspace::flash_lse_parts(dtype);
    let lse = [parts, sizes.matrices, sizes.length];
    let lse = buffers.arena("lse", &lse, DType::F32, Category::Temporary);
    let [forward_workspace, backward_workspace] = [
        ("forward/workspace", workspace::flash_forward()),
        (
            "backward/workspace",
            workspace::flash_backward(&sizes.flash()),
        ),
    ]
    .map(|(name, words)| on_card.then(|| buffers.scratch(name, &[words])));
    // Out's own rounding would be in every gradient.
    let rounded_off = (dtype != DType::F32)
        .then(|| buffers.arena("rounded_off", &heads, dtype, Category::Temporary));
    let [dq, dk, dv] = buffers.gradients(&sizes, dtype);

    let with = |ids: &[BufferId], more: [Option<BufferId>; 2]| -> Vec<BufferId> {
        let more = more.into_iter().flatten();
        ids.iter().copied().chain(more).collect()
    };
    let of_forward = with(&[out, lse], [forward_workspace, rounded_off]);
    let saved = with(&[d_out, q, k, v, out, lse], [rounded_off, None]);
    let of_backward = with(&[dq, dk, dv], [backward_workspace, None]);
    let ops = [Op::FlashHeads(sizes), Op::FlashHeadsBackward(sizes)];
    let operands = [(&[q, k, v][..], &of_forward[..]), (&saved, &of_backward)];
    buffers.plan(ops, operands, &[out, dq, dk, dv])
}

fn naive_on_cpu(sizes: HeadAttentionSizes, dtype: DType, threads: usize) -> Plan {
    let rounds = dtype != DType::F32;
    let mut buffers = Buffers::default();
    let [q, k, v, d_out] = buffers.arguments(&sizes, dtype);
    let heads = heads(&sizes);
    let out = buffers.arena("out", &heads, dtype, Category::Output);
    let exponentials = buffers.arena(
        "exponentials",
        &[sizes.exponentials_len()],
        of_exponentials(dtype),
        Category::Temporary,
    );
    let share = [sizes.matrices, sizes.length];
    let share = buffers.arena("share", &share, DType::F32, Category::Temporary);
    let rounded_off =
        rounds.then(|| buffers.arena("rounded_off", &heads, dtype, Category::Temporary));
    let forward_scratch = [threads, sizes.forward_scratch_len()];
    let forward_scratch = buffers.scratch("forward/scratch", &forward_scratch);
    let partial = [sizes.partial_sums_len(rounds)];
    let partial = buffers.scratch("backward/partial sums", &partial);
    let backward_scratch = [threads, sizes.backward_scratch_len(rounds)];
    let backward_scratch = buffers.scratch("backward/scratch", &backward_scratch);
    let [dq, dk, dv] = buffers.gradients(&sizes, dtype);

    let of_forward = [out, exponentials, share, forward_scratch];
    let of_forward: Vec<BufferId> = of_forward.into_iter().chain(rounded_off).collect();
    let saved = [d_out, q, k, v, exponentials, share, out];
    let saved: Vec<BufferId> = saved.into_iter().chain(rounded_off).collect();
    let of_backward = [dq, dk, dv, partial, backward_scratch];
    buffers.plan(
        naive(sizes),
        [(&[q, k, v], &of_forward), (&saved, &of_backward)],
        &[out, dq, dk, dv],
    )
}

fn naive_on_card(sizes: HeadAttentionSizes, dtype: DType) -> Plan {
    let HeadAttentionSizes {
        matrices, length, ..
    } = sizes;
    let at_once = workspace::naive_heads_at_once(matrices, length * length, dtype);

    let mut buffers = Buffers::default();
    let [q, k, v, d_out] = buffers.arguments(&sizes, dtype);
    let out = buffers.arena("out", &heads(&sizes), dtype, Category::Output);
    let p = [matrices, length, length];
    let p = buffers.arena("probabilities", &p, dtype, Category::Temporary);
    let [dq, dk, dv] = buffers.gradients(&sizes, dtype);
    // f32's scores are in the probabilities' place, and their gradients in that of the probabilities' gradients.
    let in_half = dtype != DType::F32;
    let some = [at_once, length, length];
    let scores = in_half.then(|| buffers.scratch("scores", &some));
    let d_probabilities = buffers.scratch("dprobabilities", &some);
    let d_scores = in_half.then(|| buffers.arena("dscores", &some, dtype, Category::Scratch));
    let of_forward: Vec<BufferId> = [out, p].into_iter().chain(scores).collect();
    let of_backward = [dq, dk, dv, d_probabilities].into_iter().chain(d_scores);
    let of_backward: Vec<BufferId> = of_backward.collect();
    let operands: [(&[BufferId], &[BufferId]); 2] = [
        (&[q, k, v], &of_forward),
        (&[d_out, q, k, v, p], &of_backward),
    ];
    buffers.plan(naive(sizes), operands, &[out, dq, dk, dv])
}

/// Its two calls.
fn naive(sizes: HeadAttentionSizes) -> [Op; 2] {
    [Op::HeadAttention(sizes), Op::HeadAttentionBackward(sizes)]
}

/// (B H, T, Dh).
fn heads(sizes: &HeadAttentionSizes) -> [usize; 3] {
    [sizes.matrices, sizes.length, sizes.head_dim]
}

/// Those of such a plan.
impl Buffers {
    /// What a call works in, in words.
    fn scratch(&mut self, name: &str, shape: &[usize]) -> BufferId {
        self.arena(name, shape, DType::F32, Category::Scratch)
    }

    /// q, k, v and d_out, as they are lent.
    fn arguments(&mut self, sizes: &HeadAttentionSizes, dtype: DType) -> [BufferId; 4] {
        let names = ["q", "k", "v", "d_out"];
        [0, 1, 2, 3].map(|i| {
            let home = Home::Argument(i);
            self.add(names[i], &heads(sizes), dtype, Category::Input, home)
        })
    }

    fn gradients(&mut self, sizes: &HeadAttentionSizes, dtype: DType) -> [BufferId; 3] {
        ["dq", "dk", "dv"].map(|name| self.arena(name, &heads(sizes), dtype, Category::Gradient))
    }

    /// Forward and backward, with what each reads and writes; `kept` are left for whoever reads them after a run.
    fn plan(
        self,
        [of_forward, of_backward]: [Op; 2],
        [forward, backward]: [(&[BufferId], &[BufferId]); 2],
        kept: &[BufferId],
    ) -> Plan {
        let whole = |id: &BufferId| Operand::whole(&self, *id);
        let call = |op, phase, (reads, writes): (&[BufferId], &[BufferId])| Call {
            op,
            path: "attention".into(),
            phase,
            reads: reads.iter().map(whole).collect(),
            writes: writes.iter().map(whole).collect(),
        };
        let calls = vec![
            call(of_forward, Phase::Forward, forward),
            call(of_backward, Phase::Backward, backward),
        ];
        let runs = Runs {
            lasting: 0..0,
            repeated: 0..1,
            micro_batches: 1,
        };
        Plan::new(calls, self.into_vec(), Vec::new(), runs, kept)
    }
}
