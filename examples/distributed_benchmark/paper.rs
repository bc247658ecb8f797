//! Estimated training steps of more GPUs than the machine has.

use super::common::ways::Way;
use super::common::{refusal, values};
use super::{Rank, row, table};
use clap::Args;
use serde::Serialize;
use tallow::Result;
use tallow::compile::{Batch, Plan, Rates, Step, StepConfig, StepRanks, Target};
use tallow::distributed::Shard;
use tallow::model::TransformerLM;
use tallow::report::{Column, Report, counted};

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

impl Rank<'_> {
    /// Plans the steps of rank 0 of each number of GPUs, and estimates their time by the given rates.
    pub fn paper(&self) -> Result<Report> {
        let (flags, [b, t]) = (&self.flags.paper, self.flags.sizes());
        let mut ways = self.flags.ways.all();
        ways.retain(|way| *way != Way::Alone);
        let mut sweep = self.sweep(self.models.len() * ways.len());
        let ms = |key, title| Column::ms(key, title).scaled(1e-3);
        let columns = Self::columns([
            Column::text("world_size", "GPUs"),
            Column::mib("rank_bytes", "Memory"),
            Column::mib("sent_bytes", "Sent"),
            ms("kernel_seconds", "Kernels"),
            ms("exchange_seconds", "Exchange"),
            ms("waiting_seconds", "Waits"),
            ms("contention_seconds", "Contention"),
            ms("step_seconds", "Step"),
            Column::count("tokens_per_second", "Tokens/s"),
            Column::number("efficiency_percent", "Efficiency", "%", 1),
        ]);
        let notes = [
            "Estimated from a plan and the rates given, with 1 us for each kernel. A step is its kernels, their waits \
             for exchanges, and the time that they lose while exchanges run (contention).",
            "Efficiency is the step of one GPU alone over this step: over 100% if the GPUs divide the optimizer's \
             update.",
        ];
        let mut report = table("Estimated steps of more GPUs", columns, &notes);
        for (index, model) in self.models.iter().enumerate() {
            let meta = TransformerLM::meta(&model.config)?.with_attention(self.flags.attention)?;
            let planned = |ranks, memory_budget_bytes| -> Result<Plan> {
                let config = StepConfig {
                    ranks,
                    memory_budget_bytes,
                    ..self.step.clone()
                };
                Ok(Step::plan_for_model(Target::Cuda, &meta, &config, Batch::meta(b, t)?)?.0)
            };
            let budget = self.step.memory_budget_bytes;
            let mut rates = flags.rates()?;
            if !flags.alone_ms.is_empty() {
                let alone_ms = value("--alone-ms", &flags.alone_ms, index, self.models.len())?;
                let alone = planned(StepRanks::Single, budget)?;
                for (_, rates) in &mut rates {
                    *rates = rates.fitted_to(&alone, alone_ms / 1e3)?;
                }
            }
            let alone = planned(StepRanks::Single, None)?; // no GPU may have the memory for all of it
            for &way in &ways {
                sweep.begins(format_args!("{} paper {way}", model.name));
                for &(world_size, ref rates) in &rates {
                    let rank = 0;
                    let ranks = self.flags.ways.step_ranks(way, Shard { rank, world_size });
                    let plan = planned(ranks, budget)?;
                    let step = plan.timeline(world_size, rates)?;
                    let per_step = |amount: f64| amount / step.step_seconds;
                    let alone_seconds = alone.timeline(1, rates)?.step_seconds;
                    let mut row = row(model, way, &step)?;
                    row.insert("world_size", world_size)
                        .insert("rank_bytes", plan.total_bytes())
                        .insert("tokens_per_second", per_step((world_size * b * t) as f64))
                        .insert("efficiency_percent", per_step(100.0 * alone_seconds));
                    report.rows.push(row);
                }
            }
        }
        Ok(report)
    }
}

impl PaperFlags {
    /// Returns each number of GPUs with its rates.
    fn rates(&self) -> Result<Vec<(usize, Rates)>> {
        let one = |flag, rate: &Option<f64>| value(flag, rate.as_slice(), 0, 1);
        let mut all = Vec::new();
        for (index, &world_size) in self.world_size.iter().enumerate() {
            let network = |flag, rates: &[f64]| match rates {
                [of_all] => Ok(*of_all),
                _ => value(flag, rates, index, self.world_size.len()),
            };
            let rates = Rates {
                matmul_flops: 1e12 * one("--product-tflops", &self.product_tflops)?,
                memory_bytes: 1e9 * one("--memory-gb-s", &self.memory_gb_s)?,
                kernel_seconds: 1e-6,
                reduce_bytes: 1e9 * network("--reduce-gb-s", &self.reduce_gb_s)?,
                gather_bytes: 1e9 * network("--gather-gb-s", &self.gather_gb_s)?,
                exchange_seconds: self.exchange_us / 1e6,
                contention: self.contention,
            };
            all.push((world_size, rates));
        }
        Ok(all)
    }
}

/// Returns the value at `index` of a flag that must have `count` values.
fn value(flag: &'static str, values: &[f64], index: usize, count: usize) -> Result<f64> {
    let hint = "measure them (--part collectives, e2e_benchmark), or read them off a data sheet";
    let expected = format!("{} for --part paper", counted(count, "number"));
    match values.len() == count {
        true => Ok(values[index]),
        false => Err(refusal(flag, expected, values.len(), hint)),
    }
}
