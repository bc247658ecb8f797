//! Attention alone, timed by phase, with its memory.

use super::passes::{Pass, Passes, Sampling, at_least_one, breakdown};
use super::{Execution, Limit, Step};
use crate::attention::{Algorithm, AttentionConfig, Mask, flash};
use crate::compile::{self, Batch, StepConfig};
use crate::memory::{
    AttentionWorkload, Kernels, MemoryBreakdown, attention_breakdown, planned_attention_breakdown,
    smallest_beyond,
};
use crate::nn::seeded;
use crate::ops::Dropout;
use crate::report::Fields;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Init;

/// One measurement of an attention algorithm on random q, k, v (B, H, T, Dh): `softmax(q k^T / sqrt(Dh)) v` and its
/// gradients.
///
/// ```
/// use tallow::bench::{AttentionRun, Sampling};
/// use tallow::memory::AttentionWorkload;
///
/// let run = AttentionRun {
///     workload: AttentionWorkload { batch_size: 2, sequence_length: 32, head_dim: 8, ..Default::default() },
///     sampling: Sampling { warmup_steps: 1, iterations: 3, ..Default::default() },
///     ..Default::default()
/// };
/// let rows = run.run(&tallow::device("cpu")?, |_, _| ())?;
/// assert_eq!(rows.len(), 3); // forward, backward, forward+backward
/// assert_eq!(rows[2].get("n"), Some(&3.into()));
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionRun {
    /// What is computed.
    pub workload: AttentionWorkload,
    /// How it is measured.
    pub sampling: Sampling,
    /// Eager, or planned for its shape by a [`compile::Step`]: in f32, bf16 or f16, on the CPU or a CUDA GPU.
    pub execution: Execution,
}

impl AttentionRun {
    /// Measures, and returns a row each for `forward`, `backward` and `forward+backward`, all three timed in the same
    /// steps. Forward keeps its graph, as before a backward; backward starts from a gradient of ones.
    ///
    /// One row alone says what was not measured: `OOM`, decided from [`attention_breakdown`] before anything is
    /// allocated, with the sum; `unsupported`, for a head dimension that the algorithm does not take;
    /// `over time budget`. `reason` says why, and also why a row has fewer samples than were asked for. `on_step` is
    /// called after every step with the whole step's time in ms.
    ///
    /// FLOPs are 4 B H Dh for each pair of query and key that the mask leaves, and twice that backward, whatever the
    /// algorithm does: flash's second look at the scores is not counted, nor is what naive spends on masked ones.
    ///
    /// Memory is measured where a [`Tracker`](crate::memory::tracker::Tracker) is installed, on a GPU by its pool's
    /// counters: `before_backward_bytes` is what is alive between forward and backward, `peak_bytes` the most in the
    /// phase, q, k and v included in both.
    ///
    /// What is planned has its arena from the beginning to the end: all of it counts in `peak_bytes`, and in
    /// `before_backward_bytes` what of it backward or the caller reads. Out's gradient is one of its inputs, and its
    /// rows call it the implementation `planned`, or `planned-flash`.
    ///
    /// # Errors
    /// A size of 0; what cannot be planned; the ops' errors.
    pub fn run(&self, device: &Device, on_step: impl FnMut(Step, f64)) -> Result<Vec<Fields>> {
        let w = &self.workload;
        at_least_one(
            "attention benchmark",
            &[
                ("batch_size", w.batch_size),
                ("heads", w.heads),
                ("sequence_length", w.sequence_length),
                ("head_dim", w.head_dim),
                ("iterations", self.sampling.iterations),
            ],
        )?;
        self.check_execution(device)?;
        let passes = Passes {
            sampling: &self.sampling,
            labels: self.labels(),
            tokens: w.batch_size as f64 * w.sequence_length as f64,
            forward_flops: self.forward_flops(),
            backward_flops: 2.0 * self.forward_flops(),
            breakdown: match self.unsupported(device) {
                None => Ok(self.breakdown(device)?),
                Some(reason) => Err(reason),
            },
            in_half: matches!(w.dtype, DType::F16 | DType::BF16),
        };
        passes.run(device, || self.prepared(device), on_step, |_| Fields::new())
    }

    /// The workload's configuration, with its tensors on `device`.
    fn attention_config(&self, device: &Device) -> Result<AttentionConfig> {
        let config = self.workload.config()?;
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

    /// The first T, doubled from 1, that does not fit in the memory available on `device`. `None` if that is not known, or
    /// the algorithm does not support heads of this width.
    pub fn limit(&self, device: &Device) -> Option<Limit> {
        let available_bytes = self.sampling.available_bytes?;
        if self.unsupported(device).is_some() {
            return None;
        }
        let at = |sequence_length| AttentionWorkload {
            sequence_length,
            ..self.workload
        };
        let (length, breakdown) = smallest_beyond(available_bytes, |length| {
            let run = Self {
                workload: at(length),
                ..self.clone()
            };
            run.breakdown(device).ok()
        })?;
        Some(Limit {
            implementation: self.implementation(),
            context_length: length,
            width: self.workload.head_dim,
            breakdown,
            available_bytes,
            composed_bytes: Some(at(length).composed_bytes()),
        })
    }

    fn implementation(&self) -> &'static str {
        implementation(self.execution, self.workload.algorithm)
    }

    fn breakdown(&self, device: &Device) -> Result<MemoryBreakdown> {
        let (w, kernels) = (&self.workload, Kernels::of(device));
        let eager = || attention_breakdown(w, kernels);
        breakdown(self.execution, eager, || {
            planned_attention_breakdown(w, kernels)
        })
    }

    fn unsupported(&self, device: &Device) -> Option<String> {
        unsupported(&self.workload, self.execution, device)
    }

    /// Refuses what is not planned.
    fn check_execution(&self, device: &Device) -> Result<()> {
        let w = &self.workload;
        let (expected, got) = match self.execution {
            Execution::Eager => return Ok(()),
            _ if !matches!(w.dtype, DType::F32 | DType::BF16 | DType::F16) => {
                ("the dtype is not f32, bf16 or f16", w.dtype.as_str())
            }
            _ if device.is_metal() => (
                "the device is neither the CPU nor a CUDA GPU",
                "another device",
            ),
            _ => return Ok(()),
        };
        Err(Error::Config {
            config: "attention benchmark",
            field: "execution",
            expected: format!("eager, where {expected}"),
            got: format!("planned, {got}"),
            hint: "run it eagerly, or in f32, bf16 or f16 on the CPU or a CUDA GPU".into(),
        })
    }

    fn prepared(&self, device: &Device) -> Result<Pass> {
        let config = self.attention_config(device)?;
        let [q, k, v] = self.inputs(device)?;
        let shape = q.shape().clone();
        let parameters = [("q", &q), ("k", &k), ("v", &v)];
        let parameters = parameters.map(|(name, x)| (name.to_string(), x.clone()));
        let algorithm = self.workload.algorithm;
        let attend = move || algorithm.attend(&q, &k, &v, &config);
        if self.execution == Execution::Eager {
            return Ok(Pass::Eager(Box::new(attend)));
        }
        let d_out = Tensor::ones(shape, self.workload.dtype, device)?;
        let (parameters, step_config) = (parameters.into(), StepConfig::default());
        let step =
            compile::Step::without_optimizer(device, parameters, &step_config, move |_| attend())?;
        Pass::planned(step, Batch::new([]), d_out)
    }

    /// q, k and v, normal with standard deviation 1.
    fn inputs(&self, device: &Device) -> Result<[Var; 3]> {
        let w = &self.workload;
        let builder = seeded(self.sampling.seed, w.dtype, device);
        let shape = (w.batch_size, w.heads, w.sequence_length, w.head_dim);
        let init = Init::Randn {
            mean: 0.0,
            stdev: 1.0,
        };
        let draw = |name| Var::from_tensor(&builder.get_with_hints(shape, name, init)?);
        Ok([draw("q")?, draw("k")?, draw("v")?])
    }

    fn forward_flops(&self) -> f64 {
        let w = &self.workload;
        let matrices = w.batch_size as f64 * w.heads as f64;
        let documents = w.document_lengths().into_iter();
        let pairs = documents.map(|(length, count)| count as f64 * pairs(w.mask, length));
        let pairs: f64 = pairs.sum();
        4.0 * matrices * w.head_dim as f64 * pairs
    }

    fn labels(&self) -> Fields {
        let w = &self.workload;
        let mut row = Fields::new();
        row.insert("implementation", self.implementation());
        row.insert("batch_size", w.batch_size);
        row.insert("heads", w.heads);
        row.insert("context_length", w.sequence_length);
        row.insert("head_dim", w.head_dim);
        row.insert("mask", mask_name(w.mask));
        row.insert("documents", (w.documents > 1).then_some(w.documents));
        row.insert("dropout", (w.dropout != 0.0).then_some(w.dropout));
        row.insert("dtype", w.dtype.as_str());
        row.insert("composed_bytes", w.composed_bytes());
        row
    }
}

/// How many pairs of query and key a mask leaves.
pub(super) fn pairs(mask: Mask, length: usize) -> f64 {
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
pub(super) fn unsupported(
    w: &AttentionWorkload,
    execution: Execution,
    device: &Device,
) -> Option<String> {
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
