//! Estimated training steps of more GPUs than there are.

use super::common::models::{Model, with_attention};
use super::common::ranks::Strategy;
use super::common::sweep::Progress;
use super::steps::Way;
use super::{Flags, common, values};
use clap::Args;
use tallow::bench::{plan_columns, plan_report};
use tallow::compile::{Batch, Rates, Step, StepConfig, StepRanks, Target};
use tallow::distributed::Shard;
use tallow::report::{Column, Report};
use tallow::{Error, Result};

/// Overhead of each kernel, in microseconds.
const KERNEL_US: f64 = 1.0;

/// What was measured of a GPU and of the network.
#[derive(Args, Clone, Debug)]
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
    alone_ms: Vec<f64>,

    /// Bus rate of all-reduces, one or for each world size
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "GB/S")]
    reduce_gb_s: Vec<f64>,

    /// Bus rate of all-gathers and reduce-scatters, likewise
    #[arg(long, num_args = 1.., value_delimiter = ',', value_name = "GB/S")]
    gather_gb_s: Vec<f64>,

    /// Overhead of each collective, in microseconds
    #[arg(
        long,
        hide_short_help = true,
        default_value_t = 20.0,
        value_name = "US"
    )]
    exchange_us: f64,

    /// Share of an exchange that kernels lose, 0 to 1
    #[arg(
        long,
        hide_short_help = true,
        default_value_t = 0.0,
        value_name = "SHARE"
    )]
    contention: f64,
}

pub fn columns() -> Vec<Column> {
    let mut columns = plan_columns();
    columns.insert(0, Column::text("model", "Model"));
    columns.insert(2, Column::text("exchange", "Gradients averaged").minor(0));
    columns
}

impl Flags {
    /// Plans the steps of a rank, and estimates their time by the rates that are given.
    pub fn on_paper(&self, models: &[Model], progress: &mut Progress) -> Result<Report> {
        let mut all = Report {
            title: "Estimated steps of more GPUs".into(),
            columns: columns(),
            ..Default::default()
        };
        for (place, model) in models.iter().enumerate() {
            let config = with_attention(&model.config, self.attention);
            let fitted = |rates: Rates| match self.paper.alone_ms(place, models.len())? {
                Some(ms) => {
                    let batch = Batch::hollow(self.batch_size, self.length())?;
                    let step = self.step_config()?;
                    let (alone, _) = Step::plan_of(Target::Cuda, &config, &step, batch)?;
                    rates.fitted_to(&alone, ms / 1e3)
                }
                None => Ok(rates),
            };
            let ranks = self.paper.rates()?.into_iter();
            let ranks = ranks.map(|(ranks, rates)| Ok((ranks, fitted(rates)?)));
            let ranks = ranks.collect::<Result<Vec<_>>>()?;
            for (strategy, exchange, plan) in self.strategies()? {
                progress.begin(format_args!("{}, {strategy}, estimated", model.name));
                let tokens = [self.batch_size, self.length()];
                let report = plan_report(&config, tokens, &[(strategy, plan)], &ranks)?;
                all.notes = report.notes;
                all.rows.extend(report.rows.into_iter().map(|mut row| {
                    row.insert("model", model.name.as_str());
                    row.insert("exchange", exchange.as_str());
                    row
                }));
            }
        }
        Ok(all)
    }

    /// What steps measure too, but for exchanges that do not overlap.
    fn strategies(&self) -> Result<Vec<(&'static str, String, StepConfig)>> {
        let plan = self.step_config()?;
        let own = Shard {
            rank: 0,
            world_size: 1, // whatever the number of GPUs
        };
        let ways = self.ways.all().into_iter().flatten();
        let plans = ways.map(|way| {
            let ranks = match (way.strategy, way.parts()) {
                (_, Some(parts)) => StepRanks::FullySharded(parts, own),
                (Strategy::ShardedOptimizer, _) => StepRanks::ShardedOptimizer(way.exchange, own),
                _ => StepRanks::Replicated(way.exchange),
            };
            let plan = StepConfig {
                ranks,
                ..plan.clone()
            };
            let (strategy, exchange) = Way::names(Some(way));
            (strategy, exchange, plan)
        });
        Ok(plans.collect())
    }
}

impl PaperFlags {
    /// The flags' long names.
    pub const NAMES: &[&str] = &[
        "world-size",
        "product-tflops",
        "memory-gb-s",
        "alone-ms",
        "reduce-gb-s",
        "gather-gb-s",
        "exchange-us",
        "contention",
    ];

    pub fn rates_in_words(&self) -> String {
        let list = |numbers: &[f64]| {
            let numbers: Vec<String> = numbers.iter().map(f64::to_string).collect();
            numbers.join(", ")
        };
        let mut words = vec![
            format!(
                "products {} TFLOP/s",
                self.product_tflops.unwrap_or(f64::NAN)
            ),
            format!("memory {} GB/s", self.memory_gb_s.unwrap_or(f64::NAN)),
            format!("a kernel {KERNEL_US} us more"),
        ];
        if !self.alone_ms.is_empty() {
            words.push(format!(
                "scaled to steps alone of {} ms",
                list(&self.alone_ms)
            ));
        }
        words.push(format!("all-reduce {} GB/s", list(&self.reduce_gb_s)));
        words.push(format!(
            "gather and scatter {} GB/s",
            list(&self.gather_gb_s)
        ));
        words.push(format!("a collective {} us more", self.exchange_us));
        words.push(format!("contention {}", self.contention));
        words.join(", ")
    }

    /// The rates of each number of GPUs.
    fn rates(&self) -> Result<Vec<(usize, Rates)>> {
        let wanted = |flag, value: Option<f64>| value.ok_or_else(|| missing(flag));
        let product_flops = 1e12 * wanted("--product-tflops", self.product_tflops)?;
        let memory_bytes = 1e9 * wanted("--memory-gb-s", self.memory_gb_s)?;
        let bus_bytes = |flag, rates: &[f64], place| match rates {
            [] => Err(missing(flag)),
            [one] => Ok(1e9 * one),
            _ => Ok(1e9 * of_each(flag, rates, place, self.world_size.len())?),
        };
        let sizes = self.world_size.iter().enumerate();
        let rates = sizes.map(|(place, world_size)| {
            let rates = Rates {
                product_flops,
                memory_bytes,
                kernel_seconds: KERNEL_US / 1e6,
                reduce_bytes: bus_bytes("--reduce-gb-s", &self.reduce_gb_s, place)?,
                gather_bytes: bus_bytes("--gather-gb-s", &self.gather_gb_s, place)?,
                exchange_seconds: self.exchange_us / 1e6,
                contention: self.contention,
            };
            rates.validate()?;
            Ok((*world_size, rates))
        });
        rates.collect()
    }

    fn alone_ms(&self, place: usize, models: usize) -> Result<Option<f64>> {
        match self.alone_ms.is_empty() {
            true => Ok(None),
            false => of_each("--alone-ms", &self.alone_ms, place, models).map(Some),
        }
    }
}

fn missing(flag: &'static str) -> Error {
    Error::Config {
        config: common::PROGRAM,
        field: flag,
        expected: "a rate for --part paper".into(),
        got: "none".into(),
        hint: "measure it (--part collectives, e2e_benchmark), or read it off a data sheet".into(),
    }
}

fn of_each(flag: &'static str, values: &[f64], place: usize, count: usize) -> Result<f64> {
    match values.len() == count {
        true => Ok(values[place]),
        false => Err(Error::Config {
            config: common::PROGRAM,
            field: flag,
            expected: format!("{count} numbers"),
            got: values.len().to_string(),
            hint: "give one for each".into(),
        }),
    }
}
