//! Attention, planned.
//!
//! What lives here: [`Attention`], its plan (`plan`), and what it asks of the tensors that it is given (`arguments`). What does
//! not: attention in a model, which is planned with what stands around it.

mod arguments;
mod plan;

pub use plan::HeadAttentionSizes;

use super::cpu::{Controls, Executor, Lent};
use super::plan::{Phase, Plan};
use crate::attention::AttentionConfig;
use crate::{Error, Result};
use arguments::{check, with_arguments};
use candle_core::{Device, Shape, Tensor};

const OP: &str = "compile::Attention";

/// `softmax(scale q k^T) v` and its gradients for one shape, planned once: q, k, v and the output (..., T, Dh), f32 on the CPU.
///
/// The mathematics of [`attention::naive`](crate::attention::naive()), the probabilities kept for backward (as exponentials
/// and what each row of them is multiplied by); but a block of queries goes through scores, softmax and weighted sum while
/// it is in cache, what a mask hides is never there, and no other matrix of (T, T) ever is. Output, exponentials and
/// gradients lie in one arena: a run allocates nothing.
///
/// It stands outside of candle's graph: [`backward`](Self::backward) is called with the output's gradient, by whoever has
/// it. [`attention::flash`](crate::attention::flash()) keeps no probabilities at all.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use tallow::attention::{AttentionConfig, Mask};
/// use tallow::compile::Attention;
///
/// let q = Tensor::randn(0f32, 1.0, (2, 3, 5, 8), &Device::Cpu)?; // (B, H, T, Dh)
/// let config = AttentionConfig { mask: Mask::Causal, ..Default::default() };
/// let mut attention = Attention::new((2, 3, 5, 8), &config)?;
/// let out = attention.forward(&q, &q, &q)?; // as it lies in the arena, row by row
/// assert_eq!(out.len(), 2 * 3 * 5 * 8);
/// let [dq, dk, dv] = attention.backward(&q.ones_like()?)?;
/// assert_eq!([dq.len(), dk.len(), dv.len()], [240; 3]);
/// assert_eq!(attention.output()?.dims(), [2, 3, 5, 8]); // a copy
/// println!("{}", attention.plan().explain());
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug)]
pub struct Attention {
    plan: Plan,
    executor: Executor,
    /// (..., T, Dh).
    shape: Shape,
    /// q, k and v of the last forward, which backward reads again.
    inputs: Option<[Tensor; 3]>,
    /// Whether the last forward's gradients are there.
    has_gradients: bool,
}

impl Attention {
    /// Plans attention on q, k, v of this shape, (..., T, Dh), and allocates its arena.
    ///
    /// # Errors
    /// [`Error::Shape`] for fewer than two dimensions or a size of 0; [`Error::OutOfMemory`] for an arena that does not fit
    /// the machine's memory.
    pub fn new(shape: impl Into<Shape>, config: &AttentionConfig) -> Result<Self> {
        let shape = shape.into();
        let plan = Self::plan_for(shape.clone(), config)?;
        Ok(Self {
            executor: Executor::new(&plan)?,
            plan,
            shape,
            inputs: None,
            has_gradients: false,
        })
    }

    /// The plan alone: what would be done, and what memory it would take.
    ///
    /// ```
    /// use tallow::attention::{AttentionConfig, Mask};
    /// use tallow::compile::Attention;
    ///
    /// let bytes = |mask| {
    ///     let config = AttentionConfig { mask, ..Default::default() };
    ///     Ok::<u64, tallow::Error>(Attention::plan_for((8, 4096, 64), &config)?.peak_bytes())
    /// };
    /// assert!(bytes(Mask::Causal)? < bytes(Mask::Full)? * 6 / 10);
    /// # Ok::<(), tallow::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), whatever the machine has.
    pub fn plan_for(shape: impl Into<Shape>, config: &AttentionConfig) -> Result<Plan> {
        Ok(plan::of(HeadAttentionSizes::new(&shape.into(), config)?))
    }

    /// The output of q, k and v, (..., T, Dh) each: as it lies in the arena, until the next run.
    ///
    /// q, k and v are read where they are, and kept (not copied) for [`backward`](Self::backward) until the next forward.
    ///
    /// # Errors
    /// Another shape than planned; tensors that are not contiguous, in f32, on the CPU.
    pub fn forward(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<&[f32]> {
        for (what, tensor) in [("q", q), ("k", k), ("v", v)] {
            check(what, tensor, &self.shape)?;
        }
        let (plan, executor) = (&self.plan, &mut self.executor);
        (self.inputs, self.has_gradients) = (None, false);
        with_arguments(&[q, k, v], |arguments| {
            let lent = Lent {
                arguments,
                ..Default::default()
            };
            executor.run_micro_batches(plan, &lent, &Controls::default())
        })?;
        self.inputs = Some([q, k, v].map(Tensor::clone));
        Ok(self.written(Phase::Forward, 0))
    }

    /// The gradients of the last forward's q, k and v, from its output's, (..., T, Dh): as they lie in the arena, until
    /// the next run.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`Error::Order`] before it.
    pub fn backward(&mut self, d_out: &Tensor) -> Result<[&[f32]; 3]> {
        check("d_out", d_out, &self.shape)?;
        let Some([q, k, v]) = &self.inputs else {
            return Err(before("backward", "forward"));
        };
        let (plan, executor) = (&self.plan, &mut self.executor);
        with_arguments(&[q, k, v, d_out], |arguments| {
            let lent = Lent {
                arguments,
                ..Default::default()
            };
            executor.run_after_micro_batches(plan, &lent, &Controls::default())?;
            Ok(())
        })?;
        self.has_gradients = true;
        Ok([0, 1, 2].map(|place| self.written(Phase::Backward, place)))
    }

    /// A copy of the last forward's output: (..., T, Dh).
    ///
    /// # Errors
    /// [`Error::Order`] before the first.
    pub fn output(&self) -> Result<Tensor> {
        match self.inputs {
            None => Err(before("output", "forward")),
            Some(_) => self.copy(Phase::Forward, 0),
        }
    }

    /// Copies of the last backward's gradients of q, k and v: (..., T, Dh) each.
    ///
    /// # Errors
    /// [`Error::Order`] if there was none since the last forward.
    pub fn gradients(&self) -> Result<[Tensor; 3]> {
        if !self.has_gradients {
            return Err(before("gradients", "backward"));
        }
        let copy = |place| self.copy(Phase::Backward, place);
        Ok([copy(0)?, copy(1)?, copy(2)?])
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    fn copy(&self, phase: Phase, place: usize) -> Result<Tensor> {
        let values = self.written(phase, place);
        Ok(Tensor::from_slice(values, &self.shape, &Device::Cpu)?)
    }

    /// What the call of this phase has written, at that place in the op's order.
    fn written(&self, phase: Phase, place: usize) -> &[f32] {
        let mut calls = self.plan.calls().iter();
        match calls.find(|call| call.phase == phase) {
            Some(call) => self.executor.values(&self.plan, &call.writes[place]),
            None => &[], // the plan has both
        }
    }
}

fn before(what: &str, needs: &str) -> Error {
    Error::Order {
        op: OP,
        problem: format!("{what} without a {needs} before it"),
        hint: format!("call {needs} first"),
    }
}
