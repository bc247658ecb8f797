//! Estimated training steps of more GPUs than the machine has.

use super::common::models::Model;
use super::common::refusal;
use super::common::ways::Way;
use super::{Rank, values};
use clap::Args;
use serde::Serialize;
use tallow::Result;
use tallow::compile::{Batch, Plan, Rates, Step, StepConfig, Target};
use tallow::distributed::Shard;
use tallow::model::TransformerLM;
use tallow::report::{Column, Report};

/// Measured rates of a GPU and of the network.
#[derive(Args, Clone, Debug, Serialize)]
#[command(next_help_heading = "Estimated steps of more GPUs (--part paper)")]
pub struct PaperFlags {
    /// Numbers of GPUs; several
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [8, 64, 512], value_name = "N",
          value_parser = values::count())]
    world_size: Vec<usize>,

    /// Rate of a GPU's matmuls, in TFLOP/s
    #[arg(long, value_name = "TFLOPS")]
    product_tflops: Option<f64>,

    /// Rate at which kernels read and write, in GB/s
    #[arg(long, value_name = "GB/S")]
    memory_gb_s: Option<f64>,

    /// Measured step of one GPU for each model
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "MS")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    alone_ms: Vec<f64>,

    /// Bus rate of all-reduces, one or for each world size
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "GB/S")]
    reduce_gb_s: Vec<f64>,

    /// Bus rate of all-gathers and reduce-scatters, likewise
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "GB/S")]
    gather_gb_s: Vec<f64>,

    /// Overhead of each collective, in microseconds
    #[arg(long, hide_short_help = true, default_value_t = 20.0, value_name = "US", value_parser = values::from_0)]
    exchange_us: f64,

    /// Share of an exchange that kernels lose, 0 to 1
    #[arg(long, hide_short_help = true, default_value_t = 0.0, value_name = "SHARE", value_parser = values::under_1)]
    contention: f64,
}

pub fn columns() -> Vec<Column> {
    Way::columns([
        Column::text("world_size", "GPUs"),
        Column::mib("rank_bytes", "Memory"),
        Column::mib("sent_bytes", "Sent"),
        Column::ms("kernel_seconds", "Kernels").scaled(1e-3),
        Column::ms("exchange_seconds", "Exchange").scaled(1e-3),
        Column::ms("waiting_seconds", "Waits").scaled(1e-3),
        Column::ms("contention_seconds", "Contention").scaled(1e-3),
        Column::ms("step_ms", "Step"),
        Column::count("tokens_per_second", "Tokens/s"),
        Column::number("efficiency_percent", "Efficiency", "%", 1),
    ])
}

impl Rank<'_> {
    /// Plans the steps of rank 0 of each number of GPUs, and estimates their time by the given rates.
    pub fn paper(&mut self, report: &mut Report) -> Result<()> {
        let flags = &self.flags.paper;
        let size = self.flags.sizes();
        for (index, Model { name, config }) in self.models.iter().enumerate() {
            let model = TransformerLM::meta(config)?.with_attention(self.flags.attention)?;
            let planned = |config: &StepConfig| -> Result<Plan> {
                let batch = Batch::meta(size[0], size[1])?;
                Ok(Step::plan_for_model(Target::Cuda, &model, config, batch)?.0)
            };
            let mut rates = flags.rates()?;
            if !flags.alone_ms.is_empty() {
                check_count("--alone-ms", &flags.alone_ms, self.models.len())?;
                let alone = planned(&self.step)?;
                for (_, rates) in &mut rates {
                    *rates = rates.fitted_to(&alone, flags.alone_ms[index] / 1e3)?;
                }
            }
            let alone = planned(&StepConfig {
                memory_budget_bytes: None, // there may be no GPU with memory for all of it
                ..self.step.clone()
            })?;
            for (index, way) in self.ways().iter().enumerate() {
                if way.is_alone() {
                    continue;
                }
                self.progress.begin(format!("{name} paper {way}"));
                for &(world_size, ref rates) in &rates {
                    let rank = 0;
                    let plan = planned(&StepConfig {
                        ranks: self.flags.ways.all(Shard { rank, world_size })[index],
                        ..self.step.clone()
                    })?;
                    let step = plan.timeline(world_size, rates)?;
                    let alone_seconds = alone.timeline(1, rates)?.step_seconds;
                    let tokens = (world_size * size[0] * size[1]) as f64;
                    let mut row = way.row(name, size, &step)?;
                    row.insert("world_size", world_size)
                        .insert("rank_bytes", plan.total_bytes())
                        .insert("step_ms", 1e3 * step.step_seconds)
                        .insert("tokens_per_second", tokens / step.step_seconds)
                        .insert(
                            "efficiency_percent",
                            100.0 * alone_seconds / step.step_seconds,
                        );
                    report.rows.push(row);
                }
            }
        }
        report.notes = vec![
            "Estimated from a plan and the rates given, with 1 us for each kernel: kernels, the time they wait for \
             exchanges, and the time they lose to exchanges that run next to them."
                .into(),
            "Efficiency is the step of one GPU alone over this step. It passes 100% where the GPUs also divide the \
             optimizer's update among them."
                .into(),
        ];
        Ok(())
    }
}

impl PaperFlags {
    /// Returns each number of GPUs with its rates.
    fn rates(&self) -> Result<Vec<(usize, Rates)>> {
        let product_flops = 1e12 * given("--product-tflops", self.product_tflops)?;
        let memory_bytes = 1e9 * given("--memory-gb-s", self.memory_gb_s)?;
        let count = self.world_size.len();
        let of_each = |flag, rates: &[f64]| -> Result<Vec<f64>> {
            let first = given(flag, rates.first().copied())?;
            if rates.len() == 1 {
                return Ok(vec![first; count]);
            }
            check_count(flag, rates, count)?;
            Ok(rates.to_vec())
        };
        let reduce = of_each("--reduce-gb-s", &self.reduce_gb_s)?;
        let gather = of_each("--gather-gb-s", &self.gather_gb_s)?;
        let rates = self.world_size.iter().zip(reduce.iter().zip(gather));
        let rates = rates.map(|(world_size, (reduce, gather))| {
            let rates = Rates {
                matmul_flops: product_flops,
                memory_bytes,
                kernel_seconds: 1e-6,
                reduce_bytes: 1e9 * reduce,
                gather_bytes: 1e9 * gather,
                exchange_seconds: self.exchange_us / 1e6,
                contention: self.contention,
            };
            (*world_size, rates)
        });
        Ok(rates.collect())
    }
}

fn given(flag: &'static str, rate: Option<f64>) -> Result<f64> {
    let hint = "measure it (--part collectives, e2e_benchmark), or read it off a data sheet";
    rate.ok_or_else(|| refusal(flag, "a rate for --part paper", "none", hint))
}

fn check_count(flag: &'static str, values: &[f64], count: usize) -> Result<()> {
    let expected = format!("{count} numbers");
    match values.len() == count {
        true => Ok(()),
        false => Err(refusal(flag, expected, values.len(), "give one for each")),
    }
}
