//! A summary as a table, in all of the crate's formats.

use super::summary::ProfileReport;
use crate::report::{self, Column, Fields};

impl ProfileReport {
    /// The rows as a table: nsys's columns, the instances in a step beside those in all, and what was achieved.
    ///
    /// Times of a row are of one instance, `total_ms` is over all steps.
    ///
    /// ```
    /// # use tallow::profile::{Grouping, Profiler, ProfileReport, Selection};
    /// # let profiler = Profiler::start()?;
    /// # let x = candle_core::Tensor::ones((2, 3), candle_core::DType::F32, &candle_core::Device::Cpu)?;
    /// # tallow::ops::relu(&x)?;
    /// # let recording = profiler.finish()?;
    /// use tallow::report::Format;
    ///
    /// let summary = ProfileReport::new(&recording, &Selection::default(), Grouping::Name)?;
    /// summary.table().write_to(Format::Markdown, &mut std::io::stdout())?;
    /// # Ok::<(), tallow::Error>(())
    /// ```
    pub fn table(&self) -> report::Report {
        report::Report {
            columns: columns(),
            rows: self.fields(),
            ..Default::default()
        }
    }

    /// The rows' fields, for a table that holds more than this summary; [`columns`](Self::columns) show them.
    pub fn fields(&self) -> Vec<Fields> {
        let rows = self.rows.iter().map(|row| {
            let mut fields = Fields::new();
            let is_op = row.kind.is_some();
            fields.insert("time_percent", self.percent(row));
            fields.insert("total_ms", row.total_ns as f64 / 1e6);
            fields.insert("instances", is_op.then_some(row.instances));
            fields.insert(
                "instances_per_step",
                is_op.then(|| self.instances_per_step(row)).flatten(),
            );
            fields.insert("ms_per_step", self.ms_per_step(row.total_ns));
            if let Some(statistics) = &row.statistics {
                fields.merge(statistics.fields());
            }
            fields.insert("product_flops", row.cost.map(|cost| cost.product_flops));
            fields.insert("flops", row.cost.map(|cost| cost.flops()));
            fields.insert("flops_per_s", row.flops_per_s());
            fields.insert("bytes", row.cost.map(|cost| cost.bytes()));
            fields.insert("bytes_per_s", row.bytes_per_s());
            fields.insert("name", row.label());
            fields
        });
        rows.collect()
    }

    /// The columns of [`table`](Self::table).
    pub fn columns() -> Vec<Column> {
        columns()
    }
}

fn columns() -> Vec<Column> {
    vec![
        Column::number("time_percent", "Time", "%", 1),
        Column::number("total_ms", "Total", "ms", 2).grouped(),
        Column::number("instances", "Instances", "", 0).grouped(),
        Column::number("instances_per_step", "A step", "", 1),
        Column::number("mean_ms", "Avg", "ms", 3),
        Column::number("median_ms", "Med", "ms", 3),
        Column::number("min_ms", "Min", "ms", 3),
        Column::number("max_ms", "Max", "ms", 3),
        Column::number("std_ms", "StdDev", "ms", 3),
        Column::number("flops_per_s", "Rate", "GFLOP/s", 1).scaled(1e9),
        Column::number("bytes_per_s", "Memory", "GB/s", 1).scaled(1e9),
        Column::text("name", "Name"),
    ]
}
