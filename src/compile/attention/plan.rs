//! The plan of attention alone: from a trace, once its sizes are known to be possible.

use super::super::lower::{self, Again, Job, Lowered, Tables, Target};
use super::super::plan::Operand;
use super::super::sizes::HeadAttentionSizes;
use super::OP;
use crate::attention::{Algorithm, AttentionConfig, flash::MAX_HEAD_DIM};
use crate::graph::{self, ValueId};
use crate::kernels::workspace;
use crate::ops::{KernelPolicy, with_kernel_policy};
use crate::precision::Autocast;
use crate::probe::in_module;
use crate::{Error, Result, autocast};
use candle_core::{DType, Shape};
use std::collections::HashMap;

/// An error unless attention on q, k and v of this shape can be planned.
pub(super) fn check_sizes(
    algorithm: Algorithm,
    shape: &Shape,
    config: &AttentionConfig,
) -> Result<()> {
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
        wanted_bytes += 4.0 * workspace::flash_backward(&sizes.flash()) as f64; // a GPU's
    }
    if wanted_bytes >= most {
        return Err(Error::OutOfMemory {
            what: "the arena of a planned attention".into(),
            wanted_bytes: wanted_bytes as u64, // saturates
            available_bytes: crate::device::available_bytes().unwrap_or(u64::MAX),
        });
    }
    Ok(())
}

/// Forward and, after it, backward, from a trace of `algorithm` on q, k and v of this shape; where they leave the output and the
/// gradients of q, k and v.
pub(super) fn of(
    algorithm: Algorithm,
    shape: &Shape,
    dtype: DType,
    config: &AttentionConfig,
    target: Target,
) -> Result<(Lowered, Vec<Operand>)> {
    let weights = graph::weights(dtype); // variables: their gradients are asked for
    let hollow = |name| weights.get(shape.clone(), name);
    let (q, k, v) = (hollow("q")?, hollow("k")?, hollow("v")?);
    let attend = || algorithm.attend(&q, &k, &v, config);
    let forward = || autocast(Autocast::disabled(), || in_module("attention", attend));
    let graph = with_kernel_policy(KernelPolicy::Prefer, || {
        graph::trace(target.of_trace(), forward)
    })?;
    let differentiated: Vec<ValueId> = graph.weights().map(|(id, _)| id).collect();
    lower::with_gradients(&Job {
        op: OP,
        graph: &graph,
        target,
        parameters: &[],
        numbers: &HashMap::new(),
        input: &|_| None,
        table: &NoTables,
        differentiated: &differentiated,
        clips: false,
        scales: false,
        accumulation: 1,
        optimizer_in_backward: false,
        again: Again::default(),
    })
}

/// Attention alone rotates nothing.
struct NoTables;

impl Tables for NoTables {
    fn table(&self, _: usize, operand: &graph::Operand, _: DType) -> Result<Vec<f32>> {
        Err(Error::Order {
            op: OP,
            problem: format!("attention alone reads a table: {operand:?}"),
            hint: "a bug of this crate".into(),
        })
    }
}
