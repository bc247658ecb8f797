//! Training steps by strategy and exchange.

use super::answers::{self, is_slower};
use super::common::models::Model;
use super::common::outputs::named;
use super::common::ways::{Strategy, Way};
use super::common::{values, wrote};
use super::{Rank, table, with_time};
use candle_core::{DType, Tensor};
use clap::Args;
use tallow::compile::{Step, StepRanks};
use tallow::distributed::{Exchange, FullyShard, Replicated, Shard};
use tallow::model::TransformerLM;
use tallow::optim::{AdamWConfig, Optimizer};
use tallow::profile::{self, Profiler};
use tallow::report::{Column, Report, Statistics};
use tallow::{Result, nn};

/// Steps of a trace: the first planned step on a GPU records what the others replay.
const TRACED_STEPS: usize = 3;

/// Flags for the strategies and exchanges to compare.
#[derive(Args, Clone, Debug)]
pub struct Ways {
    /// Sizes of a bucket of gradients; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 10, 100, 1000], value_name = "MIB")]
    bucket_mib: Vec<u64>,

    /// Exchange gradients in bf16
    #[arg(long)]
    exchange_bf16: bool,

    /// replicated, sharded-optimizer, fully-shard; several
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "replicated", value_name = "NAME")]
    strategy: Vec<Strategy>,

    /// Without the steps alone, for models too large for one rank
    #[arg(long, hide_short_help = true)]
    without_alone: bool,

    /// Recompute until the arena of a step is within this
    #[arg(long, hide_short_help = true, value_name = "GIB", value_parser = values::gib)]
    pub memory_budget_gib: Option<f64>,
}

/// A step, its optimizer, and a rank's tokens and targets.
type Job = (Step<'static>, Optimizer, [Tensor; 2]);

impl Ways {
    /// Returns every strategy with every exchange that it has: the step alone first, which the others are compared
    /// with.
    pub fn all(&self) -> Vec<Way> {
        let mut all = Vec::from_iter((!self.without_alone).then_some(Way::Alone));
        let overlapped = |bucket_bytes| Exchange::Overlapped { bucket_bytes };
        let buckets = self
            .bucket_mib
            .iter()
            .map(|mib| mib.saturating_mul(1 << 20));
        for &strategy in &self.strategy {
            let mut exchanges = match strategy {
                Strategy::FullyShard => Vec::new(),
                _ => vec![Exchange::PerParameter, Exchange::Flat, overlapped(0)],
            };
            exchanges.extend(buckets.clone().map(overlapped));
            let exchanges = exchanges.into_iter();
            all.extend(exchanges.map(|exchange| Way::Exchanged(strategy, exchange)));
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
        let tokens = ranks * self.flags.batch_size * self.flags.context_length;
        let columns = Self::columns([
            Column::ms("time", "Step"),
            Column::ms("exposed_ms", "Exposed"),
            Column::number("exposed_percent", "Exposed", "%", 1),
            Column::count("tokens_per_s", "Tokens/s"),
            Column::number("efficiency_percent", "Alone / step", "%", 1),
        ]);
        let notes = [
            "A step is forward, loss, backward, exchange and AdamW, mean ± standard deviation. Alone is the same step \
             on every rank at once, without an exchange.",
            "Exposed is what the exchange adds to the step alone: communication that nothing hides. It is in the \
             noise where the two steps do not differ by two standard errors.",
            "One rank: nothing is exchanged and nothing divided. Give --ranks 2.",
        ];
        let notes = &notes[..2 + usize::from(ranks == 1)];
        let mut report = table("Training steps", columns, notes);
        for (model, ways) in self.measure("steps", |model, way| self.timed_step(model, way))? {
            let alone = ways.iter().find(|(way, _)| *way == Way::Alone);
            let alone = alone.map(|(_, alone)| alone);
            for (way, step) in &ways {
                let alone = alone.filter(|_| *way != Way::Alone);
                let percent = |ms: f64| 100.0 * ms / step.mean_ms;
                let exposed_ms = alone.map(|alone| step.mean_ms - alone.mean_ms);
                let efficiency_percent = alone.map(|alone| percent(alone.mean_ms));
                let mut row = self.row(model, *way, step)?;
                row.insert("exposed_ms", exposed_ms)
                    .insert("exposed_percent", exposed_ms.map(percent))
                    .insert("tokens_per_s", (1e3 * tokens as f64 / step.mean_ms) as u64)
                    .insert("efficiency_percent", efficiency_percent);
                let mut line = with_time(&row, step);
                if alone.is_some_and(|alone| !is_slower(alone, step)) {
                    line.insert("exposed_ms", "in the noise")
                        .insert("exposed_percent", "in the noise");
                }
                report.rows.push(row);
                report.shown_rows.push(line);
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
            for _ in 0..TRACED_STEPS {
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
    pub fn job(&self, model: &Model, way: Way) -> Result<Job> {
        let (communicator, config) = (&self.communicator, &model.config);
        let (device, attention) = (communicator.device(), self.flags.attention);
        let shape = (self.flags.batch_size, self.flags.context_length);
        let count = shape.0 * shape.1;
        // Multiples of a prime, other ones on each rank.
        let ids = |first: usize| {
            let ids = (first..first + count).map(|i| (i * 7919 % config.vocab_size) as u32);
            Tensor::from_iter(ids, device)?.reshape(shape)
        };
        let start = communicator.rank() * count;
        let batch = [ids(start)?, ids(start + 1)?];
        let ranks = self.flags.ways.step_ranks(way, communicator.shard());
        let weights = nn::seeded(self.flags.common.seed, DType::F32, device);
        if let StepRanks::FullySharded(parts, _) = ranks {
            let sharded = FullyShard::new(communicator, parts)?;
            let model = TransformerLM::from_var_builder(config, sharded.builder(weights))?;
            let model = model.with_attention(attention)?;
            let optimizer = Optimizer::new(sharded.parameters(), AdamWConfig::default())?;
            let step = Step::fully_sharded_for_model(&model, &optimizer, &self.step, &sharded)?;
            return Ok((step, optimizer, batch));
        }
        let model = TransformerLM::from_var_builder(config, weights)?;
        let model = model.with_attention(attention)?;
        let mut optimizer = Optimizer::new(model.parameters(), AdamWConfig::default())?;
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
