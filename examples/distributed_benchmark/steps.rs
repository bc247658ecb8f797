//! Training steps by how their gradients are exchanged.

use super::common::models::{Model, with_attention};
use super::common::outputs::named;
use super::common::ranks::Strategy;
use super::{Flags, common, values};
use candle_core::{DType, Device, Tensor, Var};
use clap::Args;
use std::path::PathBuf;
use tallow::bench::Stopwatch;
use tallow::compile::{Step, StepConfig};
use tallow::distributed::{
    Communicator, Exchange, FullyShard, FullyShardConfig, Replicated, ReplicatedConfig,
};
use tallow::model::{TransformerConfig, TransformerLM};
use tallow::optim::{AdamW, AdamWConfig};
use tallow::profile::{self, Profiler};
use tallow::report::{Column, Fields, Report};
use tallow::{Result, nn};

/// In a trace: the first of a planned step on a GPU records what the others replay.
const TRACED_STEPS: usize = 3;

/// How steps are run.
#[derive(Args, Clone, Debug)]
pub struct Ways {
    /// Bytes of a bucket, in MiB: a row each
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 10, 100, 1000], value_name = "MIB")]
    bucket_mib: Vec<u64>,

    /// Round gradients to bf16 to average them
    #[arg(long)]
    exchange_bf16: bool,

    /// What is divided among the ranks, besides the batch
    #[arg(long, value_enum, num_args = 1.., value_delimiter = ',', default_value = "replicated")]
    pub strategy: Vec<Strategy>,

    /// Leave out the exchanges that do not overlap with backward
    #[arg(long)]
    only_overlapped: bool,

    /// Leave out the steps alone, which a model may be too large for
    #[arg(long)]
    without_alone: bool,

    /// Recompute in backward so much that the arena of a step is within these, in GiB
    #[arg(long, value_name = "GIB", value_parser = values::gib)]
    memory_budget_gib: Option<f64>,
}

/// How ranks train together.
#[derive(Clone, Copy)]
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
        let serial = serial.into_iter().filter(|_| !self.only_overlapped);
        let each = Exchange::Overlapped { bucket_bytes: 0 };
        let each = Some(each).filter(|_| !self.only_overlapped);
        let buckets = self.bucket_mib.iter();
        let buckets = buckets.map(|mib| Exchange::Overlapped {
            bucket_bytes: mib << 20,
        });
        let dtype = self.exchange_bf16.then_some(DType::BF16);
        let exchanged = serial.chain(each).chain(buckets);
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

pub fn columns() -> Vec<Column> {
    vec![
        Column::text("model", "Model"),
        Column::text("strategy", "Strategy"),
        Column::text("exchange", "Gradients averaged"),
        Column::ms("step_ms", "Step"),
        Column::ms("std_ms", "Std").minor(1),
        Column::ms("exposed_ms", "Exposed"),
        Column::number("exposed_percent", "Exposed", "%", 1),
        Column::count("tokens_per_s", "Tokens/s, all ranks"),
        Column::number("efficiency_percent", "Of alone", "%", 1),
    ]
}

impl Flags {
    pub fn training_steps(&self, communicator: &Communicator, models: &[Model]) -> Result<Report> {
        let mut rows = Vec::new();
        for model in models {
            let mut alone_ms = f64::NAN;
            for way in self.ways.all() {
                let (strategy, exchange) = Way::names(way);
                common::progress(format_args!("{}, {strategy}, {exchange}", model.name));
                let title = format!("{} {strategy} {exchange}", model.name);
                let traces = models.len() * self.ways.all().len();
                let trace = self.trace.as_ref();
                let trace = trace.map(|path| named(path, &title, traces));
                let timing = self.step(communicator, &model.config, way, trace)?;
                let statistics = timing.statistics()?;
                let step_ms = statistics.median_ms;
                if way.is_none() {
                    alone_ms = step_ms;
                }
                let exposed_ms = step_ms - alone_ms;
                let ranks = communicator.world_size();
                let tokens = ranks * self.batch_size * self.context_length;
                let mut row = Fields::new();
                row.insert("model", model.name.as_str());
                row.insert("strategy", strategy);
                row.insert("exchange", exchange);
                row.insert("step_ms", step_ms);
                row.insert("std_ms", statistics.std_ms);
                row.insert("exposed_ms", exposed_ms);
                row.insert("exposed_percent", 100.0 * exposed_ms / step_ms);
                row.insert("tokens_per_s", (tokens as f64 / step_ms * 1e3) as u64);
                row.insert("efficiency_percent", 100.0 * alone_ms / step_ms);
                rows.push(row);
            }
        }
        Ok(Report {
            title: "Training steps".into(),
            columns: columns(),
            rows,
            notes: vec![
                "Times are medians of forward, loss, backward, exchange and AdamW. Exposed is what the exchange adds \
                 to the step alone, which runs on all ranks at once: the part of communication that nothing hides."
                    .into(),
            ],
            ..Default::default()
        })
    }

    fn step(
        &self,
        communicator: &Communicator,
        config: &TransformerConfig,
        way: Option<Way>,
        trace: Option<PathBuf>,
    ) -> Result<tallow::bench::Timing> {
        let device = communicator.device();
        let config = with_attention(config, self.attention);
        let job = Job::new(communicator, &config, self.common.seed, way)?;
        let mut optimizer = AdamW::new(job.parameters(), AdamWConfig::default())?;
        if way.is_some_and(|way| way.strategy == Strategy::ShardedOptimizer) {
            optimizer.shard(communicator)?;
        }
        let [tokens, targets] = self.batch(communicator.rank(), &config, device)?;
        let mut planned = job.planned(&optimizer, &self.step_config()?)?;
        planned.prepare((&tokens, &targets))?;
        communicator.barrier()?;
        let mut stopwatch = Stopwatch::new(device).warmup(self.warmup_steps);
        let mut step = || planned.run(&mut optimizer, (&tokens, &targets)).map(drop);
        let timing = stopwatch.measure(self.steps, &mut step);
        if let Some(path) = trace {
            let profiler = match communicator.rank() {
                0 => Some(Profiler::start_on(device)?),
                _ => None,
            };
            for _ in 0..TRACED_STEPS {
                let _step = profile::step();
                step()?;
            }
            if let Some(profiler) = profiler {
                profiler.finish()?.save_trace(path)?;
            }
        }
        communicator.check()?;
        timing
    }

    pub fn step_config(&self) -> Result<StepConfig> {
        let budget = self.ways.memory_budget_gib;
        Ok(StepConfig {
            precision: self.precision.precision()?,
            memory_budget_bytes: budget.map(|gib| (gib * 2f64.powi(30)) as u64),
            ..Default::default()
        })
    }

    /// Tokens and targets of a rank, (B, T) u32.
    pub(super) fn batch(
        &self,
        rank: usize,
        config: &TransformerConfig,
        device: &Device,
    ) -> Result<[Tensor; 2]> {
        let count = self.batch_size * self.context_length;
        let vocab_size = config.vocab_size as u64;
        // Multiples of a prime, other ones on each rank.
        let ids = |offset: u64| {
            (0..count as u64).map(move |i| (((i + offset) * 7919) % vocab_size) as u32)
        };
        let shape = (self.batch_size, self.context_length);
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
                Step::of(model, optimizer, config)?.replicated(optimizer, replicated)
            }
            (_, Some(sharded)) => Step::of_fully_sharded(model, optimizer, config, sharded),
            _ => Step::of(model, optimizer, config),
        }
    }
}
