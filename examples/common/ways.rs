//! Strategies of ranks by name.

use serde::Serialize;
use std::fmt;
use tallow::Result;
use tallow::compile::StepRanks;
use tallow::distributed::{Exchange, FullyShardConfig};
use tallow::report::{Column, Fields};

/// A strategy with an exchange.
#[derive(Clone, Copy)]
pub struct Way {
    pub ranks: StepRanks,
    /// The strategy by name; `alone` without an exchange.
    pub strategy: &'static str,
    pub exchange: Option<Exchange>,
}

impl Way {
    pub fn new(ranks: StepRanks) -> Self {
        let (strategy, exchange) = match ranks {
            StepRanks::Single => ("alone", None),
            StepRanks::Replicated(config) => ("replicated", Some(config.exchange)),
            StepRanks::ShardedOptimizer(config, _) => ("sharded optimizer", Some(config.exchange)),
            StepRanks::FullySharded(FullyShardConfig { bucket_bytes, .. }, _) => {
                ("fully shard", Some(Exchange::Overlapped { bucket_bytes }))
            }
        };
        Self {
            ranks,
            strategy,
            exchange,
        }
    }

    /// Returns the row of a measurement: the model, a rank's B and T, the way and the figures.
    pub fn row(&self, model: &str, [b, t]: [usize; 2], figures: &impl Serialize) -> Result<Fields> {
        let exchange = self.exchange.map_or("none".into(), |e| e.to_string());
        let mut row = Fields::from_iter([("model", model)]);
        row.insert("batch_size", b)
            .insert("context_length", t)
            .insert("strategy", self.strategy)
            .insert("exchange", exchange)
            .merge(Fields::of(figures)?);
        Ok(row)
    }

    /// Returns the columns of [`row`](Self::row), with `others` for the figures.
    pub fn columns<const N: usize>(others: [Column; N]) -> Vec<Column> {
        let mut columns = vec![
            Column::text("model", "Model"),
            Column::text("batch_size", "B"),
            Column::text("context_length", "T"),
            Column::text("strategy", "Strategy"),
            Column::text("exchange", "Gradients averaged"),
        ];
        columns.extend(others);
        columns
    }

    /// Names the exchange in a sentence: `an exchange in buckets of 10 MiB`.
    pub fn name(&self) -> String {
        match self.exchange {
            Some(exchange) if self.is_bucket() => format!("an exchange in {exchange}"),
            Some(exchange) => format!("an exchange {exchange}"),
            None => "no exchange".into(),
        }
    }

    pub fn is_alone(&self) -> bool {
        self.exchange.is_none()
    }

    pub fn is_bucket(&self) -> bool {
        matches!(
            self.exchange,
            Some(Exchange::Overlapped { bucket_bytes: 1.. })
        )
    }
}

/// Writes strategy and exchange: `replicated buckets of 10 MiB`.
impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exchange {
            Some(exchange) => write!(f, "{} {exchange}", self.strategy),
            None => write!(f, "{} none", self.strategy),
        }
    }
}
