//! Estimated memory and time of a training step on several GPUs, without a GPU.

use serde::Serialize;
use tallow::Result;
use tallow::compile::{Batch, Plan, Rates, Step, StepConfig, StepRanks, Target};
use tallow::distributed::Shard;
use tallow::model::TransformerLM;

/// The estimated step of a number of GPUs.
#[derive(Clone, Debug, Serialize)]
pub struct Estimate {
    pub world_size: usize,
    pub rank_bytes: u64,
    pub sent_bytes: f64,
    pub kernel_ms: f64,
    pub exchange_ms: f64,
    pub waiting_ms: f64,
    pub contention_ms: f64,
    pub step_ms: f64,
    pub tokens_per_second: f64,
    /// The step of one GPU alone over this step.
    pub efficiency_percent: f64,
}

/// Plans the step of rank 0 on a GPU, with micro-batches (B, T), for each number of ranks. Memory is
/// [`Plan::total_bytes`], and time is [`Plan::timeline`] by the rates. `divided` returns what ranks divide and
/// exchange.
pub fn estimates(
    model: &TransformerLM,
    [batch_size, length]: [usize; 2],
    alone: &StepConfig,
    divided: impl Fn(Shard) -> StepRanks,
    ranks: &[(usize, Rates)],
) -> Result<Vec<Estimate>> {
    let rows = batch_size.saturating_mul(alone.accumulation);
    let planned = |config: &StepConfig| -> Result<Plan> {
        let batch = Batch::meta(rows, length)?;
        Ok(Step::plan_for_model(Target::Cuda, model, config, batch)?.0)
    };
    let plan_alone = planned(&StepConfig {
        memory_budget_bytes: None, // there may be no GPU with memory for all of it
        ..alone.clone()
    })?;
    let mut estimates = Vec::new();
    for &(world_size, ref rates) in ranks {
        let rank = 0;
        let plan = planned(&StepConfig {
            ranks: divided(Shard { rank, world_size }),
            ..alone.clone()
        })?;
        let step = plan.timeline(world_size, rates)?;
        let alone_seconds = plan_alone.timeline(1, rates)?.step_seconds;
        estimates.push(Estimate {
            world_size,
            rank_bytes: plan.total_bytes(),
            sent_bytes: step.sent_bytes,
            kernel_ms: 1e3 * step.kernel_seconds,
            exchange_ms: 1e3 * step.exchange_seconds,
            waiting_ms: 1e3 * step.waiting_seconds,
            contention_ms: 1e3 * step.contention_seconds,
            step_ms: 1e3 * step.step_seconds,
            tokens_per_second: (world_size * rows * length) as f64 / step.step_seconds,
            efficiency_percent: 100.0 * alone_seconds / step.step_seconds,
        });
    }
    Ok(estimates)
}
