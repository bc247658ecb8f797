//! What a rank's memory holds, before and after its steps.

use super::Flags;
use super::answers::{self, Held};
use super::common::models::Model;
use super::common::sweep::Progress;
use super::steps::Way;
use serde::Serialize;
use tallow::distributed::Communicator;
use tallow::memory::Meter;
use tallow::report::{Column, Fields, Report};
use tallow::{Error, Result};

#[derive(Serialize)]
struct Row {
    model: String,
    exchange: String,
    #[serde(flatten)]
    held: Held,
    predicted_bytes: u64,
}

pub fn columns() -> Vec<Column> {
    let held = |key, title| Column::mib(key, title).under("A rank");
    vec![
        Column::text("model", "Model"),
        Column::text("strategy", "Strategy"),
        Column::text("exchange", "Gradients averaged"),
        held("init_bytes", "after init"),
        held("peak_bytes", "peak of a step"),
        held("after_bytes", "after it"),
        Column::mib("state_bytes", "Optimizer").minor(1),
        Column::mib("predicted_bytes", "Predicted peak").minor(2),
    ]
}

impl Flags {
    /// Measures a rank's memory by what is divided.
    pub fn memory(
        &self,
        communicator: &Communicator,
        models: &[Model],
        progress: &mut Progress,
    ) -> Result<Report> {
        let mut report = Report {
            title: "Memory of a rank".into(),
            columns: columns(),
            ..Default::default()
        };
        for model in models {
            let mut held = Vec::new();
            for way in self.ways.all() {
                let (strategy, exchange) = Way::names(way);
                progress.begin(format_args!(
                    "{}, memory, {strategy}, {exchange}",
                    model.name
                ));
                let row = self.memory_of(communicator, model, way)?;
                held.push(row.held);
                report.rows.push(Fields::of(&row)?);
            }
            report.answers.extend(answers::memory(
                &model.name,
                communicator.world_size(),
                &held,
            ));
        }
        report.notes = vec![
            "After init are model and optimizer. A step's peak is just before the optimizer's update, with the \
             plan's arena and all gradients; after it the arena stays, for the next step."
                .into(),
        ];
        if self.ranks_as_threads()?.is_some() {
            let note = "Ranks are threads of one process: its memory is divided by their number.";
            report.notes.push(note.into());
        }
        Ok(report)
    }

    fn memory_of(
        &self,
        communicator: &Communicator,
        model: &Model,
        way: Option<Way>,
    ) -> Result<Row> {
        let (strategy, exchange) = Way::names(way);
        let device = communicator.device();
        let meter = Meter::new(device);
        // Threads share the meter: each reads it while all of them wait.
        let sharing = self
            .ranks_as_threads()?
            .map_or(1, |ranks| ranks.get() as u64);
        let counted = |bytes: Option<u64>| {
            bytes.ok_or_else(|| Error::Order {
                op: "--part memory",
                problem: "this device has no counters".into(),
                hint: "measure on the CPU or a CUDA GPU".into(),
            })
        };
        let taken = || {
            device.synchronize()?;
            communicator.barrier()?;
            let bytes = counted(meter.current_bytes());
            communicator.barrier()?;
            bytes
        };
        let base = taken()?;
        let of_run = || Ok::<_, Error>(taken()?.saturating_sub(base) / sharing);
        let (job, mut optimizer, [tokens, targets]) = self.job(communicator, &model.config, way)?;
        let init_bytes = of_run()?;
        meter.reset_peak();
        communicator.barrier()?;
        let mut planned = job.planned(&optimizer, &self.step_config()?)?;
        let predicted_bytes = planned.prepare((&tokens, &targets))?.total_bytes();
        for _ in 0..2 {
            planned.run(&mut optimizer, (&tokens, &targets))?;
        }
        let after_bytes = of_run()?;
        let peak_bytes = counted(meter.peak_bytes())?.saturating_sub(base) / sharing;
        let state = optimizer.state().into_iter();
        let state = state.map(|(_, x)| (x.elem_count() * x.dtype().size_in_bytes()) as u64);
        communicator.barrier()?; // no rank frees before all have read the meter
        Ok(Row {
            model: model.name.clone(),
            exchange,
            held: Held {
                strategy,
                init_bytes,
                peak_bytes,
                after_bytes,
                state_bytes: state.sum(),
            },
            predicted_bytes,
        })
    }
}
