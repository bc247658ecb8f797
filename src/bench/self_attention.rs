//! A self-attention layer, timed by phase, with its memory step by step.

use super::attention::{implementation, pairs, unsupported};
use super::passes::{Alive, Pass, Passes, Sampling, at_least_one, breakdown};
use super::{Execution, Limit, Step};
use crate::compile::{self, StepConfig};
use crate::memory::{
    MemoryBreakdown, SelfAttentionWorkload, planned_self_attention_breakdown,
    self_attention_breakdown, smallest_beyond,
};
use crate::nn::{CausalSelfAttention, Layer, seeded};
use crate::report::Fields;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::Init;

/// One measurement of a [`CausalSelfAttention`] with its four D x D projections, on random x (B, T, D).
///
/// ```
/// use tallow::bench::{Sampling, SelfAttentionRun};
/// use tallow::memory::SelfAttentionWorkload;
///
/// let run = SelfAttentionRun {
///     workload: SelfAttentionWorkload { sequence_length: 16, d_model: 32, ..Default::default() },
///     sampling: Sampling { warmup_steps: 1, iterations: 3, ..Default::default() },
///     ..Default::default()
/// };
/// let rows = run.run(&tallow::device("cpu")?, |_, _| ())?;
/// assert_eq!(rows[0].get("phase"), Some(&"forward".into()));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SelfAttentionRun {
    /// What is computed.
    pub workload: SelfAttentionWorkload,
    /// How it is measured.
    pub sampling: Sampling,
    /// Eager, or planned for its shape by a [`compile::Step`]: on the CPU or a CUDA GPU, with weights in f32.
    pub execution: Execution,
}

impl SelfAttentionRun {
    /// Measures, and returns rows as [`AttentionRun::run`](super::AttentionRun::run) does, with these bytes:
    ///
    /// - `model_bytes`: the weights and x; `model_forward_bytes`: with the graph that forward leaves behind;
    ///   `model_forward_backward_bytes`: after backward, the graph gone and the gradients there;
    /// - `forward_bytes` and `backward_bytes`: what each adds. The second is negative where the graph that goes is
    ///   larger than the gradients that come;
    /// - `peak_bytes`: the most alive at once in the phase.
    ///
    /// What is planned has its arena from the beginning to the end: all of it counts in `peak_bytes`, and in the others
    /// what of it is read later. Nothing is updated, and there is no optimizer. Backward begins with a gradient of
    /// ones, which is one of its inputs.
    ///
    /// FLOPs: 8 B T D^2 for the projections and 4 B D for each pair of query and key that the causal mask leaves; in
    /// backward 10 B T D^2, since x is an input and gets no gradient, and 8 B D.
    ///
    /// # Errors
    /// A size of 0, a D that the heads do not divide; the ops' errors.
    pub fn run(&self, device: &Device, on_step: impl FnMut(Step, f64)) -> Result<Vec<Fields>> {
        let w = &self.workload;
        const NAME: &str = "self-attention benchmark";
        at_least_one(
            NAME,
            &[
                ("batch_size", w.batch_size),
                ("heads", w.heads),
                ("sequence_length", w.sequence_length),
                ("d_model", w.d_model),
                ("iterations", self.sampling.iterations),
            ],
        )?;
        if !w.d_model.is_multiple_of(w.heads) {
            return Err(Error::config(NAME, "d_model", w.d_model).must_be(
                format!("divisible by the {} heads", w.heads),
                "each head gets d_model / heads elements",
            ));
        }
        let [b, t, d] = [w.batch_size, w.sequence_length, w.d_model].map(|size| size as f64);
        let attention_flops = 4.0 * b * d * pairs(w.attention().mask, w.sequence_length);
        let passes = Passes {
            sampling: &self.sampling,
            labels: self.labels(),
            tokens: b * t,
            forward_flops: 8.0 * b * t * d * d + attention_flops,
            backward_flops: 10.0 * b * t * d * d + 2.0 * attention_flops,
            breakdown: match self.unsupported(device) {
                None => Ok(self.breakdown(device)?),
                Some(reason) => Err(reason),
            },
            in_half: matches!(w.precision.dtype(), DType::F16 | DType::BF16),
        };
        let prepare = || self.prepared(device);
        passes.run(device, prepare, on_step, |alive| self.memory(alive))
    }

    fn prepared(&self, device: &Device) -> Result<Pass> {
        let w = self.workload;
        let builder = seeded(self.sampling.seed, w.dtype, device);
        let x = self.input(&builder)?;
        let layer = CausalSelfAttention::new(w.d_model, w.heads, None, builder)?
            .with_attention(w.algorithm);
        if self.execution == Execution::Eager {
            let forward = move || w.precision.run(|| layer.forward(&x));
            return Ok(Pass::Eager(Box::new(forward)));
        }
        let d_out = x.ones_like()?.to_dtype(w.compute_dtype())?;
        let config = StepConfig {
            precision: w.precision,
            ..Default::default()
        };
        let parameters = layer.parameters();
        let step = compile::Step::without_optimizer(device, parameters, &config, move |inputs| {
            layer.forward(&inputs.get("x")?)
        })?;
        Pass::planned(step, [("x", &x)].into(), d_out)
    }

    fn breakdown(&self, device: &Device) -> Result<MemoryBreakdown> {
        let w = &self.workload;
        let eager = || self_attention_breakdown(w);
        breakdown(self.execution, eager, || {
            planned_self_attention_breakdown(w, device)
        })
    }

    fn unsupported(&self, device: &Device) -> Option<String> {
        let w = &self.workload;
        let is_planned = self.execution == Execution::Planned;
        if is_planned && (w.dtype != DType::F32 || device.is_metal()) {
            let reason = "a layer is planned with weights in f32, on the CPU or a CUDA GPU";
            return Some(reason.into());
        }
        unsupported(&w.attention(), self.execution, device)
    }

    /// The first D, doubled from the number of heads, that does not fit in the memory available. `None` if that is not
    /// known, or the algorithm does not support heads of that width.
    pub fn limit(&self, device: &Device) -> Option<Limit> {
        let available_bytes = self.sampling.available_bytes?;
        let heads = self.workload.heads;
        let at = |head_dim: usize| SelfAttentionWorkload {
            d_model: head_dim.saturating_mul(heads),
            ..self.workload
        };
        let (head_dim, breakdown) = smallest_beyond(available_bytes, |head_dim| {
            let run = Self {
                workload: at(head_dim),
                ..self.clone()
            };
            run.unsupported(device)
                .is_none()
                .then(|| run.breakdown(device).ok())?
        })?;
        Some(Limit {
            implementation: implementation(self.execution, self.workload.algorithm),
            context_length: self.workload.sequence_length,
            width: at(head_dim).d_model,
            breakdown,
            available_bytes,
            composed_bytes: None,
        })
    }

    /// x, normal with standard deviation 1.
    fn input(&self, builder: &candle_nn::VarBuilder<'_>) -> Result<Tensor> {
        let w = &self.workload;
        let shape = (w.batch_size, w.sequence_length, w.d_model);
        let init = Init::Randn {
            mean: 0.0,
            stdev: 1.0,
        };
        Ok(builder.get_with_hints(shape, "x", init)?.detach())
    }

    fn memory(&self, alive: &Alive) -> Fields {
        let added = |after: u64, before: u64| after as i64 - before as i64;
        let mut fields = Fields::new();
        fields.insert("model_bytes", alive.resident);
        fields.insert("model_forward_bytes", alive.before_backward);
        fields.insert("model_forward_backward_bytes", alive.after_backward);
        let (before, after) = (alive.before_backward, alive.after_backward);
        fields.insert("forward_bytes", added(before, alive.resident));
        fields.insert("backward_bytes", added(after, before));
        fields
    }

    fn labels(&self) -> Fields {
        let w = &self.workload;
        let mut row = Fields::new();
        let implementation = implementation(self.execution, w.algorithm);
        row.insert("implementation", implementation);
        row.insert("batch_size", w.batch_size);
        row.insert("heads", w.heads);
        row.insert("context_length", w.sequence_length);
        row.insert("d_model", w.d_model);
        row.insert("mask", "causal");
        row.insert("dtype", w.dtype.as_str());
        let region = w.precision.policy().map(|_| w.precision.name());
        row.insert("autocast", region);
        row
    }
}
