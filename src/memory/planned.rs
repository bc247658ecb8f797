//! The memory of planned attention: the plan's.

use super::{Account, AttentionWorkload, Holds};
use crate::Result;
use crate::attention::AttentionConfig;
use crate::compile::{Attention, Category};

/// What [`compile::Attention`](crate::compile::Attention) holds, with its inputs: what its plan says, exactly.
///
/// A plan has its whole arena before its first run, so all of it counts as there before backward.
///
/// # Errors
/// As [`Attention::plan_for`].
pub fn planned_attention_account(workload: &AttentionWorkload) -> Result<Account> {
    let w = workload;
    let shape = (w.batch_size, w.heads, w.sequence_length, w.head_dim);
    let config = AttentionConfig {
        mask: w.mask,
        scale: None,
    };
    let plan = Attention::plan_for(shape, w.dtype, &config)?;
    let inputs = plan.category_bytes(Category::Input);
    let kept = plan.category_bytes(Category::Activation);
    let rest = plan.peak_bytes() - kept;
    let sizes = format!(
        "B {}, H {}, T {}, Dh {}, {} bytes an element",
        w.batch_size,
        w.heads,
        w.sequence_length,
        w.head_dim,
        w.dtype.size_in_bytes()
    );
    let width = w.dtype.size_in_bytes();
    let elements = |bytes: u64| bytes as f64 / width as f64;
    let mut buffers = plan.buffers().iter();
    let exponentials = buffers.find(|buffer| buffer.category == Category::Activation);
    let kept_width = exponentials.map_or(width, |buffer| buffer.dtype.size_in_bytes());
    Ok(Account::new(sizes)
        .with(
            Holds::Inputs,
            "q, k, v and out's gradient",
            "4BHTDh",
            elements(inputs),
            width,
        )
        .with(
            Holds::Activations,
            "exponentials, as the mask leaves them",
            "BHT^2",
            kept as f64 / kept_width as f64,
            kept_width,
        )
        .with(
            Holds::Activations,
            "the rest of the arena: out, dq, dk, dv, scratch",
            "4BHTDh + ..",
            elements(rest),
            width,
        ))
}
