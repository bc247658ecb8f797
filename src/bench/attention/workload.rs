//! The workloads of attention benchmarks: attention alone, and its layer.

use super::{Alive, Pass};
use crate::attention::{Algorithm, AttentionConfig, Mask, flash};
use crate::bench::Execution;
use crate::compile::{self, Batch, StepConfig};
use crate::memory::{
    AttentionWorkload, Kernels, MemoryBreakdown, SelfAttentionWorkload, attention_breakdown,
    planned_attention_breakdown, planned_self_attention_breakdown, self_attention_breakdown,
};
use crate::nn::{CausalSelfAttention, Layer, seeded};
use crate::ops::Dropout;
use crate::report::Fields;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Init;

/// Inputs and weights: normal with standard deviation 1.
const INIT: Init = Init::Randn {
    mean: 0.0,
    stdev: 1.0,
};

/// A forward and its backward that an [`AttentionRun`](super::AttentionRun) measures.
pub trait Measurable: Copy {
    /// The benchmark's name in errors.
    const NAME: &'static str;

    /// Returns the algorithm of attention.
    fn algorithm(&self) -> Algorithm;

    /// Batch, heads, length and width, each with the name of its field.
    fn sizes(&self) -> [(&'static str, usize); 4];

    /// Returns the workload with this T, or for a layer with heads of this width.
    fn of_size(&self, size: usize) -> Self;

    /// Returns an error for a configuration that cannot run.
    fn check(&self, execution: Execution, device: &Device) -> Result<()>;

    /// The reason why such heads or dtypes are not supported, if they are not.
    fn unsupported(&self, execution: Execution, device: &Device) -> Option<String>;

    /// The memory that it needs.
    fn breakdown(&self, execution: Execution, device: &Device) -> Result<MemoryBreakdown>;

    /// FLOPs of forward and of backward.
    fn flops(&self) -> [f64; 2];

    /// Whether matmuls are in half precision.
    fn is_in_half(&self) -> bool;

    /// Draws inputs and weights, and plans the step of a planned execution.
    fn prepare(&self, seed: u64, execution: Execution, device: &Device) -> Result<Pass>;

    /// Fields of each row in addition to the sizes.
    fn labels(&self) -> Fields;

    /// Fields of the memory that was measured, in addition to peaks.
    fn memory(_: Alive) -> Fields {
        Fields::new()
    }

    /// [`AttentionWorkload::composed_bytes`], of attention alone.
    fn composed_bytes(&self) -> Option<u64> {
        None
    }
}

impl Measurable for AttentionWorkload {
    const NAME: &'static str = "attention benchmark";

    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    fn sizes(&self) -> [(&'static str, usize); 4] {
        [
            ("batch_size", self.batch_size),
            ("heads", self.heads),
            ("sequence_length", self.sequence_length),
            ("head_dim", self.head_dim),
        ]
    }

    fn of_size(&self, sequence_length: usize) -> Self {
        Self {
            sequence_length,
            ..*self
        }
    }

    fn check(&self, execution: Execution, device: &Device) -> Result<()> {
        let (expected, got) = match execution {
            Execution::Eager => return Ok(()),
            _ if !matches!(self.dtype, DType::F32 | DType::BF16 | DType::F16) => {
                ("the dtype is not f32, bf16 or f16", self.dtype.as_str())
            }
            _ if device.is_metal() => (
                "the device is neither the CPU nor a CUDA GPU",
                "another device",
            ),
            _ => return Ok(()),
        };
        let got = format!("planned, {got}");
        Err(Error::config(Self::NAME, "execution", got).must_be(
            format!("eager, where {expected}"),
            "run it eagerly, or in f32, bf16 or f16 on the CPU or a CUDA GPU",
        ))
    }

    fn unsupported(&self, execution: Execution, device: &Device) -> Option<String> {
        unsupported(self, execution, device)
    }

    fn breakdown(&self, execution: Execution, device: &Device) -> Result<MemoryBreakdown> {
        match execution {
            Execution::Eager => attention_breakdown(self, Kernels::of(device)),
            Execution::Planned => planned_attention_breakdown(self, Kernels::of(device)),
        }
    }

    fn flops(&self) -> [f64; 2] {
        let matrices = self.batch_size as f64 * self.heads as f64;
        let documents = self.document_lengths().into_iter();
        let pairs = documents.map(|(length, count)| count as f64 * pairs(self.mask, length));
        let forward = 4.0 * matrices * self.head_dim as f64 * pairs.sum::<f64>();
        [forward, 2.0 * forward]
    }

    fn is_in_half(&self) -> bool {
        matches!(self.dtype, DType::F16 | DType::BF16)
    }

    fn prepare(&self, seed: u64, execution: Execution, device: &Device) -> Result<Pass> {
        let config = config_on(self, device)?;
        let builder = seeded(seed, self.dtype, device);
        let shape = (
            self.batch_size,
            self.heads,
            self.sequence_length,
            self.head_dim,
        );
        let draw = |name| Var::from_tensor(&builder.get_with_hints(shape, name, INIT)?);
        let (q, k, v) = (draw("q")?, draw("k")?, draw("v")?);
        let parameters = [("q", &q), ("k", &k), ("v", &v)];
        let parameters = parameters.map(|(name, x)| (name.to_string(), x.clone()));
        let algorithm = self.algorithm;
        let attend = move || algorithm.attend(&q, &k, &v, &config);
        if execution == Execution::Eager {
            return Ok(Pass::Eager(Box::new(attend)));
        }
        let d_out = Tensor::ones(shape, self.dtype, device)?;
        let (parameters, step_config) = (parameters.into(), StepConfig::default());
        let step =
            compile::Step::without_optimizer(device, parameters, &step_config, move |_| attend())?;
        Pass::planned(step, Batch::new([]), d_out)
    }

    fn labels(&self) -> Fields {
        let mut row = Fields::new();
        row.insert("mask", mask_name(self.mask));
        row.insert("documents", (self.documents > 1).then_some(self.documents));
        row.insert("dropout", (self.dropout != 0.0).then_some(self.dropout));
        row.insert("dtype", self.dtype.as_str());
        row.insert("composed_bytes", AttentionWorkload::composed_bytes(self));
        row
    }

    fn composed_bytes(&self) -> Option<u64> {
        Some(AttentionWorkload::composed_bytes(self))
    }
}

impl Measurable for SelfAttentionWorkload {
    const NAME: &'static str = "self-attention benchmark";

    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    fn sizes(&self) -> [(&'static str, usize); 4] {
        [
            ("batch_size", self.batch_size),
            ("heads", self.heads),
            ("sequence_length", self.sequence_length),
            ("d_model", self.d_model),
        ]
    }

    fn of_size(&self, head_dim: usize) -> Self {
        Self {
            d_model: head_dim.saturating_mul(self.heads),
            ..*self
        }
    }

    fn check(&self, _: Execution, _: &Device) -> Result<()> {
        match self.d_model.is_multiple_of(self.heads) {
            true => Ok(()),
            false => Err(Error::config(Self::NAME, "d_model", self.d_model).must_be(
                format!("divisible by the {} heads", self.heads),
                "each head gets d_model / heads elements",
            )),
        }
    }

    fn unsupported(&self, execution: Execution, device: &Device) -> Option<String> {
        let is_planned = execution == Execution::Planned;
        if is_planned && (self.dtype != DType::F32 || device.is_metal()) {
            let reason = "a layer is planned with weights in f32, on the CPU or a CUDA GPU";
            return Some(reason.into());
        }
        unsupported(&self.attention(), execution, device)
    }

    fn breakdown(&self, execution: Execution, device: &Device) -> Result<MemoryBreakdown> {
        match execution {
            Execution::Eager => self_attention_breakdown(self),
            Execution::Planned => planned_self_attention_breakdown(self, device),
        }
    }

    fn flops(&self) -> [f64; 2] {
        let [b, t, d] = [self.batch_size, self.sequence_length, self.d_model].map(|n| n as f64);
        let attention = 4.0 * b * d * pairs(self.attention().mask, self.sequence_length);
        let projections = b * t * d * d;
        [
            8.0 * projections + attention,
            10.0 * projections + 2.0 * attention,
        ]
    }

    fn is_in_half(&self) -> bool {
        matches!(self.precision.dtype(), DType::F16 | DType::BF16)
    }

    fn prepare(&self, seed: u64, execution: Execution, device: &Device) -> Result<Pass> {
        let builder = seeded(seed, self.dtype, device);
        let shape = (self.batch_size, self.sequence_length, self.d_model);
        let x = builder.get_with_hints(shape, "x", INIT)?.detach();
        let layer = CausalSelfAttention::new(self.d_model, self.heads, None, builder)?
            .with_attention(self.algorithm);
        let precision = self.precision;
        if execution == Execution::Eager {
            let forward = move || precision.run(|| layer.forward(&x));
            return Ok(Pass::Eager(Box::new(forward)));
        }
        let d_out = x.ones_like()?.to_dtype(self.compute_dtype())?;
        let config = StepConfig {
            precision,
            ..Default::default()
        };
        let parameters = layer.parameters();
        let step = compile::Step::without_optimizer(device, parameters, &config, move |inputs| {
            layer.forward(&inputs.get("x")?)
        })?;
        Pass::planned(step, [("x", &x)].into(), d_out)
    }

    fn labels(&self) -> Fields {
        let mut row = Fields::new();
        row.insert("mask", "causal");
        row.insert("dtype", self.dtype.as_str());
        let region = self.precision.policy().map(|_| self.precision.name());
        row.insert("autocast", region);
        row
    }

    fn memory(alive: Alive) -> Fields {
        let added = |after: u64, before: u64| after as i64 - before as i64;
        let (before, after) = (alive.before_backward, alive.after_backward);
        let mut fields = Fields::new();
        fields.insert("model_bytes", alive.resident);
        fields.insert("model_forward_bytes", before);
        fields.insert("model_forward_backward_bytes", after);
        fields.insert("forward_bytes", added(before, alive.resident));
        fields.insert("backward_bytes", added(after, before));
        fields
    }
}

/// The workload's configuration, with its tensors on `device`.
fn config_on(workload: &AttentionWorkload, device: &Device) -> Result<AttentionConfig> {
    let config = workload.config()?;
    let first_keys = config.first_keys.as_ref();
    let first_keys = first_keys.map(|first_keys| first_keys.to_device(device));
    let dropout = config.dropout.as_ref().map(|dropout| {
        Ok::<_, Error>(Dropout {
            key: dropout.key.to_device(device)?,
            ..*dropout
        })
    });
    Ok(AttentionConfig {
        first_keys: first_keys.transpose()?,
        dropout: dropout.transpose()?,
        ..config
    })
}

/// How many pairs of query and key a mask leaves.
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

/// Why such heads cannot be attended with, if they cannot.
fn unsupported(w: &AttentionWorkload, execution: Execution, device: &Device) -> Option<String> {
    let (head_dim, most) = (w.head_dim, flash::MAX_HEAD_DIM);
    if w.algorithm == Algorithm::Naive {
        return None;
    }
    if head_dim > most {
        return Some(format!(
            "flash takes heads of at most {most}, not {head_dim}"
        ));
    }
    let multiple = 16 / w.dtype.size_in_bytes();
    let is_refused =
        execution == Execution::Planned && device.is_cuda() && !head_dim.is_multiple_of(multiple);
    is_refused.then(|| {
        format!("flash planned on a GPU takes heads of a multiple of {multiple}, not {head_dim}")
    })
}

pub(super) fn implementation(execution: Execution, algorithm: Algorithm) -> &'static str {
    match (execution, algorithm) {
        (Execution::Eager, algorithm) => algorithm.name(),
        (Execution::Planned, Algorithm::Naive) => execution.name(),
        (Execution::Planned, Algorithm::Flash) => "planned-flash",
    }
}

fn mask_name(mask: Mask) -> String {
    match mask {
        Mask::Full => "full".into(),
        Mask::Causal => "causal".into(),
        Mask::CausalEnd => "causal-end".into(),
        Mask::Window(keys) => format!("window {keys}"),
    }
}
