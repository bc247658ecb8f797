//! The planned step whose memory is predicted, and its flags.

use crate::common::ranks::ExchangeFlags;
use crate::common::{self, values};
use candle_core::DType;
use clap::Args;
use tallow::Result;
use tallow::compile::{Batch, Inputs, Plan, PlanKind, Step, StepConfig, StepRanks, Target};
use tallow::distributed::Shard;
use tallow::graph;
use tallow::memory::{Mode, Workload, largest_that_fits};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::nn::{Checkpointing, DropoutRates};

#[derive(Args)]
#[command(next_help_heading = "Planned step")]
pub struct StepFlags {
    /// Batches whose gradients are averaged
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = values::count())]
    accumulation: usize,

    /// Clip gradients to this norm
    #[arg(long, value_name = "X", value_parser = values::from_0)]
    clip_norm: Option<f64>,

    /// Clip elements of gradients to this value
    #[arg(long, value_name = "X", value_parser = values::from_0)]
    clip_value: Option<f64>,

    /// Dropout rate of every place
    #[arg(long, value_name = "P", value_parser = values::from_0)]
    dropout: Option<f64>,

    /// Most memory of the arena; backward recomputes the rest
    #[arg(long, value_name = "GIB", value_parser = values::gib)]
    memory_budget_gib: Option<f64>,

    /// Update each parameter in backward
    #[arg(long)]
    optimizer_in_backward: bool,

    /// Ranks of the step; rank 0 is predicted
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = values::count())]
    world_size: usize,

    #[command(flatten)]
    pub exchange: ExchangeFlags,
}

/// The largest number of tokens that is planned: the head runs some rows at a time, so its calls become many.
const MOST_TOKENS: usize = 1 << 20;

impl StepFlags {
    pub fn has_ranks(&self) -> bool {
        self.world_size > 1
    }

    pub fn has_budget(&self) -> bool {
        self.memory_budget_gib.is_some()
    }

    /// Plans the workload on a device, and returns the blocks' checkpointing, which a memory budget may have chosen.
    pub fn plan(
        &self,
        config: &TransformerConfig,
        workload: &Workload,
        target: Target,
    ) -> Result<(Plan, Checkpointing)> {
        let rates = self.dropout.map_or(config.dropout, DropoutRates::all);
        let model = TransformerLM::meta(config)?.with_dropout(rates)?;
        let model = model.with_attention(workload.attention)?;
        let model = model.with_checkpointing(workload.checkpointing);
        let step = StepConfig {
            precision: workload.precision,
            clip_norm: self.clip_norm,
            clip_value: self.clip_value,
            loss_scaling: workload.precision.dtype() == DType::F16,
            accumulation: self.accumulation,
            memory_budget_bytes: self.memory_budget_gib.map(common::gib_bytes),
            optimizer_in_backward: self.optimizer_in_backward,
            optimizer: workload.optimizer,
            dropout_seed: self.dropout.map(|_| 0),
            ranks: self.ranks(),
            ..Default::default()
        };
        if workload.mode == Mode::Forward {
            let tokens = (workload.batch_size, workload.sequence_length);
            let tokens = graph::input("tokens", tokens, DType::U32)?;
            let forward = |inputs: &Inputs| model.forward(&inputs.get("tokens")?);
            let batch = [("tokens", &tokens)];
            let plan = Step::plan_for(target, PlanKind::Forward, &step, batch, forward)?;
            return Ok((plan, workload.checkpointing));
        }
        let rows = workload.batch_size.saturating_mul(self.accumulation);
        let batch = Batch::meta(rows, workload.sequence_length)?;
        Step::plan_for_model(target, &model, &step, batch)
    }

    /// Returns the largest batch and the largest T that fit, with at most [`MOST_TOKENS`] tokens.
    pub fn largest(
        &self,
        config: &TransformerConfig,
        workload: &Workload,
        target: Target,
        available_bytes: u64,
    ) -> Result<(Option<usize>, Option<usize>)> {
        let bytes = |batch_size: usize, sequence_length: usize| {
            if batch_size.saturating_mul(sequence_length) > MOST_TOKENS {
                return Ok(u64::MAX);
            }
            let workload = Workload {
                batch_size,
                sequence_length,
                ..workload.clone()
            };
            let config = TransformerConfig {
                context_length: config.context_length.max(sequence_length),
                ..config.clone()
            };
            Ok(self.plan(&config, &workload, target)?.0.total_bytes())
        };
        let [b, t] = [workload.batch_size, workload.sequence_length];
        let batch = largest_that_fits(available_bytes, |batch_size| bytes(batch_size, t))?;
        let length = largest_that_fits(available_bytes, |length| bytes(b, length))?;
        Ok((batch, length))
    }

    fn ranks(&self) -> StepRanks {
        let (rank, world_size) = (0, self.world_size);
        match world_size {
            1 => StepRanks::Single,
            _ => self.exchange.step_ranks(Shard { rank, world_size }),
        }
    }
}

/// Refuses modes that have no planned step.
pub fn check(modes: &[Mode]) -> Result<()> {
    let is_planned = |mode: &Mode| matches!(mode, Mode::Forward | Mode::TrainStep);
    match modes.iter().find(|mode| !is_planned(mode)) {
        None => Ok(()),
        Some(mode) => Err(tallow::Error::Config {
            config: common::PROGRAM,
            field: "--compile",
            expected: "--mode forward or train-step".into(),
            got: mode.name().into(),
            hint: "the plan of a training step is what runs forward and backward too".into(),
        }),
    }
}
