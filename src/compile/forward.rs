//! A forward, planned.

use super::arguments::Arguments;
use super::config::PlanConfig;
use super::executor::Executor;
use super::least;
use super::model::Planner;
use super::parameters;
use super::plan::Plan;
use super::run::Tensors;
use crate::model::{TransformerConfig, TransformerLM};
use crate::{Result, ops};
use candle_core::{DType, Device, Shape, Tensor, Var};

const OP: &str = "compile::Forward";

/// A model's forward for one batch shape, planned once: tokens to logits, without a graph.
///
/// The same as `no_grad(|| model.forward(&tokens))`, on the model's own parameters; with a precision other than f32 the
/// same under [`autocast`](crate::autocast()). Of [`PlanConfig`] only `batch_size`, `sequence_length` and `precision`
/// matter.
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
    device: Device,
    parameters: Vec<(String, Var)>,
    arguments: Arguments,
    /// (B, T, V), in the dtype of the precision.
    logits: (Shape, DType),
}

impl Forward {
    /// Plans a forward of `model`, and allocates its arena.
    ///
    /// # Errors
    /// A configuration that cannot work, a sequence beyond the model's context, a model that is not in f32 on one
    /// device (the CPU or a CUDA GPU), on a GPU heads that flash attention [has no kernel
    /// for](crate::compile#on-a-gpu), an arena that does not fit the machine's memory.
    pub fn new(model: &TransformerLM, config: &PlanConfig) -> Result<Self> {
        let device = model.device();
        let config = &Self::shape_of(config);
        let parameters = model.parameters();
        parameters::check(OP, &parameters, device)?;
        let planner = Planner::new(OP, model, config, Executor::target(device))?;
        let (function, lowered) = planner.forward()?;
        let output = lowered.plan.buffer_of(&lowered.output);
        Ok(Self {
            executor: Executor::new(&lowered.plan, device)?,
            arguments: Arguments::new(&function, &lowered, device)?,
            device: device.clone(),
            logits: (output.shape.clone().into(), output.dtype),
            plan: lowered.plan,
            parameters,
        })
    }

    /// The plan alone, for a model that need not exist.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn plan_for(model: &TransformerConfig, config: &PlanConfig) -> Result<Plan> {
        Self::plan_on(&Device::Cpu, model, config)
    }

    /// A lower bound of what a plan takes ([`Plan::total_bytes`]), in no time: parameters, the residual stream, logits.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn least_bytes(model: &TransformerConfig, config: &PlanConfig) -> Result<u64> {
        least::bytes(model, config, false)
    }

    /// As [`plan_for`](Self::plan_for), for a model on `device`.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn plan_on(
        device: &Device,
        model: &TransformerConfig,
        config: &PlanConfig,
    ) -> Result<Plan> {
        let config = &Self::shape_of(config);
        let planner = Planner::hollow(OP, model, config, Executor::target(device))?;
        Ok(planner.forward()?.1.plan)
    }

    /// What of a configuration matters to a forward.
    fn shape_of(config: &PlanConfig) -> PlanConfig {
        PlanConfig {
            batch_size: config.batch_size,
            sequence_length: config.sequence_length,
            precision: config.precision,
            ..Default::default()
        }
    }

    /// Logits (B, T, V) of tokens (B, T) u32, in the dtype of the precision: the only thing that a run allocates.
    ///
    /// # Errors
    /// Another shape or dtype than planned, ids outside the vocabulary.
    pub fn run(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let arguments = self.arguments.given(&[("tokens", tokens)])?;
        let (shape, dtype) = &self.logits;
        let logits = ops::zeros(shape, *dtype, &self.device)?;
        let tensors = Tensors {
            parameters: &self.parameters,
            arguments: &arguments,
            output: Some(&logits),
            ..Default::default()
        };
        self.executor.refresh(); // the weights may have changed
        self.executor.run_micro_batches(&self.plan, &tensors)?;
        Ok(logits)
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}
