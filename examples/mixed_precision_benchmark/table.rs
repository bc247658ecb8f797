//! What the tables show: a line a configuration, its precisions side by side.

use tallow::bench::{PrecisionAnalysis, PrecisionSide};
use tallow::precision::Precision;
use tallow::report::{Column, Fields};

/// A quantity that every precision has.
struct Quantity {
    key: &'static str,
    /// The column of the precision with that name, whose field has that key.
    column: fn(String, &str) -> Column,
    value: fn(&PrecisionSide) -> serde_json::Value,
    /// Whether it is held against f32, which has none itself.
    against_f32: bool,
}

/// From left to right.
const QUANTITIES: [Quantity; 6] = [
    Quantity {
        key: "median_ms",
        column: |key, name| Column::number(key, name, "ms", 2),
        value: |side| side.median_ms.into(),
        against_f32: false,
    },
    Quantity {
        key: "speedup",
        column: |key, name| Column::number(key, format!("{name} speedup"), "x", 2),
        value: |side| side.speedup.into(),
        against_f32: true,
    },
    Quantity {
        key: "tokens_per_s",
        column: |key, name| Column::count(key, format!("{name} tokens/s")),
        value: |side| side.tokens_per_s.into(),
        against_f32: false,
    },
    Quantity {
        key: "peak_bytes",
        column: |key, name| Column::mib(key, format!("{name} peak")),
        value: |side| side.peak_bytes.into(),
        against_f32: false,
    },
    Quantity {
        key: "memory_saved_percent",
        column: |key, name| Column::number(key, format!("{name} saved"), "%", 1),
        value: |side| side.memory_saved_percent.into(),
        against_f32: true,
    },
    Quantity {
        key: "estimate_bytes",
        column: |key, name| Column::mib(key, format!("{name} predicted")),
        value: |side| side.estimate_bytes.into(),
        against_f32: false,
    },
];

pub fn columns(analysis: &PrecisionAnalysis) -> Vec<Column> {
    let mut columns = vec![
        Column::text("size", "Size"),
        Column::count("parameters", "Parameters"),
        Column::number("batch_size", "B", "", 0),
        Column::number("context_length", "T", "", 0),
        Column::text("attention", "Attention"),
        Column::text("mode", "Mode"),
    ];
    for quantity in &QUANTITIES {
        for precision in analysis.precisions() {
            if !(quantity.against_f32 && precision == Precision::F32.name()) {
                columns.push((quantity.column)(key(quantity, precision), precision));
            }
        }
    }
    columns.push(Column::text("outcome", "Status"));
    columns
}

/// The table's lines.
pub fn lines(analysis: &PrecisionAnalysis) -> Vec<Fields> {
    let lines = analysis.configurations.iter().map(|configuration| {
        let mut line = configuration.labels.clone();
        for side in &configuration.sides {
            for quantity in &QUANTITIES {
                line.insert(key(quantity, &side.precision), (quantity.value)(side));
            }
        }
        line.insert("outcome", configuration.outcome());
        line
    });
    lines.collect()
}

fn key(quantity: &Quantity, precision: &str) -> String {
    format!("{precision} {}", quantity.key)
}
