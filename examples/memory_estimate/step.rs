//! The planned step whose memory is asked for, and its flags.

use crate::common::ranks::{ExchangeFlags, Strategy};
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
use tallow::optim::Moments;
use tallow::report::{Fields, format_mib, group_digits};

#[derive(Args)]
#[command(next_help_heading = "Planned step")]
pub struct StepFlags {
    /// Predict the planned step (compile::Step) in place of the eager one
    #[arg(long)]
    pub compile: bool,

    /// Batches in a step, whose gradients are averaged
    #[arg(long, default_value_t = 1, value_parser = values::count())]
    accumulation: usize,

    /// Clip gradients to this norm
    #[arg(long, value_name = "NORM", value_parser = values::from_0)]
    clip_norm: Option<f64>,

    /// Drop elements with this probability, wherever the model drops
    #[arg(long, value_name = "P", value_parser = values::from_0)]
    dropout: Option<f64>,

    /// The most that the arena may take, in GiB: backward runs again what does not fit
    #[arg(long, value_parser = values::gib)]
    memory_budget_gib: Option<f64>,

    /// Update each parameter in backward, as soon as its gradient is there
    #[arg(long)]
    optimizer_in_backward: bool,

    /// Store AdamW's running means in bf16
    #[arg(long)]
    bf16_moments: bool,

    /// How many ranks take the step together; rank 0's memory is predicted
    #[arg(long, default_value_t = 1, value_parser = values::count())]
    world_size: usize,

    #[command(flatten)]
    pub exchange: ExchangeFlags,
}

/// Plans of more tokens are not tried: the head's calls, some rows at a time, become many.
const MOST_TOKENS: usize = 1 << 20;

/// Those that only a planned step has.
pub const NAMES: &[&str] = &[
    "accumulation",
    "clip-norm",
    "dropout",
    "memory-budget-gib",
    "optimizer-in-backward",
    "bf16-moments",
    "world-size",
];

impl StepFlags {
    pub fn has_ranks(&self) -> bool {
        self.compile && self.world_size > 1
    }

    pub fn has_budget(&self) -> bool {
        self.memory_budget_gib.is_some()
    }

    /// The plan of the workload on a device, and the blocks' checkpointing, which a budget may have chosen.
    pub fn plan(
        &self,
        config: &TransformerConfig,
        workload: &Workload,
        target: Target,
    ) -> Result<(Plan, Checkpointing)> {
        let model = TransformerConfig {
            attention: workload.attention,
            checkpointing: workload.checkpointing,
            dropout: self.dropout.map_or(config.dropout, DropoutRates::all),
            ..config.clone()
        };
        let step = StepConfig {
            precision: workload.precision,
            clip_norm: self.clip_norm,
            loss_scaling: workload.precision.dtype() == DType::F16,
            accumulation: self.accumulation,
            memory_budget_bytes: self.memory_budget_gib.map(common::gib_bytes),
            optimizer_in_backward: self.optimizer_in_backward,
            dropout_seed: self.dropout.map(|_| 0),
            ranks: self.ranks(),
            ..Default::default()
        };
        if workload.mode == Mode::Forward {
            let tokens = (workload.batch_size, workload.sequence_length);
            let tokens = graph::input("tokens", tokens, DType::U32)?;
            let model = TransformerLM::from_var_builder(&model, graph::weights(DType::F32))?;
            let forward = |inputs: &Inputs| model.forward(&inputs.get("tokens")?);
            let batch = [("tokens", &tokens)];
            let plan = Step::plan_for(target, PlanKind::Forward, &step, batch, forward)?;
            return Ok((plan, workload.checkpointing));
        }
        let rows = workload.batch_size.saturating_mul(self.accumulation);
        let batch = Batch::hollow(rows, workload.sequence_length)?;
        let (plan, checkpointing) = Step::plan_of(target, &model, &step, batch)?;
        let plan = match self.bf16_moments {
            true => plan.with_moments(Moments::Bf16 { seed: 0 }),
            false => plan,
        };
        Ok((plan, checkpointing))
    }

    /// The largest batch and the largest T that memory holds, in words, and the same for programs.
    pub fn what_fits(
        &self,
        config: &TransformerConfig,
        workload: &Workload,
        target: Target,
        available_bytes: u64,
    ) -> Result<(String, Fields)> {
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
        let mut fields = Fields::new();
        fields.insert("available_bytes", available_bytes);
        fields.insert("largest_batch_size", batch);
        fields.insert("largest_context_length", length);
        let [batch, length] = [(batch, t), (length, b)].map(|(size, other)| match size {
            Some(size) if (size + 1).saturating_mul(other) > MOST_TOKENS => {
                format!("{} and more", group_digits(size as u64))
            }
            Some(size) => group_digits(size as u64),
            None => "none".into(),
        });
        let note = format!(
            "{} hold batches of up to {batch} at T {t}, and T up to {length} at batch {b}.",
            format_mib(available_bytes)
        );
        Ok((note, fields))
    }

    fn ranks(&self) -> StepRanks {
        let own = Shard {
            rank: 0,
            world_size: self.world_size,
        };
        match self.exchange.strategy {
            _ if self.world_size == 1 => StepRanks::Alone,
            Strategy::Replicated => StepRanks::Replicated(self.exchange.config()),
            Strategy::ShardedOptimizer => StepRanks::ShardedOptimizer(self.exchange.config(), own),
            Strategy::FullyShard => StepRanks::FullySharded(self.exchange.parts(), own),
        }
    }
}

/// Refuses what has no planned step.
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
