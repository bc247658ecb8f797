//! What a rank's memory holds, before and after its steps.

use super::common::models::{Model, with_attention};
use super::common::ranks::Strategy;
use super::steps::{Job, Way};
use super::{Flags, common};
use tallow::distributed::Communicator;
use tallow::memory::Meter;
use tallow::model::TransformerConfig;
use tallow::optim::{AdamW, AdamWConfig};
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

pub fn columns() -> Vec<Column> {
    vec![
        Column::text("model", "Model"),
        Column::text("strategy", "Strategy"),
        Column::text("exchange", "Gradients averaged"),
        Column::mib("state_bytes", "Optimizer state").minor(1),
        Column::mib("init_bytes", "After init"),
        Column::mib("after_bytes", "After the step").minor(2),
        Column::mib("peak_bytes", "Peak"),
        Column::mib("predicted_bytes", "Predicted"),
    ]
}

impl Flags {
    pub fn memory(&self, communicator: &Communicator, models: &[Model]) -> Result<Report> {
        let mut rows = Vec::new();
        for model in models {
            for way in self.ways.all() {
                let (strategy, exchange) = Way::names(way);
                common::progress(format_args!(
                    "{}, memory, {strategy}, {exchange}",
                    model.name
                ));
                let mut row = Fields::new();
                row.insert("model", model.name.as_str());
                row.insert("strategy", strategy);
                row.insert("exchange", exchange);
                row.merge(self.memory_of(communicator, &model.config, way)?);
                rows.push(row);
            }
        }
        Ok(Report {
            title: "Memory of a rank".into(),
            columns: columns(),
            rows,
            notes: vec![
                "Of rank 0, in two steps: what tensors take when model and optimizer are there, and after the steps, \
                 when the plan's arena is there too. The peak stands beside what the plan says."
                    .into(),
            ],
            ..Default::default()
        })
    }

    fn memory_of(
        &self,
        communicator: &Communicator,
        config: &TransformerConfig,
        way: Option<Way>,
    ) -> Result<Fields> {
        let device = communicator.device();
        let meter = Meter::new(device);
        let taken = || {
            device.synchronize()?;
            meter.current_bytes().ok_or_else(|| Error::Order {
                op: "--part memory",
                problem: "this device has no counters".into(),
                hint: "measure on the CPU or a CUDA GPU".into(),
            })
        };
        communicator.barrier()?; // what was exchanged last is freed
        let base = taken()?;
        let of_run = || Ok::<_, Error>(taken()?.saturating_sub(base));
        let config = with_attention(config, self.attention);
        let job = Job::new(communicator, &config, self.common.seed, way)?;
        let mut optimizer = AdamW::new(job.parameters(), AdamWConfig::default())?;
        let strategy = way.map(|way| way.strategy);
        if strategy == Some(Strategy::ShardedOptimizer) {
            optimizer.shard(communicator)?;
        }
        let [tokens, targets] = self.batch(communicator.rank(), &config, device)?;
        let init = of_run()?;
        let mut row = Fields::new();
        meter.reset_peak();
        let mut planned = job.planned(&optimizer, &self.step_config()?)?;
        let predicted_bytes = planned.prepare((&tokens, &targets))?.total_bytes();
        for _ in 0..2 {
            planned.run(&mut optimizer, (&tokens, &targets))?;
        }
        row.insert("after_bytes", of_run()?);
        row.insert(
            "peak_bytes",
            meter.peak_bytes().map(|peak| peak.saturating_sub(base)),
        );
        row.insert("predicted_bytes", predicted_bytes);
        let state = optimizer.state().into_iter();
        let state = state.map(|(_, x)| (x.elem_count() * x.dtype().size_in_bytes()) as u64);
        row.insert("state_bytes", state.sum::<u64>());
        row.insert("init_bytes", init);
        Ok(row)
    }
}
