//! Estimated memory and time of training on several GPUs.

use crate::compile::{Batch, Plan, Rates, Step, StepConfig, StepRanks, Target, Timeline};
use crate::distributed::Shard;
use crate::model::TransformerConfig;
use crate::report::{Column, Fields, Report};
use crate::{Error, Result};

/// A row for each strategy and number of GPUs: what a rank's memory holds, what it sends, and what a step takes, before
/// there is any GPU.
///
/// Each step is planned, as on a GPU, with micro-batches (B, T) a rank: memory is [`Plan::total_bytes`], of rank 0, and
/// time is [`Plan::timeline`] by the rates that are given for the number of ranks. A strategy is a configuration with a
/// name, whose [`ranks`](StepConfig::ranks) say what is divided; which rank of how many does not matter here.
/// Efficiency is the step of a rank alone over that of the row.
///
/// ```
/// use tallow::bench;
/// use tallow::compile::{StepConfig, Rates, StepRanks};
/// use tallow::distributed::{FullyShardConfig, ReplicatedConfig, Shard};
/// use tallow::model::TransformerConfig;
/// use tallow::report::Format;
///
/// let ranks = StepRanks::Replicated(ReplicatedConfig::default());
/// let replicated = StepConfig { ranks, ..Default::default() };
/// let ranks = StepRanks::FullySharded(FullyShardConfig::default(), Shard { rank: 0, world_size: 1 });
/// let fully_sharded = StepConfig { ranks, ..Default::default() };
/// let rates = Rates {
///     product_flops: 50e12,
///     memory_bytes: 3e12,
///     kernel_seconds: 1e-6,
///     reduce_bytes: 300e9,
///     gather_bytes: 200e9,
///     exchange_seconds: 20e-6,
///     contention: 0.4,
/// };
/// let between_hosts = Rates { reduce_bytes: 40e9, gather_bytes: 40e9, ..rates };
/// let strategies = [("replicated", replicated), ("fully sharded", fully_sharded)];
/// let ranks = [(8, rates), (64, between_hosts)];
/// let report = bench::plan_report(&TransformerConfig::small(), [4, 256], &strategies, &ranks)?;
/// assert_eq!(report.rows.len(), 4);
/// report.write_to(Format::Text, &mut std::io::stdout())?;
/// # Ok::<(), tallow::Error>(())
/// ```
///
/// # Errors
/// As [`Step::plan_of`] and [`Plan::timeline`].
pub fn plan_report(
    model: &TransformerConfig,
    [batch_size, length]: [usize; 2],
    strategies: &[(&str, StepConfig)],
    ranks: &[(usize, Rates)],
) -> Result<Report> {
    let planned = |config: &StepConfig| {
        let batch = Batch::hollow(batch_size.saturating_mul(config.accumulation), length)?;
        Ok::<_, Error>(Step::plan_of(Target::Cuda, model, config, batch)?.0)
    };
    let mut rows = Vec::new();
    for (name, config) in strategies {
        let alone = StepConfig {
            ranks: StepRanks::Alone,
            memory_budget_bytes: None, // there may be no GPU with room for all of it
            ..config.clone()
        };
        let alone = planned(&alone)?;
        for (world_size, rates) in ranks {
            let own = Shard {
                rank: 0,
                world_size: *world_size,
            };
            let ranks = match config.ranks {
                StepRanks::ShardedOptimizer(exchange, _) => {
                    StepRanks::ShardedOptimizer(exchange, own)
                }
                StepRanks::FullySharded(parts, _) => StepRanks::FullySharded(parts, own),
                others => others,
            };
            let config = StepConfig {
                ranks,
                ..config.clone()
            };
            let plan = planned(&config)?;
            let step = plan.timeline(*world_size, rates)?;
            let alone_seconds = alone.timeline(1, rates)?.step_seconds;
            let mut row = Fields::new();
            row.insert("strategy", *name);
            row.insert("world_size", *world_size);
            row.merge(fields(&plan, &step));
            let all_tokens = (world_size * batch_size * config.accumulation * length) as f64;
            row.insert("tokens_per_second", all_tokens / step.step_seconds);
            let efficiency = alone_seconds / step.step_seconds;
            row.insert("efficiency_percent", 100.0 * efficiency);
            rows.push(row);
        }
    }
    Ok(Report {
        columns: plan_columns(),
        rows,
        notes: vec![
            "Estimated from a plan and the rates given: kernels, the time they wait for exchanges, and the time they lose to \
             exchanges that run next to them."
                .into(),
            "Efficiency is the step of one GPU alone over this step. It passes 100% where the GPUs also divide the \
             optimizer's update among them."
                .into(),
        ],
        ..Default::default()
    })
}

fn fields(plan: &Plan, step: &Timeline) -> Fields {
    let mut fields = Fields::new();
    fields.insert("rank_bytes", plan.total_bytes());
    fields.insert("sent_bytes", step.sent_bytes);
    for (key, seconds) in [
        ("kernel_ms", step.kernel_seconds),
        ("exchange_ms", step.exchange_seconds),
        ("waiting_ms", step.waiting_seconds),
        ("contention_ms", step.contention_seconds),
        ("step_ms", step.step_seconds),
    ] {
        fields.insert(key, 1e3 * seconds);
    }
    fields
}

/// The columns of [`plan_report()`].
pub fn plan_columns() -> Vec<Column> {
    vec![
        Column::text("strategy", "Strategy"),
        Column::text("world_size", "GPUs"),
        Column::mib("rank_bytes", "Memory"),
        Column::mib("sent_bytes", "Sent").minor(1),
        Column::ms("kernel_ms", "Kernels").minor(3),
        Column::ms("exchange_ms", "Exchange"),
        Column::ms("waiting_ms", "Waits").minor(2),
        Column::ms("contention_ms", "Contention").minor(2),
        Column::ms("step_ms", "Step"),
        Column::number("tokens_per_second", "Tokens/s", "", 0)
            .grouped()
            .minor(1),
        Column::number("efficiency_percent", "Efficiency", "%", 1),
    ]
}
