//! The flags of the planned step whose memory is predicted.

use crate::common::ranks::ExchangeFlags;
use crate::common::{gib_bytes, values};
use clap::Args;
use tallow::compile::{StepConfig, StepRanks};
use tallow::distributed::Shard;

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
    pub dropout: Option<f64>,

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

impl StepFlags {
    pub fn has_ranks(&self) -> bool {
        self.world_size > 1
    }

    pub fn has_budget(&self) -> bool {
        self.memory_budget_gib.is_some()
    }

    /// Returns the settings of the step, of rank 0.
    pub fn config(&self) -> StepConfig {
        let (rank, world_size) = (0, self.world_size);
        StepConfig {
            clip_norm: self.clip_norm,
            clip_value: self.clip_value,
            accumulation: self.accumulation,
            memory_budget_bytes: self.memory_budget_gib.map(gib_bytes),
            optimizer_in_backward: self.optimizer_in_backward,
            dropout_seed: self.dropout.map(|_| 0),
            ranks: match world_size {
                1 => StepRanks::Single,
                _ => self.exchange.step_ranks(Shard { rank, world_size }),
            },
            ..Default::default()
        }
    }
}
