//! Collectives by size.

use super::{Flags, common};
use candle_core::{DType, Tensor};
use tallow::Result;
use tallow::bench::Stopwatch;
use tallow::distributed::{Communicator, Reduce};
use tallow::report::{Column, Fields, Report};

/// What is timed, and how many times its bytes cross a rank's link, over (ranks - 1) / ranks: so that rates of all can
/// be compared with the link's.
const COLLECTIVES: [(&str, f64); 3] = [
    ("all_reduce", 2.0),
    ("reduce_scatter", 1.0),
    ("all_gather", 1.0),
];

pub fn columns() -> Vec<Column> {
    vec![
        Column::text("collective", "Collective"),
        Column::number("mib", "Buffer", "MiB", 0),
        Column::ms("ms", "Time"),
        Column::ms("std_ms", "Std").minor(1),
        Column::number("bus_gb_s", "Bus rate", "GB/s", 1),
    ]
}

impl Flags {
    pub fn collectives(&self, communicator: &Communicator) -> Result<Report> {
        let world_size = communicator.world_size();
        let mut rows = Vec::new();
        for (name, passes) in COLLECTIVES {
            for mib in &self.mib {
                let bytes = mib << 20;
                let elements = (bytes / size_of::<f32>()).next_multiple_of(world_size);
                common::progress(format_args!("{name}, {mib} MiB"));
                let x = Tensor::zeros(elements, DType::F32, communicator.device())?;
                let part = x.narrow(0, 0, elements / world_size)?;
                let timing = Stopwatch::new(communicator.device())
                    .warmup(self.warmup_steps)
                    .measure(self.steps, || match name {
                        "all_reduce" => communicator.all_reduce(&x, Reduce::Sum),
                        "reduce_scatter" => communicator.reduce_scatter(&x, Reduce::Sum).map(drop),
                        _ => communicator.all_gather(&part).map(drop),
                    })?;
                let statistics = timing.statistics()?;
                let ranks = world_size as f64;
                let crossing = passes * (ranks - 1.0) / ranks * bytes as f64;
                let mut row = Fields::new();
                row.insert("collective", name);
                row.insert("mib", *mib);
                row.insert("ms", statistics.median_ms);
                row.insert("std_ms", statistics.std_ms);
                row.insert("bus_gb_s", crossing / statistics.median_ms / 1e6);
                rows.push(row);
            }
        }
        Ok(Report {
            title: "Collectives".into(),
            columns: columns(),
            rows,
            notes: vec![
                "Times are medians; buffers are f32. The bus rate is what crosses a rank's link in one direction, \
                 2 (N - 1) / N times the buffer of an all-reduce and half of that of the others, over the time."
                    .into(),
                "Reduce-scatter and all-gather allocate their result, and copy a part of it.".into(),
            ],
            ..Default::default()
        })
    }
}
