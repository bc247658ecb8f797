//! Collectives by size.

use super::Flags;
use super::answers::{self, Collected};
use super::common::sweep::Progress;
use candle_core::{DType, Tensor};
use serde::Serialize;
use tallow::Result;
use tallow::bench::Stopwatch;
use tallow::distributed::{Communicator, Reduce};
use tallow::report::{Column, Fields, Report, Statistics, mean_and_std};

/// What is timed, and how many times its bytes cross a rank's link, over (ranks - 1) / ranks: so that rates of all can
/// be compared with the link's.
const COLLECTIVES: [(&str, f64); 3] = [
    ("all_reduce", 2.0),
    ("reduce_scatter", 1.0),
    ("all_gather", 1.0),
];

#[derive(Serialize)]
struct Row<'a> {
    collective: &'a str,
    mib: usize,
    #[serde(flatten)]
    time: Statistics,
    /// `None` of one rank, which sends nothing.
    bus_gb_s: Option<f64>,
}

pub fn columns() -> Vec<Column> {
    vec![
        Column::text("collective", "Collective"),
        Column::number("mib", "Buffer", "MiB", 0),
        Column::ms("time", "Time"),
        Column::number("bus_gb_s", "Bus rate", "GB/s", 2),
    ]
}

impl Flags {
    /// Times each collective at each size.
    pub fn collectives(
        &self,
        communicator: &Communicator,
        progress: &mut Progress,
    ) -> Result<Report> {
        let world_size = communicator.world_size();
        let ranks = world_size as f64;
        let mut report = Report {
            title: "Collectives".into(),
            columns: columns(),
            ..Default::default()
        };
        let mut reduced = Vec::new();
        for (name, passes) in COLLECTIVES {
            for &mib in &self.mib {
                let bytes = mib << 20;
                let elements = (bytes / size_of::<f32>()).next_multiple_of(world_size);
                progress.begin(format_args!("{name}, {mib} MiB"));
                let x = Tensor::zeros(elements, DType::F32, communicator.device())?;
                let part = x.narrow(0, 0, elements / world_size)?;
                let timing = Stopwatch::new(communicator.device())
                    .warmup(self.warmup_steps)
                    .measure(self.steps, || match name {
                        "all_reduce" => communicator.all_reduce(&x, Reduce::Sum),
                        "reduce_scatter" => communicator.reduce_scatter(&x, Reduce::Sum).map(drop),
                        _ => communicator.all_gather(&part).map(drop),
                    })?;
                let time = timing.statistics()?;
                let crossing = passes * (ranks - 1.0) / ranks * bytes as f64;
                let bus_gb_s = (world_size > 1).then(|| crossing / time.mean_ms / 1e6);
                if name == "all_reduce" {
                    reduced.extend(bus_gb_s.map(|bus_gb_s| Collected {
                        mib,
                        time: time.clone(),
                        bus_gb_s,
                    }));
                }
                let mut row = Fields::of(&Row {
                    collective: name,
                    mib,
                    time,
                    bus_gb_s,
                })?;
                report.rows.push(row.clone());
                row.insert("time", mean_and_std(&row));
                report.lines.push(row);
            }
        }
        report.answers = answers::collectives(world_size, &reduced);
        report.notes = vec![
            "Buffers are f32. The bus rate is what crosses a rank's link in one direction over the mean time: \
             2 (N - 1) / N times the buffer of an all-reduce, half of that of the others."
                .into(),
        ];
        Ok(report)
    }
}
