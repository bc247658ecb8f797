//! Training steps by how their gradients are exchanged.

use super::answers::{self, Measured};
use super::common::models::{Model, with_attention};
use super::common::outputs::named;
use super::common::ranks::Strategy;
use super::common::sweep::Progress;
use super::common::{gib_bytes, wrote};
use super::{Flags, values};
use candle_core::{DType, Device, Tensor, Var};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use tallow::bench::Stopwatch;
use tallow::compile::{Step, StepConfig, StepRanks};
use tallow::distributed::{
    Communicator, Exchange, FullyShard, FullyShardConfig, Replicated, ReplicatedConfig, Shard,
};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::{AdamW, AdamWConfig};
use tallow::profile::{self, Profiler};
use tallow::report::{Column, Fields, Report, Speedup, Statistics, Verdict, mean_and_std};
use tallow::{Result, nn};

/// In a trace: the first of a planned step on a GPU records what the others replay.
const TRACED_STEPS: usize = 3;

/// How steps are run.
#[derive(Args, Clone, Debug)]
pub struct Ways {
    /// Sizes of a bucket of gradients; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 10, 100, 1000], value_name = "MIB")]
    bucket_mib: Vec<u64>,

    /// Exchange gradients in bf16
    #[arg(long)]
    exchange_bf16: bool,

    /// replicated, sharded-optimizer, fully-shard; several
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "replicated", value_name = "NAME",
          hide_possible_values = true)]
    pub strategy: Vec<Strategy>,

    /// Without the steps alone, for models too large for one rank
    #[arg(long, hide_short_help = true)]
    without_alone: bool,

    /// Recompute until the arena of a step is within this
    #[arg(long, hide_short_help = true, value_name = "GIB", value_parser = values::gib)]
    memory_budget_gib: Option<f64>,
}

/// How ranks train together.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub strategy: Strategy,
    pub exchange: ReplicatedConfig,
}

impl Way {
    /// How weights in parts are exchanged, if they are.
    pub fn parts(self) -> Option<FullyShardConfig> {
        match (self.strategy, self.exchange.exchange) {
            (Strategy::FullyShard, Exchange::Overlapped { bucket_bytes }) => {
                Some(FullyShardConfig {
                    dtype: self.exchange.dtype,
                    bucket_bytes,
                })
            }
            _ => None,
        }
    }

    /// Returns how the planned step of this rank exchanges.
    pub fn step_ranks(self, shard: Shard) -> StepRanks {
        match (self.strategy, self.parts()) {
            (_, Some(parts)) => StepRanks::FullySharded(parts, shard),
            (Strategy::ShardedOptimizer, _) => StepRanks::ShardedOptimizer(self.exchange, shard),
            _ => StepRanks::Replicated(self.exchange),
        }
    }

    /// As its row says it: strategy and exchange; of none, alone.
    pub fn names(way: Option<Self>) -> (&'static str, String) {
        way.map_or(("alone", "none".into()), |way| {
            (way.strategy.name(), way.exchange.exchange.to_string())
        })
    }
}

impl Ways {
    /// Alone first, which the others are compared with.
    pub fn all(&self) -> Vec<Option<Way>> {
        let serial = [Exchange::PerParameter, Exchange::Flat];
        let each = Exchange::Overlapped { bucket_bytes: 0 };
        let buckets = self.bucket_mib.iter();
        let buckets = buckets.map(|mib| Exchange::Overlapped {
            bucket_bytes: mib << 20,
        });
        let dtype = self.exchange_bf16.then_some(DType::BF16);
        let exchanged = serial.into_iter().chain([each]).chain(buckets);
        let exchanged: Vec<_> = exchanged
            .map(|exchange| ReplicatedConfig { exchange, dtype })
            .collect();
        let ways = self.strategy.iter().flat_map(|strategy| {
            let strategy = *strategy;
            let is_bucket = |way: &&ReplicatedConfig| {
                matches!(way.exchange, Exchange::Overlapped { bucket_bytes } if bucket_bytes > 0)
            };
            let exchanged = exchanged.iter();
            let exchanged = exchanged
                .filter(move |way| strategy != Strategy::FullyShard || is_bucket(way));
            exchanged.map(move |exchange| Way {
                strategy,
                exchange: *exchange,
            })
        });
        let alone = [None].into_iter().filter(|_| !self.without_alone);
        alone.chain(ways.map(Some)).collect()
    }
}

#[derive(Serialize)]
struct Row {
    model: String,
    strategy: &'static str,
    exchange: String,
    #[serde(flatten)]
    step: Statistics,
    /// What the exchange adds to the step alone; `None` without one.
    exposed_ms: Option<f64>,
    exposed_percent: Option<f64>,
    tokens_per_s: u64,
    efficiency_percent: Option<f64>,
}

pub fn columns() -> Vec<Column> {
    vec![
        Column::text("model", "Model"),
        Column::text("strategy", "Strategy"),
        Column::text("exchange", "Gradients averaged"),
        Column::ms("time", "Step"),
        Column::ms("exposed", "Exposed"),
        Column::number("exposed_share", "Exposed", "%", 1),
        Column::count("tokens_per_s", "Tokens/s").minor(1),
        Column::number("efficiency_percent", "Alone / step", "%", 1).minor(2),
    ]
}

impl Flags {
    /// Times training steps by how gradients are exchanged and what is divided.
    pub fn training_steps(
        &self,
        communicator: &Communicator,
        models: &[Model],
        progress: &mut Progress,
    ) -> Result<Report> {
        let mut report = Report {
            title: "Training steps".into(),
            columns: columns(),
            ..Default::default()
        };
        let ranks = communicator.world_size();
        for model in models {
            let mut measured: Vec<Measured> = Vec::new();
            for way in self.ways.all() {
                let (strategy, exchange) = Way::names(way);
                let title = format!("{} {strategy} {exchange}", model.name);
                progress.begin(&title);
                let traces = models.len() * self.ways.all().len();
                let trace = self.trace.as_ref();
                let trace = trace.map(|path| named(path, &title, traces));
                let step = self
                    .step(communicator, &model.config, way, trace)?
                    .statistics()?;
                let alone = measured.iter().find(|other| other.exchange.is_none());
                let alone = alone.map(|alone| alone.step.clone());
                let exposed_ms = alone.as_ref().map(|alone| step.mean_ms - alone.mean_ms);
                let speedup = alone.as_ref().and_then(|alone| Speedup::new(alone, &step));
                let is_seen = speedup.is_some_and(|s| s.verdict() == Verdict::Slower);
                let mut row = Fields::of(&Row {
                    model: model.name.clone(),
                    strategy,
                    exchange,
                    step: step.clone(),
                    exposed_ms,
                    exposed_percent: exposed_ms.map(|ms| 100.0 * ms / step.mean_ms),
                    tokens_per_s: (1e3 * (ranks * self.batch_size * self.length()) as f64
                        / step.mean_ms) as u64,
                    efficiency_percent: alone.map(|alone| 100.0 * alone.mean_ms / step.mean_ms),
                })?;
                report.rows.push(row.clone());
                row.insert("time", mean_and_std(&row));
                for (shown, key) in [
                    ("exposed", "exposed_ms"),
                    ("exposed_share", "exposed_percent"),
                ] {
                    let value = row.get(key).cloned().filter(|value| !value.is_null());
                    row.insert(
                        shown,
                        value.map(|ms| if is_seen { ms } else { "in the noise".into() }),
                    );
                }
                report.lines.push(row);
                measured.push(Measured {
                    strategy,
                    exchange: way.map(|way| way.exchange.exchange),
                    step,
                });
            }
            report
                .answers
                .extend(answers::steps(&model.name, ranks, &measured));
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
        Ok(report)
    }

    fn step(
        &self,
        communicator: &Communicator,
        config: &TransformerConfig,
        way: Option<Way>,
        trace: Option<PathBuf>,
    ) -> Result<tallow::bench::Timing> {
        let (job, mut optimizer, [tokens, targets]) = self.job(communicator, config, way)?;
        let mut planned = job.planned(&optimizer, &self.step_config()?)?;
        planned.prepare((&tokens, &targets))?;
        communicator.barrier()?;
        let mut stopwatch = Stopwatch::new(communicator.device()).warmup(self.warmup_steps);
        let mut step = || planned.run(&mut optimizer, (&tokens, &targets)).map(drop);
        let timing = stopwatch.measure(self.steps, &mut step);
        if let Some(path) = trace {
            let profiler = match communicator.rank() {
                0 => Some(Profiler::start_on(communicator.device())?),
                _ => None,
            };
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
        timing
    }

    pub fn step_config(&self) -> Result<StepConfig> {
        let budget = self.ways.memory_budget_gib;
        Ok(StepConfig {
            precision: self.precision.precision()?,
            memory_budget_bytes: budget.map(gib_bytes),
            ..Default::default()
        })
    }

    /// A rank's model, optimizer and batch.
    pub(super) fn job(
        &self,
        communicator: &Communicator,
        config: &TransformerConfig,
        way: Option<Way>,
    ) -> Result<(Job, AdamW, [Tensor; 2])> {
        let config = with_attention(config, self.attention);
        let job = Job::new(communicator, &config, self.common.seed, way)?;
        let mut optimizer = AdamW::new(job.parameters(), AdamWConfig::default())?;
        if way.is_some_and(|way| way.strategy == Strategy::ShardedOptimizer) {
            optimizer.shard(communicator)?;
        }
        let batch = self.batch(communicator.rank(), &config, communicator.device())?;
        Ok((job, optimizer, batch))
    }

    /// Tokens and targets of a rank, (B, T) u32.
    fn batch(
        &self,
        rank: usize,
        config: &TransformerConfig,
        device: &Device,
    ) -> Result<[Tensor; 2]> {
        let count = self.batch_size * self.length();
        let vocab_size = config.vocab_size as u64;
        // Multiples of a prime, other ones on each rank.
        let ids = |offset: u64| {
            (0..count as u64).map(move |i| (((i + offset) * 7919) % vocab_size) as u32)
        };
        let shape = (self.batch_size, self.length());
        let start = (rank * count) as u64;
        let of = |offset| Tensor::from_iter(ids(offset), device)?.reshape(shape);
        Ok([of(start)?, of(start + 1)?])
    }
}

/// A rank's model, and how it trains with the others.
pub struct Job {
    pub model: TransformerLM,
    replicated: Option<Replicated>,
    sharded: Option<FullyShard>,
}

impl Job {
    pub fn new(
        communicator: &Communicator,
        model: &TransformerConfig,
        seed: u64,
        way: Option<Way>,
    ) -> Result<Self> {
        if let Some(parts) = way.and_then(Way::parts) {
            let sharded = FullyShard::new(communicator, parts)?;
            let weights = nn::seeded(seed, DType::F32, communicator.device());
            return Ok(Self {
                model: TransformerLM::from_var_builder(model, sharded.builder(weights))?,
                replicated: None,
                sharded: Some(sharded),
            });
        }
        let model = TransformerLM::new(model, seed, communicator.device())?;
        let replicated =
            way.map(|way| Replicated::new(communicator, model.parameters(), way.exchange));
        Ok(Self {
            replicated: replicated.transpose()?,
            sharded: None,
            model,
        })
    }

    /// What this rank trains.
    pub fn parameters(&self) -> Vec<(String, Var)> {
        match &self.sharded {
            Some(sharded) => sharded.parameters(),
            None => self.model.parameters(),
        }
    }

    pub fn planned(&self, optimizer: &AdamW, config: &StepConfig) -> Result<Step<'static>> {
        let model = &self.model;
        match (&self.replicated, &self.sharded) {
            (Some(replicated), _) => {
                Step::for_model(model, optimizer, config)?.replicated(optimizer, replicated)
            }
            (_, Some(sharded)) => Step::fully_sharded_for_model(model, optimizer, config, sharded),
            _ => Step::for_model(model, optimizer, config),
        }
    }
}
