//! Plans as text: calls, costs and totals.

use super::buffer::Category;
use super::op::{BufferRange, Call};
use super::plan::Plan;
use crate::report::{Column, Fields, Format, Report, format_mib};

impl Plan {
    /// Returns the calls in order, each with its phase, path, sizes, FLOPs, bytes, operands and their offsets, followed
    /// by totals.
    ///
    /// The calls that each micro-batch runs are listed once.
    pub fn explain(&self) -> String {
        let rows = self.calls().iter().enumerate();
        let report = Report {
            columns: columns(),
            rows: rows.map(|(index, call)| self.row(index, call)).collect(),
            notes: self.totals(),
            ..Default::default()
        };
        let mut text = Vec::new();
        // Writing to a Vec cannot fail, and a text report is UTF-8.
        match report.write_to(Format::Text, &mut text) {
            Ok(()) => String::from_utf8_lossy(&text).into_owned(),
            Err(error) => error.to_string(),
        }
    }

    fn row(&self, index: usize, call: &Call) -> Fields {
        let mut row = Fields::new();
        row.insert("call", index);
        row.insert("phase", call.phase.name());
        row.insert("path", call.path.as_str());
        row.insert("op", call.op.name());
        row.insert("sizes", call.op.sizes());
        let flops = call.op.flops();
        row.insert("flops", (flops > 0.0).then_some(flops));
        row.insert("bytes", self.bytes_moved(call));
        for (key, operands) in [("reads", &call.reads), ("writes", &call.writes)] {
            let operands = operands.entries().iter();
            let places = operands.map(|(name, operand)| format!("{name}: {}", self.place(operand)));
            row.insert(key, places.collect::<Vec<_>>().join(", "));
        }
        row
    }

    /// Returns an operand's name and its offset in the arena.
    fn place(&self, operand: &BufferRange) -> String {
        let buffer = self.buffer_of(operand);
        let name = buffer.name.rsplit('/').next().unwrap_or_default();
        match buffer.arena_range() {
            Some(range) => {
                let width = buffer.dtype.size_in_bytes() as u64;
                format!(
                    "{name} @{}",
                    range.start + operand.elements.start as u64 * width
                )
            }
            None => name.to_string(),
        }
    }

    fn totals(&self) -> Vec<String> {
        let calls = || self.calls().iter().enumerate();
        let products = calls().filter(|(_, call)| call.op.is_matmul());
        let mut notes = vec![
            format!(
                "{} calls, {} of them matmuls; {:.2} GFLOP and {:.2} GB of operands a step.",
                self.calls().len(),
                products.count(),
                self.flops() / 1e9,
                self.traffic_bytes() / 1e9,
            ),
            format!(
                "Without matmuls {:.2} GFLOP: norms, softmax and the like, by the ops' formulas, without the update.",
                self.other_flops() / 1e9
            ),
            format!(
                "Arena: {} ({} bytes); its buffers one by one would be {}, the busiest call needs {}.",
                format_mib(self.arena_bytes()),
                self.arena_bytes(),
                format_mib(
                    self.buffers()
                        .iter()
                        .filter(|b| b.is_in_arena())
                        .map(|b| b.bytes())
                        .sum()
                ),
                format_mib(self.max_live_bytes()),
            ),
        ];
        if self.workspace_bytes() > 0 {
            let workspace = format_mib(self.workspace_bytes());
            notes.push(format!(
                "Workspace: {workspace} outside of the arena, for cuBLASLt, an update's tables or a forward's \
                 logits."
            ));
        }
        if self.micro_batches() > 1 {
            let per_micro_batch = self.per_micro_batch();
            notes.push(format!(
                "Calls {} to {} are run {} times a step, once for each micro-batch.",
                per_micro_batch.start,
                per_micro_batch.end - 1,
                self.micro_batches()
            ));
        }
        let categories = Category::ALL.iter().map(|category| {
            let bytes = self.category_bytes(*category);
            format!("{} {}", category.name(), format_mib(bytes))
        });
        let categories: Vec<String> = categories.collect();
        notes.push(format!("Maximum live: {}.", categories.join(", ")));
        notes
    }
}

fn columns() -> Vec<Column> {
    vec![
        Column::number("call", "Call", "", 0),
        Column::text("phase", "Phase"),
        Column::text("path", "Where"),
        Column::text("op", "Op"),
        Column::text("sizes", "Sizes"),
        Column::number("flops", "Matmuls", "MFLOP", 1).scaled(1e6),
        Column::number("bytes", "Operands", "MB", 2).scaled(1e6),
        Column::text("reads", "Reads (@ offset in the arena)"),
        Column::text("writes", "Writes"),
    ]
}
