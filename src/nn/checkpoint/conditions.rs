//! What holds on a thread and changes what ops compute.

use crate::Result;
use crate::grad::with_grad;
use crate::ops::{KernelPolicy, current_kernel_policy, with_kernel_policy};
use crate::precision::{self, Autocast, without_autocast};

/// What held in forward, to hold again in backward.
pub(super) struct Conditions {
    /// `None` casts nothing.
    autocast: Option<Autocast>,
    kernels: KernelPolicy,
}

impl Conditions {
    /// What holds here, where a graph is built.
    pub fn here() -> Self {
        Self {
            autocast: precision::current(),
            kernels: current_kernel_policy(),
        }
    }

    /// Runs `f` as if it were there, with a graph.
    pub fn restored<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let f = || with_grad(true, f);
        with_kernel_policy(self.kernels, || match &self.autocast {
            Some(policy) => precision::autocast(policy.clone(), f),
            None => without_autocast(f),
        })
    }
}
