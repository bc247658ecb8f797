//! A forward, planned.

use super::arguments::Arguments;
use super::batch::Batch;
use super::config::check_precision;
use super::executor::Executor;
use super::least;
use super::lower::Lowered;
use super::model;
use super::parameters;
use super::plan::Plan;
use super::run::Tensors;
use super::traced::{Target, TracedFunction};
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::Checkpointing;
use crate::ops::{KernelPolicy, with_kernel_policy};
use crate::precision::{Autocast, Precision};
use crate::{Result, autocast, graph, ops};
use candle_core::{DType, Device, Shape, Tensor, Var};

const OP: &str = "compile::Forward";

/// A model's forward for one batch shape, planned once: tokens to logits, without a graph.
///
/// The same as `no_grad(|| model.forward(&tokens))`, on the model's own parameters; with a precision other than f32 the
/// same under [`autocast`](crate::autocast()).
///
/// ```
/// use candle_core::{DType, Tensor};
/// use tallow::compile::Forward;
/// use tallow::model::{TransformerConfig, TransformerLM};
/// use tallow::precision::Precision;
///
/// let device = tallow::device("cpu")?;
/// let config = TransformerConfig {
///     vocab_size: 50, context_length: 8, d_model: 16, num_layers: 2, num_heads: 2, d_ff: 32,
///     ..Default::default()
/// };
/// let model = TransformerLM::new(&config, 0, &device)?;
/// let mut forward = Forward::new(&model, [3, 8], Precision::F32)?; // B, T
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
    /// Plans a forward of `model` for tokens (B, T), and allocates its arena.
    ///
    /// # Errors
    /// A configuration that cannot work, a sequence beyond the model's context, a model that is not in f32 on one
    /// device (the CPU or a CUDA GPU), on a GPU heads that flash attention [has no kernel
    /// for](crate::compile#on-a-gpu), an arena that does not fit the machine's memory.
    pub fn new(model: &TransformerLM, tokens: [usize; 2], precision: Precision) -> Result<Self> {
        let (device, parameters) = (model.device(), model.parameters());
        parameters::check(OP, &parameters, device)?;
        let (function, lowered) = planned(Target::from(device), model, tokens, precision)?;
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
    pub fn plan_of(
        target: impl Into<Target>,
        model: &TransformerConfig,
        tokens: [usize; 2],
        precision: Precision,
    ) -> Result<Plan> {
        let hollow = model::hollow(model, tokens[1])?;
        Ok(planned(target.into(), &hollow, tokens, precision)?.1.plan)
    }

    /// A lower bound of what a plan takes ([`Plan::total_bytes`]), in no time: parameters, the residual stream, logits.
    ///
    /// # Errors
    /// Configurations that cannot work.
    pub fn least_bytes(
        model: &TransformerConfig,
        tokens: [usize; 2],
        precision: Precision,
    ) -> Result<u64> {
        least::of_forward(model, tokens, precision)
    }

    /// Logits (B, T, V) of tokens (B, T) u32, in the dtype of the precision: the only thing that a run allocates.
    ///
    /// # Errors
    /// Another shape or dtype than planned, ids outside the vocabulary.
    pub fn run(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let batch = Batch::new([("tokens", tokens)]);
        self.arguments.check(&batch)?;
        let arguments = self.arguments.given(&batch)?;
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

/// Traces and plans a forward to logits, in this precision whatever region it is called in.
fn planned(
    target: Target,
    model: &TransformerLM,
    tokens: [usize; 2],
    precision: Precision,
) -> Result<(TracedFunction, Lowered)> {
    check_precision("compile::Forward", precision)?;
    let model = model.clone().with_checkpointing(Checkpointing::None);
    let tokens = graph::input("tokens", (tokens[0], tokens[1]), DType::U32)?;
    let policy = precision.policy().unwrap_or_else(Autocast::disabled);
    let forward = || autocast(policy, || model.forward(&tokens));
    let parameters = model.parameters();
    let parameters = parameters.iter();
    let parameters = parameters.map(|(name, var)| (name.as_str(), var.as_tensor()));
    let function = with_kernel_policy(KernelPolicy::Prefer, || {
        TracedFunction::new(OP, target, parameters, forward)
    })?;
    let lowered = function.forward()?;
    Ok((function, lowered))
}
