//! What a rank's memory holds, before and after an update.

use super::common::models::{Model, with_attention};
use super::common::ranks::Strategy;
use super::steps::{Job, Way};
use super::{Flags, common};
use tallow::dist::{Communicator, ReplicatedConfig};
use tallow::memory::Meter;
use tallow::model::TransformerConfig;
use tallow::optim::{AdamW, AdamWConfig};
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

pub fn columns() -> Vec<Column> {
    vec![
        Column::text("model", "Model"),
        Column::text("strategy", "Strategy"),
        Column::mib("state_bytes", "Optimizer state"),
        Column::mib("init_bytes", "After init"),
        Column::mib("before_bytes", "Before update"),
        Column::mib("after_bytes", "After update"),
        Column::mib("peak_bytes", "Peak"),
    ]
}

impl Flags {
    pub fn memory(&self, communicator: &Communicator, models: &[Model]) -> Result<Report> {
        let mut rows = Vec::new();
        for model in models {
            for strategy in &self.ways.strategy {
                common::progress(format_args!("{}, memory, {}", model.name, strategy.name()));
                let mut row = Fields::new();
                row.insert("model", model.name.as_str());
                row.insert("strategy", strategy.name());
                row.merge(self.memory_of(communicator, &model.config, *strategy)?);
                rows.push(row);
            }
        }
        Ok(Report {
            title: "Memory of a rank".into(),
            columns: columns(),
            rows,
            notes: vec![
                "Of rank 0, in an eager step, the second: what tensors take when model and optimizer are there, when \
                 all gradients are too, and when weights are updated. The peak is that of the whole step."
                    .into(),
            ],
            ..Default::default()
        })
    }

    fn memory_of(
        &self,
        communicator: &Communicator,
        config: &TransformerConfig,
        strategy: Strategy,
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
        let base = taken()?;
        let of_run = || Ok::<_, Error>(taken()?.saturating_sub(base));
        let config = with_attention(config, self.attention);
        let exchange = ReplicatedConfig::default();
        let way = Some(Way { strategy, exchange });
        let job = Job::new(communicator, &config, self.common.seed, way)?;
        let mut optimizer = AdamW::new(job.parameters(), AdamWConfig::default())?;
        if strategy == Strategy::ShardedOptimizer {
            optimizer.shard(communicator)?;
        }
        let [tokens, targets] = self.batch(communicator.rank(), &config, device)?;
        let precision = self.precision.precision()?;
        let init = of_run()?;
        let mut row = Fields::new();
        for _ in 0..2 {
            meter.reset_peak();
            let loss = precision.run(|| job.model.loss(&tokens, &targets))?;
            let gradients = job.backward(loss)?;
            let before = of_run()?;
            optimizer.step(&gradients)?;
            let after = of_run()?;
            row.insert("before_bytes", before);
            row.insert("after_bytes", after);
            let peak = meter.peak_bytes().map(|peak| peak.saturating_sub(base));
            row.insert("peak_bytes", peak);
        }
        let state = optimizer.state().into_iter();
        let state = state.map(|(_, x)| (x.elem_count() * x.dtype().size_in_bytes()) as u64);
        row.insert("state_bytes", state.sum::<u64>());
        row.insert("init_bytes", init);
        Ok(row)
    }
}
