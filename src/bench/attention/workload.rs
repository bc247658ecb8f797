//! The workloads of attention benchmarks: attention alone, and the layer around it.

use super::AttentionResult;
use crate::Result;
use crate::attention::Mask;
use crate::bench::Execution;
use crate::compile::{self, Batch, StepConfig};
use crate::memory::{
    AttentionWorkload, MemoryBreakdown, SelfAttentionWorkload, Target, attention_breakdown,
    planned_attention_breakdown, planned_self_attention_breakdown, self_attention_breakdown,
};
use crate::nn::{self, Layer, seeded};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Init;

/// Inputs and weights: normal with standard deviation 1.
const INIT: Init = Init::Randn {
    mean: 0.0,
    stdev: 1.0,
};

/// A forward and its backward, ready to run again and again.
pub enum Pass {
    /// A forward with candle's graph, and backward through it.
    Eager(Box<dyn Fn() -> Result<Tensor>>),
    /// A planned forward, and its backward from this gradient of the output.
    Planned(Box<compile::Step<'static>>, Batch, Tensor),
}

impl Pass {
    /// Plans a step and runs it once.
    fn planned(mut step: compile::Step<'static>, batch: Batch, d_output: Tensor) -> Result<Self> {
        step.time_phases(true);
        step.forward_backward_from(&batch, &d_output)?;
        Ok(Self::Planned(Box::new(step), batch, d_output))
    }
}

/// The computation of an [`AttentionRun`](super::AttentionRun).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionTask {
    /// Attention on random q, k, v (B, H, T, Dh): `softmax(q k^T / sqrt(Dh)) v`.
    Alone(AttentionWorkload),
    /// A causal [`nn::Attention`], with its four D x D projections, on random x (B, T, D).
    Layer(SelfAttentionWorkload),
}

impl Default for AttentionTask {
    fn default() -> Self {
        Self::Alone(AttentionWorkload::default())
    }
}

impl AttentionTask {
    /// Returns the attention that it computes.
    pub(super) fn attention(&self) -> AttentionWorkload {
        match self {
            Self::Alone(own) => *own,
            Self::Layer(layer) => layer.attention(),
        }
    }

    /// Returns a result with the labels of the task.
    pub(super) fn labels(&self) -> AttentionResult {
        let attention = self.attention();
        let labels = AttentionResult {
            batch_size: attention.batch_size,
            heads: attention.heads,
            context_length: attention.sequence_length,
            mask: attention.mask.to_string(),
            dtype: attention.dtype.as_str(),
            precision: attention.dtype.as_str(),
            ..Default::default()
        };
        match self {
            Self::Alone(own) => AttentionResult {
                head_dim: Some(own.head_dim),
                documents: (own.documents > 1).then_some(own.documents),
                composed_bytes: Some(own.composed_bytes()),
                ..labels
            },
            Self::Layer(layer) => AttentionResult {
                d_model: Some(layer.d_model),
                dtype: layer.dtype.as_str(),
                precision: match layer.dtype {
                    DType::F64 => labels.precision,
                    _ => layer.precision.name(),
                },
                ..labels
            },
        }
    }

    /// Returns the task with this T, or for a layer with heads of this width.
    pub(super) fn of_size(mut self, size: usize) -> Self {
        match &mut self {
            Self::Alone(own) => own.sequence_length = size,
            Self::Layer(layer) => layer.d_model = size.saturating_mul(layer.heads),
        }
        self
    }

    /// Predicts the memory. A size too large to be planned is too large eagerly too.
    pub(super) fn breakdown(
        &self,
        execution: Execution,
        device: &Device,
    ) -> Result<MemoryBreakdown> {
        let kernels = Target::of(device);
        let breakdown = match (self, execution) {
            (Self::Alone(own), Execution::Eager) => attention_breakdown(own, kernels),
            (Self::Alone(own), Execution::Planned) => planned_attention_breakdown(own, kernels),
            (Self::Layer(layer), Execution::Eager) => self_attention_breakdown(layer, kernels),
            (Self::Layer(layer), Execution::Planned) => {
                planned_self_attention_breakdown(layer, device)
            }
        };
        match breakdown {
            Err(error) if error.is_out_of_memory() && execution == Execution::Planned => {
                self.breakdown(Execution::Eager, device)
            }
            breakdown => breakdown,
        }
    }

    /// Returns the FLOPs of forward and of backward.
    pub(super) fn flops(&self) -> [f64; 2] {
        let attention = self.attention();
        let documents = attention.document_lengths().into_iter();
        let pairs = documents.map(|(length, count)| count as f64 * pairs(attention.mask, length));
        let pairs = attention.batch_size as f64 * pairs.sum::<f64>();
        match self {
            Self::Alone(own) => {
                let forward = 4.0 * pairs * own.heads as f64 * own.head_dim as f64;
                [forward, 2.0 * forward]
            }
            Self::Layer(layer) => {
                let d = layer.d_model as f64;
                let projections = layer.batch_size as f64 * layer.sequence_length as f64 * d * d;
                let attention = 4.0 * pairs * d;
                [
                    8.0 * projections + attention,
                    10.0 * projections + 2.0 * attention,
                ]
            }
        }
    }

    /// Draws inputs and weights, and plans the step of a planned execution.
    pub(super) fn prepare(&self, seed: u64, execution: Execution, device: &Device) -> Result<Pass> {
        match self {
            Self::Alone(own) => prepare_alone(own, seed, execution, device),
            Self::Layer(layer) => prepare_layer(layer, seed, execution, device),
        }
    }
}

fn prepare_alone(
    own: &AttentionWorkload,
    seed: u64,
    execution: Execution,
    device: &Device,
) -> Result<Pass> {
    let (mut config, algorithm) = (own.config()?, own.algorithm);
    let first_keys = config.first_keys.map(|keys| keys.to_device(device));
    config.first_keys = first_keys.transpose()?;
    let builder = seeded(seed, own.dtype, device);
    let shape = (own.batch_size, own.heads, own.sequence_length, own.head_dim);
    let draw = |name| Var::from_tensor(&builder.get_with_hints(shape, name, INIT)?);
    let [q, k, v] = [draw("q")?, draw("k")?, draw("v")?];
    let parameters = [("q", &q), ("k", &k), ("v", &v)];
    let parameters = parameters.map(|(name, x)| (name.to_string(), x.clone()));
    let attend = move || algorithm.attend(&q, &k, &v, &config);
    if execution == Execution::Eager {
        return Ok(Pass::Eager(Box::new(attend)));
    }
    let (parameters, config) = (parameters.into(), StepConfig::default());
    let step = compile::Step::without_optimizer(device, parameters, &config, move |_| attend())?;
    let d_output = Tensor::ones(shape, own.dtype, device)?;
    Pass::planned(step, Batch::new([]), d_output)
}

fn prepare_layer(
    own: &SelfAttentionWorkload,
    seed: u64,
    execution: Execution,
    device: &Device,
) -> Result<Pass> {
    let builder = seeded(seed, own.dtype, device);
    let shape = (own.batch_size, own.sequence_length, own.d_model);
    let x = builder.get_with_hints(shape, "x", INIT)?.detach();
    let layer = nn::Attention::new(&own.layer_config(), None, builder)?;
    let layer = layer.with_attention(own.algorithm);
    let precision = own.precision;
    if execution == Execution::Eager {
        let forward = move || precision.run(|| layer.forward(&x));
        return Ok(Pass::Eager(Box::new(forward)));
    }
    let d_output = x.ones_like()?.to_dtype(own.compute_dtype())?;
    let config = StepConfig {
        precision,
        ..Default::default()
    };
    let parameters = layer.parameters();
    let step = compile::Step::without_optimizer(device, parameters, &config, move |inputs| {
        layer.forward(&inputs.get("x")?)
    })?;
    Pass::planned(step, [("x", &x)].into(), d_output)
}

/// Returns how many pairs of query and key a mask leaves.
fn pairs(mask: Mask, length: usize) -> f64 {
    let t = length as f64;
    match mask {
        Mask::Full => t * t,
        Mask::Causal | Mask::CausalEnd => t * (t + 1.0) / 2.0,
        Mask::Window(keys) => {
            let keys = (keys.get() as f64).min(t);
            keys * t - keys * (keys - 1.0) / 2.0
        }
    }
}
