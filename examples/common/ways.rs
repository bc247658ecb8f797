//! Strategies of ranks: what they divide, and when they average gradients.

use candle_core::DType;
use clap::ValueEnum;
use std::fmt;
use tallow::compile::StepRanks;
use tallow::distributed::{Exchange, FullyShardConfig, ReplicatedConfig, Shard};

/// The values of `--strategy`: what the ranks divide in addition to the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Strategy {
    /// Nothing: each rank has model, gradients and optimizer
    Replicated,
    /// The optimizer's state and update (ZeRO, stage 1)
    ShardedOptimizer,
    /// Weights, gradients, the optimizer's state and update (ZeRO, stage 3; FSDP)
    FullyShard,
}

/// A strategy with an exchange, or the step of each rank alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Alone,
    Exchanged(Strategy, Exchange),
}

impl Way {
    /// Returns the strategy by name.
    pub fn strategy(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Exchanged(Strategy::Replicated, _) => "replicated",
            Self::Exchanged(Strategy::ShardedOptimizer, _) => "sharded optimizer",
            Self::Exchanged(Strategy::FullyShard, _) => "fully shard",
        }
    }

    /// Describes when gradients are averaged.
    pub fn exchange(self) -> String {
        match self {
            Self::Alone => "none".into(),
            Self::Exchanged(_, exchange) => exchange.to_string(),
        }
    }

    /// Returns the setting of a planned step of this rank. Gradients are exchanged in `dtype`, if one is set.
    pub fn step_ranks(self, dtype: Option<DType>, shard: Shard) -> StepRanks {
        let Self::Exchanged(strategy, exchange) = self else {
            return StepRanks::Single;
        };
        let replicated = ReplicatedConfig { exchange, dtype };
        match strategy {
            Strategy::Replicated => StepRanks::Replicated(replicated),
            Strategy::ShardedOptimizer => StepRanks::ShardedOptimizer(replicated, shard),
            Strategy::FullyShard => {
                let bucket_bytes = match exchange {
                    Exchange::Overlapped { bucket_bytes } => bucket_bytes,
                    _ => 0, // each weight by itself
                };
                let sharded = FullyShardConfig {
                    dtype,
                    bucket_bytes,
                };
                StepRanks::FullySharded(sharded, shard)
            }
        }
    }
}

/// Writes strategy and exchange: `replicated buckets of 10 MiB`.
impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.strategy(), self.exchange())
    }
}
