//! Estimated training steps of more GPUs than there are.

use super::common::models::{Model, with_attention};
use super::common::sweep::Progress;
use super::estimate::{Estimate, estimates};
use super::steps::Way;
use super::{Flags, common, values};
use clap::Args;
use serde::Serialize;
use tallow::compile::{Batch, Rates, Step, Target};
use tallow::report::{Column, Fields, Report};
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

#[derive(Serialize)]
struct Row<'a> {
    model: &'a str,
    strategy: &'a str,
    exchange: &'a str,
    #[serde(flatten)]
    estimate: Estimate,
}

pub fn columns() -> Vec<Column> {
    vec![
        Column::text("model", "Model"),
        Column::text("strategy", "Strategy"),
        Column::text("exchange", "Gradients averaged"),
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

impl Flags {
    /// Plans the steps of a rank, and estimates their time by the rates that are given. Exchanges are those of steps
    /// that are measured.
    pub fn on_paper(&self, models: &[Model], progress: &mut Progress) -> Result<Report> {
        let mut report = Report {
            title: "Estimated steps of more GPUs".into(),
            columns: columns(),
            notes: vec![
                "Estimated from a plan and the rates given: kernels, the time they wait for exchanges, and the time they \
                 lose to exchanges that run next to them."
                    .into(),
                "Efficiency is the step of one GPU alone over this step. It passes 100% where the GPUs also divide the \
                 optimizer's update among them."
                    .into(),
            ],
            ..Default::default()
        };
        let (tokens, step) = ([self.batch_size, self.length()], self.step_config()?);
        for (place, model) in models.iter().enumerate() {
            let config = with_attention(&model.config, self.attention);
            let mut ranks = self.paper.rates()?;
            if let Some(ms) = self.paper.alone_ms(place, models.len())? {
                let batch = Batch::meta(self.batch_size, self.length())?;
                let (alone, _) = Step::plan_for_model(Target::Cuda, &config, &step, batch)?;
                for (_, rates) in &mut ranks {
                    *rates = rates.fitted_to(&alone, ms / 1e3)?;
                }
            }
            for way in self.ways.all().into_iter().flatten() {
                let (strategy, exchange) = Way::names(Some(way));
                progress.begin(format_args!("{}, {strategy}, estimated", model.name));
                let divided = |shard| way.step_ranks(shard);
                for estimate in estimates(&config, tokens, &step, divided, &ranks)? {
                    report.rows.push(Fields::of(&Row {
                        model: &model.name,
                        strategy,
                        exchange: &exchange,
                        estimate,
                    })?);
                }
            }
        }
        Ok(report)
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

    /// The rates, for the report's configuration.
    pub fn describe(&self) -> Fields {
        let list = |numbers: &[f64]| {
            let numbers: Vec<String> = numbers.iter().map(f64::to_string).collect();
            numbers.join(", ")
        };
        let alone = Some(list(&self.alone_ms)).filter(|list| !list.is_empty());
        let mut fields = Fields::new();
        fields
            .insert("matmuls (TFLOP/s)", self.product_tflops)
            .insert("memory (GB/s)", self.memory_gb_s)
            .insert("overhead of a kernel (us)", KERNEL_US)
            .insert("measured steps alone (ms)", alone)
            .insert("all-reduce (GB/s)", list(&self.reduce_gb_s))
            .insert("gather and scatter (GB/s)", list(&self.gather_gb_s))
            .insert("overhead of a collective (us)", self.exchange_us)
            .insert("contention", self.contention);
        fields
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
                matmul_flops: product_flops,
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
