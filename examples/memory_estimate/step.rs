//! The planned step whose memory is asked for, and its flags.

use crate::common::ranks::{ExchangeFlags, Strategy};
use crate::common::{self, values};
use candle_core::{DType, Device};
use clap::Args;
use tallow::Result;
use tallow::compile::{Batch, Plan, Step, StepConfig, StepRanks};
use tallow::distributed::Shard;
use tallow::memory::{Mode, Workload};
use tallow::model::TransformerConfig;
use tallow::nn::{Checkpointing, DropoutRates};
use tallow::optim::Moments;

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

    /// The plan of the workload on `device`, and the blocks' checkpointing, which a budget may have chosen.
    pub fn plan(
        &self,
        config: &TransformerConfig,
        workload: &Workload,
        device: &Device,
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
        let rows = workload.batch_size.saturating_mul(self.accumulation);
        let batch = Batch::hollow(rows, workload.sequence_length)?;
        let (plan, checkpointing) = Step::plan_of(device, &model, &step, batch)?;
        let plan = match self.bf16_moments {
            true => plan.with_moments(Moments::Bf16 { seed: 0 }),
            false => plan,
        };
        Ok((plan, checkpointing))
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
    match modes.iter().find(|mode| **mode != Mode::TrainStep) {
        None => Ok(()),
        Some(mode) => Err(tallow::Error::Config {
            config: common::PROGRAM,
            field: "--compile",
            expected: "a training step (--mode train-step)".into(),
            got: mode.name().into(),
            hint: "e2e_benchmark --compile runs other modes as planned, with their peaks".into(),
        }),
    }
}
