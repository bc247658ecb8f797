//! Collectives by size.

use super::answers::{self, Collected};
use super::{Rank, table};
use candle_core::{DType, Tensor};
use tallow::Result;
use tallow::distributed::Reduce;
use tallow::report::{Column, Fields, Report};

const COLLECTIVES: [&str; 3] = ["all_reduce", "reduce_scatter", "all_gather"];

impl Rank<'_> {
    /// Times each collective at each size.
    pub fn collectives(&self) -> Result<Report> {
        let (communicator, sizes) = (&self.communicator, &self.flags.mib);
        let ranks = communicator.world_size();
        let mut sweep = self.sweep(COLLECTIVES.len() * sizes.len());
        let mut collected = Vec::new();
        for collective in COLLECTIVES {
            for &mib in sizes {
                sweep.begins(format_args!("{collective}, {mib} MiB"));
                let bytes = mib << 20;
                let elements = (bytes / size_of::<f32>()).next_multiple_of(ranks);
                let x = Tensor::zeros(elements, DType::F32, communicator.device())?;
                let part = x.narrow(0, 0, elements / ranks)?;
                let time = self.timed(|| match collective {
                    "all_reduce" => communicator.all_reduce(&x, Reduce::Sum),
                    "reduce_scatter" => communicator.reduce_scatter(&x, Reduce::Sum).map(drop),
                    _ => communicator.all_gather(&part).map(drop),
                })?;
                let passes = if collective == "all_reduce" { 2.0 } else { 1.0 };
                let crossing = passes * (ranks - 1) as f64 / ranks as f64 * bytes as f64;
                collected.push(Collected {
                    collective,
                    mib,
                    bus_gb_s: (ranks > 1).then(|| crossing / time.mean_ms / 1e6),
                    time,
                });
            }
        }
        let columns = vec![
            Column::text("collective", "Collective"),
            Column::number("mib", "Buffer", "MiB", 0),
            Column::ms("mean_ms", "Time"),
            Column::ms("std_ms", "±"),
            Column::number("bus_gb_s", "Bus rate", "GB/s", 2),
        ];
        let note = "Buffers are f32. The bus rate is what crosses a rank's link in one direction over the mean time: \
                    2 (N - 1) / N times the buffer of an all-reduce, half of that of the others.";
        Ok(Report {
            rows: collected.iter().map(Fields::of).collect::<Result<_>>()?,
            answers: answers::collectives(ranks, &collected),
            ..table("Collectives", columns, &[note])
        })
    }
}
