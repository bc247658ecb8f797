//! Training steps by strategy and exchange.

use super::answers::{self, exposed_ms};
use super::common::models::Model;
use super::common::outputs::named;
use super::common::ways::{Strategy, Way};
use super::common::{values, wrote};
use super::{Rank, row, table};
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use clap::Args;
use tallow::compile::{Step, StepRanks};
use tallow::distributed::{Exchange, FullyShard, Replicated, Shard};
use tallow::model::TransformerLM;
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::profile::{self, Profiler};
use tallow::report::{Column, Report, Statistics};
use tallow::{Result, nn};

/// Flags for the strategies and exchanges to compare.
#[derive(Args, Clone, Debug)]
pub struct Ways {
    /// Sizes of a bucket of gradients; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 10, 100, 1000], value_name = "MIB")]
    bucket_mib: Vec<u64>,

    /// Exchange gradients in bf16
    #[arg(long)]
    exchange_bf16: bool,

    /// replicated, sharded-optimizer, fully-shard
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "replicated", value_name = "NAME")]
    strategy: Vec<Strategy>,

    /// Without the steps alone, for models too large for one rank
    #[arg(long, hide_short_help = true)]
    without_alone: bool,

    /// Recompute until the arena of a step is within this
    #[arg(long, hide_short_help = true, value_name = "GIB", value_parser = values::gib)]
    pub memory_budget_gib: Option<f64>,
}

impl Ways {
    /// Returns every strategy with every exchange that it has: the step alone first, which the others are compared
    /// with.
    pub fn all(&self) -> Vec<Way> {
        let mut all = Vec::from_iter((!self.without_alone).then_some(Way::Alone));
        let overlapped = |bucket_bytes| Exchange::Overlapped { bucket_bytes };
        let mut exchanges = vec![Exchange::PerParameter, Exchange::Flat, overlapped(0)];
        let buckets = self.bucket_mib.iter();
        exchanges.extend(buckets.map(|mib| overlapped(mib.saturating_mul(1 << 20))));
        for &strategy in &self.strategy {
            let exchanges = match strategy {
                Strategy::FullyShard => &exchanges[3..], // in buckets only
                _ => &exchanges[..],
            };
            let ways = exchanges.iter();
            all.extend(ways.map(|&exchange| Way::Exchanged(strategy, exchange)));
        }
        all
    }

    /// Returns the setting of a planned step of this rank.
    pub fn step_ranks(&self, way: Way, shard: Shard) -> StepRanks {
        way.step_ranks(self.exchange_bf16.then_some(DType::BF16), shard)
    }
}

impl Rank<'_> {
    /// Times training steps with each strategy and exchange.
    pub fn training_steps(&self) -> Result<Report> {
        let ranks = self.communicator.world_size();
        let tokens = ranks * self.flags.sizes().iter().product::<usize>();
        let columns = Self::columns([
            Column::ms("mean_ms", "Step"),
            Column::ms("std_ms", "±"),
            Column::ms("exposed_ms", "Exposed"),
            Column::number("exposed_percent", "Exposed", "%", 1),
            Column::count("tokens_per_s", "Tokens/s"),
        ]);
        let notes = [
            "A step is forward, loss, backward, exchange and AdamW: mean ± standard deviation. Alone is the same step \
             on every rank at once, without an exchange.",
            "Exposed is what the exchange adds to the step alone: communication that nothing hides. It is n/a, in \
             the noise, where the step is not slower by two standard errors.",
            "One rank: nothing is exchanged and nothing divided. Give --ranks 2.",
        ];
        let notes = &notes[..2 + usize::from(ranks == 1)];
        let mut report = table("Training steps", columns, notes);
        for (model, ways) in self.measure("steps", |model, way| self.timed_step(model, way))? {
            let alone = ways.iter().find(|(way, _)| *way == Way::Alone);
            for (way, step) in &ways {
                let exposed_ms = alone.and_then(|(_, alone)| exposed_ms(alone, step));
                let exposed_percent = exposed_ms.map(|ms| 100.0 * ms / step.mean_ms);
                let mut row = row(model, *way, step)?;
                row.insert("exposed_ms", exposed_ms)
                    .insert("exposed_percent", exposed_percent)
                    .insert("tokens_per_s", (1e3 * tokens as f64 / step.mean_ms) as u64);
                report.rows.push(row);
            }
            let answers = answers::steps(&model.name, ranks, &ways);
            report.answers.extend(answers);
        }
        Ok(report)
    }

    fn timed_step(&self, model: &Model, way: Way) -> Result<Statistics> {
        let communicator = &self.communicator;
        let (mut planned, mut optimizer, [tokens, targets]) = self.job(model, way)?;
        planned.prepare((&tokens, &targets))?;
        communicator.barrier()?;
        let mut step = || planned.run(&mut optimizer, (&tokens, &targets)).map(drop);
        let time = self.timed(&mut step);
        if let Some(path) = &self.flags.trace {
            let is_first = communicator.rank() == 0;
            let profiler = is_first.then(|| Profiler::start_on(communicator.device()));
            let profiler = profiler.transpose()?;
            for _ in 0..3 {
                // the first planned step on a GPU records what the others replay
                let _step = profile::step();
                step()?;
            }
            if let Some(profiler) = profiler {
                let traces = self.models.len() * self.flags.ways.all().len();
                let path = named(path, &format!("{} {way}", model.name), traces);
                profiler.finish()?.save_trace(&path)?;
                wrote(&path);
            }
        }
        communicator.check()?;
        time
    }

    /// Returns a rank's planned step and optimizer, and its batch of tokens and targets, (B, T) u32.
    pub fn job(&self, model: &Model, way: Way) -> Result<(Step<'static>, Optimizer, [Tensor; 2])> {
        let (communicator, config) = (&self.communicator, &model.config);
        let (device, adamw) = (communicator.device(), AdamWConfig::default());
        let [b, t] = self.flags.sizes();
        let count = b * t;
        // Multiples of a prime, other ones on each rank.
        let ids = |first: usize| {
            let ids = (first..first + count).map(|i| (i * 7919 % config.vocab_size) as u32);
            Tensor::from_iter(ids, device)?.reshape((b, t))
        };
        let start = communicator.rank() * count;
        let batch = [ids(start)?, ids(start + 1)?];
        let ranks = self.flags.ways.step_ranks(way, communicator.shard());
        let weights = nn::seeded(self.flags.common.seed, DType::F32, device);
        let new_model = |weights: VarBuilder| {
            let model = TransformerLM::from_var_builder(config, weights)?;
            model.with_attention(self.flags.attention)
        };
        if let StepRanks::FullySharded(parts, _) = ranks {
            let sharded = FullyShard::new(communicator, parts)?;
            let model = new_model(sharded.builder(weights))?;
            let optimizer = Optimizer::new(sharded.parameters(), adamw)?;
            let step = Step::fully_sharded_for_model(&model, &optimizer, &self.step, &sharded)?;
            return Ok((step, optimizer, batch));
        }
        let model = new_model(weights)?;
        let mut optimizer = Optimizer::new(model.parameters(), adamw)?;
        if let StepRanks::ShardedOptimizer(..) = ranks {
            optimizer.shard(communicator)?;
        }
        let mut step = Step::for_model(&model, &optimizer, &self.step)?;
        if let StepRanks::Replicated(exchange) | StepRanks::ShardedOptimizer(exchange, _) = ranks {
            let replicated = Replicated::new(communicator, model.parameters(), exchange)?;
            step = step.replicated(&optimizer, &replicated)?;
        }
        Ok((step, optimizer, batch))
    }
}
