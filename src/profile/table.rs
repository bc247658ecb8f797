//! A summary as a table, in all of the crate's formats.

use super::recording::extent;
use super::summary::{Launches, ProfileReport};
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
            columns: match self.rows.iter().any(|row| row.launches.is_some()) {
                true => Self::kernel_columns(),
                false => Self::columns(),
            },
            rows: self.fields(),
            ..Default::default()
        }
    }

    /// The rows' fields, for a table that holds more than this summary; [`columns`](Self::columns) show them.
    pub fn fields(&self) -> Vec<Fields> {
        let rows = self.rows.iter().map(|row| {
            let mut fields = Fields::new();
            let is_op = !row.is_gap();
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
            let part_ms = |ns: u64| is_op.then(|| self.ms_per_step(ns));
            fields.insert("products_ms_per_step", part_ms(row.parts.products_ns));
            fields.insert("scores_ms_per_step", part_ms(row.parts.scores_ns));
            fields.insert("values_ms_per_step", part_ms(row.parts.values_ns));
            fields.insert("softmax_ms_per_step", part_ms(row.parts.softmax_ns));
            fields.insert("attention_ms_per_step", part_ms(row.parts.fused_ns));
            match &row.launches {
                None => fields.insert("name", row.label()),
                Some(launches) => {
                    fields.insert("name", row.short_name());
                    fields.insert("kernel", row.name.as_str());
                    fields.insert("grid", launches.grid.map(extent));
                    fields.insert("block", launches.block.map(extent));
                    fields.insert("grids_and_blocks", launches.shapes);
                    fields.insert("ops", Launches::text(&launches.ops, 2));
                    fields.insert("places", Launches::text(&launches.places, usize::MAX - 1))
                }
            };
            fields
        });
        rows.collect()
    }

    /// The columns of [`table`](Self::table) for ops.
    pub fn columns() -> Vec<Column> {
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
            Column::number("products_ms_per_step", "Products a step", "ms", 3),
            Column::number("softmax_ms_per_step", "Softmax a step", "ms", 3),
            Column::number("flops_per_s", "Rate", "GFLOP/s", 1).scaled(1e9),
            Column::number("bytes_per_s", "Memory", "GB/s", 1).scaled(1e9),
            Column::text("name", "Name"),
        ]
    }

    /// The columns of [`table`](Self::table) for kernels: as nsys has them, with grid, block and the ops that launched
    /// them.
    pub fn kernel_columns() -> Vec<Column> {
        let unknown = "flops_per_s bytes_per_s products_ms_per_step softmax_ms_per_step";
        let mut columns = Self::columns();
        columns.retain(|column| !unknown.split(' ').any(|key| key == column.key));
        columns.extend([
            Column::text("grid", "Grid"),
            Column::text("block", "Block"),
            Column::text("ops", "Launched by"),
            Column::text("places", "Places"),
        ]);
        columns
    }
}
