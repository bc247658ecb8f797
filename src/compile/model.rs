//! Plans of the language model: what [`lower`] makes of a trace of its hollow twin.

use super::budget;
use super::buffer::Home;
use super::config::PlanConfig;
use super::lower::{self, Again, Job, Lowered, Parameter, Target};
use super::source;
use crate::graph::{self, Graph, ValueId};
use crate::model::{TransformerConfig, TransformerLM};
use crate::nn::{Checkpointing, Layer};
use crate::ops::{KernelPolicy, with_kernel_policy};
use crate::precision::Autocast;
use crate::{Error, Result, autocast};
use candle_core::{DType, Tensor, Var};
use std::collections::HashMap;

/// The weights of a model, as plans know them.
pub(super) struct Weights {
    /// Each variable once: its number is that of [`Home::Parameter`].
    pub parameters: Vec<(String, Var)>,
    /// Which of them a name is: names of one variable have one number.
    numbers: HashMap<String, usize>,
}

impl Weights {
    pub fn of(model: &TransformerLM) -> Self {
        let parameters = model.parameters();
        let places = parameters.iter().enumerate();
        let places = places.map(|(number, (_, var))| (var.id(), number));
        let places: HashMap<_, _> = places.collect();
        let weights = model.weights().into_iter();
        let numbers = weights.filter_map(|(name, weight)| Some((name, *places.get(&weight.id())?)));
        Self {
            numbers: numbers.collect(),
            parameters,
        }
    }
}

/// A forward of the model, traced.
pub(super) struct Planner<'a> {
    op: &'static str,
    model: &'a TransformerConfig,
    config: &'a PlanConfig,
    target: Target,
    /// By name, where they are not the configuration's, each a variable of its own.
    weights: Option<&'a Weights>,
    tables: [Vec<f32>; 2],
}

impl<'a> Planner<'a> {
    /// # Errors
    /// Configurations that cannot work.
    pub fn new(
        op: &'static str,
        model: &'a TransformerConfig,
        config: &'a PlanConfig,
        target: Target,
        weights: Option<&'a Weights>,
    ) -> Result<Self> {
        model.validate()?;
        source::check_length(model, config)?;
        Ok(Self {
            op,
            model,
            config,
            target,
            weights,
            tables: source::angles(model, config)?,
        })
    }

    /// The plan of a training step, and its checkpointing: as configured, or what fits the budget.
    ///
    /// # Errors
    /// A memory budget that no plan keeps to.
    pub fn train_step(&self) -> Result<(Lowered, Checkpointing)> {
        budget::plan(
            self.model.num_layers,
            self.target,
            self.config,
            |checkpointing, again| self.train_step_with(checkpointing, again),
        )
    }

    /// The plan of a training step that runs so much again.
    ///
    /// # Errors
    /// Those of the trace.
    pub fn train_step_with(&self, checkpointing: Checkpointing, again: Again) -> Result<Lowered> {
        let graph = self.trace(checkpointing, |model, tokens| {
            let targets = graph::input("targets", tokens.shape(), DType::U32)?;
            model.loss(tokens, &targets)
        })?;
        let (parameters, numbers) = self.parameters(&graph, true);
        lower::step(&Job {
            again,
            clips: self.config.clip_norm.is_some(),
            scales: self.config.loss_scaling,
            accumulation: self.config.accumulation,
            optimizer_in_backward: self.config.optimizer_in_backward,
            ..self.job(&graph, &parameters, &numbers)
        })
    }

    /// The plan of a forward alone, to logits.
    ///
    /// # Errors
    /// Those of the trace.
    pub fn forward(&self) -> Result<Lowered> {
        let graph = self.trace(Checkpointing::None, TransformerLM::forward)?;
        let (parameters, numbers) = self.parameters(&graph, false);
        lower::forward(&self.job(&graph, &parameters, &numbers))
    }

    fn job<'j>(
        &'j self,
        graph: &'j Graph,
        parameters: &'j [Parameter],
        numbers: &'j HashMap<ValueId, usize>,
    ) -> Job<'j> {
        Job {
            op: self.op,
            graph,
            target: self.target,
            parameters,
            numbers,
            input: &home_of,
            table: self,
            differentiated: &[],
            clips: false,
            scales: false,
            accumulation: 1,
            optimizer_in_backward: false,
            again: Again::default(),
        }
    }

    /// Traces a forward of the model without its elements, in the precision that is planned, whatever region this is in.
    fn trace(
        &self,
        checkpointing: Checkpointing,
        forward: impl FnOnce(&TransformerLM, &Tensor) -> Result<Tensor>,
    ) -> Result<Graph> {
        let (batch, length) = (self.config.batch_size, self.config.sequence_length);
        let twin = TransformerConfig {
            checkpointing,
            context_length: length,
            ..self.model.clone()
        };
        let twin = TransformerLM::of_any_length(&twin, graph::weights(DType::F32))?;
        let tokens = graph::input("tokens", (batch, length), DType::U32)?;
        let policy = self.config.precision.policy();
        let policy = policy.unwrap_or_else(Autocast::disabled);
        let forward = || autocast(policy, || forward(&twin, &tokens));
        with_kernel_policy(KernelPolicy::Prefer, || {
            graph::trace(self.target.of_trace(), forward)
        })
    }

    /// The variables, and which of them each value is.
    fn parameters(
        &self,
        graph: &Graph,
        is_trained: bool,
    ) -> (Vec<Parameter>, HashMap<ValueId, usize>) {
        let parameter = |(name, elements)| Parameter {
            name,
            elements,
            is_trained,
        };
        let shapes = self.model.parameter_shapes();
        let (parameters, numbers): (Vec<Parameter>, HashMap<String, usize>) = match self.weights {
            None => {
                let names = shapes.iter().enumerate();
                let names = names
                    .map(|(number, (name, _))| (name.clone(), number))
                    .collect();
                let all = shapes
                    .into_iter()
                    .map(|(name, shape)| (name, shape.elem_count()));
                (all.map(parameter).collect(), names)
            }
            Some(weights) => {
                let all = weights.parameters.iter();
                let all = all.map(|(name, var)| (name.clone(), var.elem_count()));
                (all.map(parameter).collect(), weights.numbers.clone())
            }
        };
        let values = graph.weights();
        let numbers = values.filter_map(|(id, name)| Some((id, *numbers.get(name)?)));
        (parameters, numbers.collect())
    }
}

/// Where the model's inputs are.
fn home_of(input: &str) -> Option<Home> {
    match input {
        "tokens" => Some(Home::Tokens),
        "targets" => Some(Home::Targets),
        _ => None,
    }
}

impl lower::Tables for Planner<'_> {
    /// The model's own, cosines first, rounded to half precision where queries and keys come in it, as eager rope does.
    fn table(&self, number: usize, _: &graph::Operand, _: DType) -> Result<Vec<f32>> {
        self.tables
            .get(number)
            .cloned()
            .ok_or_else(|| Error::Order {
                op: self.op,
                problem: format!("a table number {number}"),
                hint: "a bug of this crate: the model has two".into(),
            })
    }
}
