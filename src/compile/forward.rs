//! A forward, planned.

use super::build::{self, Source};
use super::config::PlanConfig;
use super::cpu::{Controls, Executor, Lent};
use super::plan::Plan;
use super::source;
use crate::Result;
use crate::model::{TransformerConfig, TransformerLM};
use crate::optim::inplace::lend_all;
use crate::precision::Precision;
use candle_core::{DType, Device, Tensor, Var, WithDType};
use half::{bf16, f16};

const OP: &str = "compile::Forward";

/// A model's forward for one batch shape, planned once: tokens to logits, without a graph.
///
/// The same as `no_grad(|| model.forward(&tokens))`, on the model's own parameters; with a precision other than f32 the same
/// under [`autocast`](crate::autocast()). Of [`PlanConfig`] only `batch_size`, `sequence_length` and `precision` matter.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use tallow::compile::{Forward, PlanConfig};
/// use tallow::model::{TransformerConfig, TransformerLM};
///
/// let device = tallow::device("cpu")?;
/// let config = TransformerConfig {
///     vocab_size: 50, context_length: 8, d_model: 16, num_layers: 2, num_heads: 2, d_ff: 32,
///     ..Default::default()
/// };
/// let model = TransformerLM::new(&config, 0, &device)?;
/// let plan = PlanConfig { batch_size: 3, sequence_length: 8, ..Default::default() };
/// let mut forward = Forward::new(&model, &plan)?;
/// let tokens = Tensor::zeros((3, 8), DType::U32, &device)?; // (B, T)
/// assert_eq!(forward.run(&tokens)?.dims(), [3, 8, 50]); // (B, T, V)
/// # Ok::<(), tallow::Error>(())
/// ```
#[derive(Debug)]
pub struct Forward {
    plan: Plan,
    executor: Executor,
    parameters: Vec<(String, Var)>,
    vocab_size: usize,
    precision: Precision,
    /// B, T.
    shape: (usize, usize),
}

impl Forward {
    /// Plans a forward of `model`, and allocates its arena.
    ///
    /// # Errors
    /// A configuration that cannot work, a sequence beyond the model's context, a model that is not in f32 on the CPU or
    /// whose weights share storage, an arena that does not fit the machine's memory.
    pub fn new(model: &TransformerLM, config: &PlanConfig) -> Result<Self> {
        let plan = Self::plan_for(model.config(), config)?;
        let parameters = source::check_model(OP, model)?;
        Ok(Self {
            executor: Executor::new(&plan)?,
            plan,
            parameters,
            vocab_size: model.config().vocab_size,
            precision: config.precision,
            shape: (config.batch_size, config.sequence_length),
        })
    }

    /// The plan alone, for a model that need not exist.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn plan_for(model: &TransformerConfig, config: &PlanConfig) -> Result<Plan> {
        let config = PlanConfig {
            batch_size: config.batch_size,
            sequence_length: config.sequence_length,
            precision: config.precision,
            ..Default::default()
        };
        model.validate()?;
        source::check_length(model, &config)?;
        let [cos, sin] = source::angles(model, &config)?;
        Ok(build::forward(Source {
            model,
            config: &config,
            angles: [&cos, &sin],
            threads: rayon::current_num_threads(),
        }))
    }

    /// Logits (B, T, V) of tokens (B, T) u32, in the dtype of the precision: the only thing that a run allocates.
    ///
    /// # Errors
    /// Another shape or dtype than planned, ids outside the vocabulary.
    pub fn run(&mut self, tokens: &Tensor) -> Result<Tensor> {
        match self.precision.dtype() {
            DType::BF16 => self.run_in::<bf16>(tokens),
            DType::F16 => self.run_in::<f16>(tokens),
            _ => self.run_in::<f32>(tokens),
        }
    }

    /// With logits of `S`.
    fn run_in<S: WithDType>(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = self.shape;
        let tokens = source::ids(OP, "tokens", tokens, batch, length, self.vocab_size)?;
        let shape = (batch, length, self.vocab_size);
        let tensors = self.parameters.iter().map(|(_, var)| var.as_tensor());
        let tensors: Vec<&Tensor> = tensors.collect();
        let (plan, executor) = (&self.plan, &mut self.executor);
        let mut result = Ok(true);
        let mut logits = vec![S::zero(); batch * length * self.vocab_size]; // (N, V)
        let bytes = size_of_val(logits.as_slice());
        let output = std::ptr::slice_from_raw_parts_mut(logits.as_mut_ptr().cast(), bytes);
        lend_all::<f32>(&tensors, |parameters| {
            let lent = Lent {
                parameters,
                tokens: &tokens,
                output: Some(output),
                ..Default::default()
            };
            result = executor.run(plan, &lent, &Controls::default());
        })?;
        let _: bool = result?; // there is no update to be left out
        Ok(Tensor::from_vec(logits, shape, &Device::Cpu)?)
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}
