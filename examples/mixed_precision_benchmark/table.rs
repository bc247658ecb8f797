//! What the tables show: a line a configuration, its precisions side by side under each quantity.

use crate::analysis::{PrecisionAnalysis, PrecisionSide};
use tallow::precision::Precision;
use tallow::report::{Column, Fields, mean_and_std};

/// A quantity that every precision has, and what says how it is beside f32's.
struct Quantity {
    /// What stands over its columns.
    title: &'static str,
    minor: u8,
    /// The column of a precision, whose field has that key.
    column: fn(String, &str) -> Column,
    value: fn(&PrecisionSide) -> serde_json::Value,
    /// The same against f32, which has none itself.
    against_f32: Option<Against>,
}

/// How a quantity is beside f32's: its column, and its value.
#[derive(Clone, Copy)]
struct Against {
    column: fn(String) -> Column,
    value: fn(&PrecisionSide) -> Option<f64>,
}

/// From left to right.
const QUANTITIES: [Quantity; 5] = [
    Quantity {
        title: "Time",
        minor: 0,
        column: |key, name| Column::ms(key, name),
        value: |side| {
            let mut row = Fields::from_iter([("status", side.status.as_str())]);
            row.insert("mean_ms", side.mean_ms)
                .insert("std_ms", side.std_ms);
            mean_and_std(&row)
        },
        against_f32: Some(Against {
            column: |key| Column::number(key, "speed-up", "", 2),
            value: |side| side.speedup,
        }),
    },
    Quantity {
        title: "Peak",
        minor: 1,
        column: |key, name| Column::mib(key, name),
        value: |side| side.peak_bytes.into(),
        against_f32: Some(Against {
            column: |key| Column::number(key, "saved", "%", 1),
            value: |side| side.memory_saved_percent,
        }),
    },
    Quantity {
        title: "Reserved",
        minor: 4,
        column: |key, name| Column::mib(key, name),
        value: |side| side.reserved_peak_bytes.into(),
        against_f32: None,
    },
    Quantity {
        title: "Tokens/s",
        minor: 5,
        column: |key, name| Column::count(key, name),
        value: |side| side.tokens_per_s.into(),
        against_f32: None,
    },
    Quantity {
        title: "Predicted peak",
        minor: 6,
        column: |key, name| Column::mib(key, name),
        value: |side| side.estimate_bytes.into(),
        against_f32: None,
    },
];

/// The columns of these precisions.
pub fn columns(precisions: &[Precision]) -> Vec<Column> {
    let mut columns = vec![
        Column::text("size", "Model"),
        Column::text("batch_size", "B"),
        Column::text("context_length", "T"),
        Column::text("attention", "Attention"),
        Column::text("mode", "Mode"),
    ];
    for quantity in &QUANTITIES {
        let under = |column: Column| column.under(quantity.title).minor(quantity.minor);
        for precision in precisions {
            let name = precision.name();
            columns.push(under((quantity.column)(key(quantity.title, name), name)));
            let against_f32 = quantity
                .against_f32
                .filter(|_| *precision != Precision::F32);
            columns.extend(against_f32.map(|a| under((a.column)(against(quantity.title, name)))));
        }
    }
    columns.push(Column::text("outcome", "Status").minor(2));
    columns.push(Column::count("parameters", "Parameters").minor(3));
    columns
}

/// The table's lines.
pub fn lines(analysis: &PrecisionAnalysis) -> Vec<Fields> {
    let lines = analysis.configurations.iter().map(|configuration| {
        let mut line = configuration.labels.clone();
        for side in &configuration.sides {
            for quantity in &QUANTITIES {
                line.insert(key(quantity.title, &side.precision), (quantity.value)(side));
                if let Some(a) = quantity.against_f32 {
                    line.insert(against(quantity.title, &side.precision), (a.value)(side));
                }
            }
        }
        line.insert("outcome", configuration.outcome());
        line
    });
    lines.collect()
}

fn key(quantity: &str, precision: &str) -> String {
    format!("{quantity} {precision}")
}

fn against(quantity: &str, precision: &str) -> String {
    format!("{quantity} {precision} against f32")
}
