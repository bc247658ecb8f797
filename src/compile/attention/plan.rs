//! The plan of attention alone: its sizes, buffers and two calls.

use super::super::buffer::{Buffer, BufferId, Category, Home};
use super::super::op::Op;
use super::super::plan::{Call, Operand, Phase, Plan, Runs};
use super::{HeadAttentionSizes, OP};
use crate::attention::AttentionConfig;
use crate::{Error, Result};
use candle_core::{DType, Shape};

/// The sizes of attention on q, k and v of this shape, if it can be planned.
pub(super) fn sizes(shape: &Shape, config: &AttentionConfig) -> Result<HeadAttentionSizes> {
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

/// What exponentials are kept in: digits to spare. In bf16 itself, or f16, rounding them would cost the gradients as much as
/// their own rounding does, and where the terms of a gradient cancel, more.
fn of_exponentials(dtype: DType) -> DType {
    match dtype {
        DType::BF16 => DType::F16,
        _ => DType::F32,
    }
}

/// One call forward, one backward; tensors in `dtype`.
pub(super) fn of(sizes: HeadAttentionSizes, dtype: DType) -> Plan {
    let rounds = dtype != DType::F32;
    let threads = rayon::current_num_threads();
    let heads = vec![sizes.matrices, sizes.length, sizes.head_dim];
    let mut buffers = Vec::new();
    let mut buffer = |name: &str, shape: Vec<usize>, dtype, category, home| {
        buffers.push(Buffer {
            name: name.into(),
            shape,
            dtype,
            category,
            home,
            live: 0..0, // the plan finds out
        });
        BufferId(buffers.len() - 1)
    };
    let names = ["q", "k", "v", "d_out"];
    let arguments = [0, 1, 2, 3].map(|i| {
        let home = Home::Argument(i);
        buffer(names[i], heads.clone(), dtype, Category::Input, home)
    });
    let mut arena = |name, shape, dtype, category| {
        let home = Home::Arena { offset_bytes: 0 };
        buffer(name, shape, dtype, category, home)
    };
    let out = arena("out", heads.clone(), dtype, Category::Output);
    let exponentials = vec![sizes.exponentials_len()];
    let exponentials = arena(
        "exponentials",
        exponentials,
        of_exponentials(dtype),
        Category::Temporary,
    );
    let share = vec![sizes.matrices, sizes.length];
    let share = arena("share", share, DType::F32, Category::Temporary);
    let rounded_off =
        rounds.then(|| arena("rounded_off", heads.clone(), dtype, Category::Temporary));
    let mut scratch = |name, shape| arena(name, shape, DType::F32, Category::Scratch);
    let forward_scratch = vec![threads, sizes.forward_scratch_len()];
    let forward_scratch = scratch("forward/scratch", forward_scratch);
    let partial = vec![sizes.partial_sums_len(rounds)];
    let partial = scratch("backward/partial sums", partial);
    let backward_scratch = vec![threads, sizes.backward_scratch_len(rounds)];
    let backward_scratch = scratch("backward/scratch", backward_scratch);
    let gradients =
        ["dq", "dk", "dv"].map(|name| arena(name, heads.clone(), dtype, Category::Gradient));

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
    let of_forward = [out, exponentials, share, forward_scratch];
    let of_forward: Vec<BufferId> = of_forward.into_iter().chain(rounded_off).collect();
    let forward = call(
        Op::HeadAttention(sizes),
        Phase::Forward,
        &[q, k, v],
        &of_forward,
    );
    let saved = [d_out, q, k, v, exponentials, share, out];
    let saved: Vec<BufferId> = saved.into_iter().chain(rounded_off).collect();
    let backward = call(
        Op::HeadAttentionBackward(sizes),
        Phase::Backward,
        &saved,
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
