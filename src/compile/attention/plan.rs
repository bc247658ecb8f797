//! The plan of attention alone, from its trace.

use super::super::lower::Lowered;
use super::super::plan::BufferRange;
use super::super::traced::Target;
use super::super::traced::TracedFunction;
use super::{AttentionPlanConfig, OP};
use crate::attention::{Algorithm, flash_with_lse, naive};
use crate::graph::{self, ValueId};
use crate::ops::{KernelPolicy, with_kernel_policy};
use crate::precision::Autocast;
use crate::probe::in_module;
use crate::{Result, autocast};

/// Forward and, after it, backward; where they leave the gradients of q, k and v, and flash attention the log-sum-exp.
pub(super) struct Planned {
    pub lowered: Lowered,
    pub gradients: Vec<BufferRange>,
    pub lse: Option<BufferRange>,
}

/// # Errors
/// Shapes that do not fit each other, and what cannot be planned.
pub(super) fn of(config: &AttentionPlanConfig, target: Target) -> Result<Planned> {
    config.check()?;
    let weights = graph::weights(config.dtype); // variables: their gradients are asked for
    let (q, k, v) = (
        weights.get(config.q.clone(), "q")?,
        weights.get(config.k.clone(), "k")?,
        weights.get(config.v.clone(), "v")?,
    );
    let attend = || match config.algorithm {
        Algorithm::Naive => Ok(vec![naive(&q, &k, &v, &config.attention)?]),
        Algorithm::Flash => {
            let (out, lse) = flash_with_lse(&q, &k, &v, &config.attention)?;
            Ok(vec![out, lse])
        }
    };
    let forward = || autocast(Autocast::disabled(), || in_module("attention", attend));
    let function = with_kernel_policy(KernelPolicy::Prefer, || {
        TracedFunction::new(OP, target, [].into_iter(), forward)
    })?;
    let differentiated: Vec<ValueId> = function.graph.weights().map(|(id, _)| id).collect();
    let (lowered, [gradients, lse]) = function.with_gradients(&differentiated)?;
    Ok(Planned {
        lowered,
        gradients,
        lse: lse.into_iter().next(),
    })
}
