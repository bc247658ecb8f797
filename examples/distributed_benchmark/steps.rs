//! Training steps by strategy and exchange.

use super::answers::{self, is_slower};
use super::common::models::Model;
use super::common::outputs::named;
use super::common::ranks::{ExchangeFlags, Strategy, When};
use super::common::ways::Way;
use super::common::wrote;
use super::{Rank, values};
use candle_core::{DType, Tensor};
use clap::Args;
use std::path::PathBuf;
use tallow::compile::{Step, StepRanks};
use tallow::distributed::{FullyShard, Replicated, Shard};
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
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 10, 100, 1000], value_parser = values::mib, value_name = "MIB")]
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
    pub fn all(&self, shard: Shard) -> Vec<StepRanks> {
        let mut all = Vec::new();
        if !self.without_alone {
            all.push(StepRanks::Single);
        }
        for &strategy in &self.strategy {
            let mut add = |exchange, mib: u64| {
                let flags = ExchangeFlags {
                    strategy,
                    exchange,
                    bucket_mib: mib as f64,
                    exchange_bf16: self.exchange_bf16,
                };
                all.push(flags.step_ranks(shard));
            };
            if strategy != Strategy::FullyShard {
                let serial = [When::PerParameter, When::Flat, When::Overlapped];
                serial.into_iter().for_each(|when| add(when, 0));
            }
            self.bucket_mib
                .iter()
                .for_each(|mib| add(When::Overlapped, *mib));
        }
        all
    }
}

pub fn columns() -> Vec<Column> {
    Way::columns([
        Column::ms("time", "Step"),
        Column::ms("exposed_ms", "Exposed"),
        Column::number("exposed_percent", "Exposed", "%", 1),
        Column::count("tokens_per_s", "Tokens/s"),
        Column::number("efficiency_percent", "Alone / step", "%", 1),
    ])
}

impl Rank<'_> {
    /// Times training steps with each strategy and exchange.
    pub fn training_steps(&mut self, report: &mut Report) -> Result<()> {
        let ranks = self.communicator.world_size();
        let tokens = ranks * self.flags.batch_size * self.flags.length();
        for model in &self.models {
            let mut measured: Vec<(Way, Statistics)> = Vec::new();
            for way in self.ways() {
                let title = format!("{} {way}", model.name);
                self.progress.begin(&title);
                let traces = self.models.len() * self.ways().len();
                let trace = self.flags.trace.as_ref();
                let trace = trace.map(|path| named(path, &title, traces));
                let step = self.timed_step(model, way.ranks, trace)?;
                let alone = measured.first().filter(|(way, _)| way.is_alone());
                let alone = alone.map(|(_, alone)| alone);
                let percent = |ms: f64| 100.0 * ms / step.mean_ms;
                let exposed_ms = alone.map(|alone| step.mean_ms - alone.mean_ms);
                let mut row = way.row(&model.name, self.flags.sizes(), &step)?;
                row.insert("exposed_ms", exposed_ms)
                    .insert("exposed_percent", exposed_ms.map(percent))
                    .insert("tokens_per_s", (1e3 * tokens as f64 / step.mean_ms) as u64)
                    .insert(
                        "efficiency_percent",
                        alone.map(|alone| percent(alone.mean_ms)),
                    );
                let mut line = row.clone();
                line.insert("time", step.to_string());
                if alone.is_some_and(|alone| !is_slower(alone, &step)) {
                    line.insert("exposed_ms", "in the noise")
                        .insert("exposed_percent", "in the noise");
                }
                report.rows.push(row);
                report.shown_rows.push(line);
                measured.push((way, step));
            }
            let answers = answers::steps(&model.name, ranks, &measured);
            report.answers.extend(answers);
        }
        report.notes = vec![
            "A step is forward, loss, backward, exchange and AdamW, mean ± standard deviation. Alone is the same \
             step on every rank at once, without an exchange."
                .into(),
            "Exposed is what the exchange adds to the step alone: communication that nothing hides. It is in the \
             noise where the two steps do not differ by two standard errors."
                .into(),
        ];
        if ranks == 1 {
            let note = "One rank: nothing is exchanged and nothing divided. Give --ranks 2.";
            report.notes.push(note.into());
        }
        Ok(())
    }

    fn timed_step(
        &self,
        model: &Model,
        ranks: StepRanks,
        trace: Option<PathBuf>,
    ) -> Result<Statistics> {
        let communicator = &self.communicator;
        let (mut planned, mut optimizer, [tokens, targets]) = self.job(model, ranks)?;
        planned.prepare((&tokens, &targets))?;
        communicator.barrier()?;
        let mut step = || planned.run(&mut optimizer, (&tokens, &targets)).map(drop);
        let time = self.timed(&mut step);
        if let Some(path) = trace {
            let profiler =
                (communicator.rank() == 0).then(|| Profiler::start_on(communicator.device()));
            let profiler = profiler.transpose()?;
            for _ in 0..TRACED_STEPS {
                let _step = profile::step();
                step()?;
            }
            if let Some(profiler) = profiler {
                profiler.finish()?.save_trace(&path)?;
                wrote(&path);
            }
        }
        communicator.check()?;
        time
    }

    /// Returns a rank's planned step and optimizer, and its batch of tokens and targets, (B, T) u32.
    pub fn job(&self, model: &Model, ranks: StepRanks) -> Result<Job> {
        let (communicator, config) = (&self.communicator, &model.config);
        let attention = self.flags.attention;
        let device = communicator.device();
        let shape = (self.flags.batch_size, self.flags.length());
        let count = shape.0 * shape.1;
        // Multiples of a prime, other ones on each rank.
        let ids = |first: usize| {
            let ids = (first..first + count).map(|i| (i * 7919 % config.vocab_size) as u32);
            Tensor::from_iter(ids, device)?.reshape(shape)
        };
        let start = communicator.rank() * count;
        let batch = [ids(start)?, ids(start + 1)?];
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
