//! The memory of a rank, before and after its steps.

use super::answers::{self, Held};
use super::common::models::Model;
use super::common::ways::Way;
use super::{Rank, row, table};
use tallow::bench::{EndToEnd, Execution};
use tallow::memory::Meter;
use tallow::report::{Column, Report};
use tallow::{Error, Result};

impl Rank<'_> {
    /// Measures a rank's memory with each strategy and exchange.
    pub fn memory(&self) -> Result<Report> {
        // A first step allocates the memory that kernels keep until the process ends, which is no rank's.
        let first = EndToEnd {
            attention: self.flags.attention,
            step: self.step.precision.into(),
            execution: Execution::Planned,
            ..Default::default()
        };
        first.warm_up(self.communicator.device())?;
        let held = |key, title| Column::mib(key, title).group("A rank");
        let columns = Self::columns([
            held("init_bytes", "after init"),
            held("peak_bytes", "step's peak"),
            held("predicted_bytes", "predicted"),
            held("after_bytes", "after it"),
            held("state_bytes", "optimizer"),
        ]);
        let notes = [
            "After init: model and optimizer. A step's peak (predicted by its plan) is before the optimizer's update, \
             with the plan's arena and all gradients. The arena stays for the next step. Optimizer is its state alone.",
            "Ranks are threads of one process: its memory is divided by their number, so it is the mean of a rank. \
             Predicted is rank 0's, whose shard may be larger.",
        ];
        let notes = &notes[..1 + usize::from(self.are_threads)];
        let mut report = table("Memory of a rank", columns, notes);
        for (model, ways) in self.measure("memory", |model, way| self.held(model, way))? {
            let answers = answers::memory(&model.name, self.communicator.world_size(), &ways);
            report.answers.extend(answers);
            for (way, held) in ways {
                report.rows.push(row(model, way, &held)?);
            }
        }
        Ok(report)
    }

    fn held(&self, model: &Model, way: Way) -> Result<Held> {
        let (communicator, device) = (&self.communicator, self.communicator.device());
        let meter = Meter::new(device);
        // Threads share the meter: each reads it while all of them wait.
        let read = |counter: fn(&Meter) -> Option<u64>| {
            device.synchronize()?;
            communicator.barrier()?;
            let bytes = counter(&meter).ok_or_else(|| Error::Order {
                op: "--part memory",
                problem: "this device has no counters".into(),
                hint: "measure on the CPU or a CUDA GPU".into(),
            });
            communicator.barrier()?;
            bytes
        };
        let base = read(Meter::current_bytes)?;
        let sharing = [1, communicator.world_size() as u64][usize::from(self.are_threads)];
        let of_rank = |counter| read(counter).map(|bytes| bytes.saturating_sub(base) / sharing);
        let (mut step, mut optimizer, [tokens, targets]) = self.job(model, way)?;
        let init_bytes = of_rank(Meter::current_bytes)?;
        meter.reset_peak();
        communicator.barrier()?;
        let predicted_bytes = step.prepare((&tokens, &targets))?.total_bytes();
        for _ in 0..2 {
            step.run(&mut optimizer, (&tokens, &targets))?;
        }
        let after_bytes = of_rank(Meter::current_bytes)?;
        let peak_bytes = of_rank(Meter::peak_bytes)?;
        let state = optimizer.state().into_iter();
        let state = state.map(|(_, x)| (x.elem_count() * x.dtype().size_in_bytes()) as u64);
        Ok(Held {
            init_bytes,
            peak_bytes,
            after_bytes,
            state_bytes: state.sum(),
            predicted_bytes,
        })
    }
}
