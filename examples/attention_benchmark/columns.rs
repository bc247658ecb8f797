//! What the tables show: a line a configuration, its phases side by side.

use tallow::bench::Analysis;
use tallow::report::{Column, Fields, mean_and_std, pivot};

/// Decimals of a time in ms.
const DECIMALS: usize = 3;

/// From left to right.
pub fn columns(module: bool) -> Vec<Column> {
    let time = |key, title| Column::number(key, title, "ms", DECIMALS);
    let mut columns = vec![
        Column::text("implementation", "Implementation"),
        Column::text("precision", "Precision"),
        Column::number("context_length", "T", "", 0),
        match module {
            true => Column::number("d_model", "D", "", 0),
            false => Column::number("head_dim", "d", "", 0),
        },
        time("forward", "Forward"),
        time("backward", "Backward"),
        time("forward+backward", "Forward+backward"),
    ];
    columns.extend(match module {
        true => vec![
            Column::mib("model_bytes", "Model"),
            Column::mib("model_forward_bytes", "Model+fwd"),
            Column::mib("model_forward_backward_bytes", "Model+fwd+back"),
            Column::mib("forward_bytes", "Fwd"),
            Column::mib("backward_bytes", "Back"),
        ],
        false => vec![Column::mib("before_backward_bytes", "Before backward")],
    });
    columns.extend([
        Column::mib("peak_bytes", "Peak"),
        Column::text("status", "Status"),
        Column::number("n", "n", "", 0),
        Column::number("speedup", "Naive/it", "x", 2),
    ]);
    columns
}

/// The table's lines of one precision: on those of others, how many times as long naive takes.
pub fn lines(rows: &[Fields], analysis: &Analysis, width_key: &str) -> Vec<Fields> {
    let by = ["implementation", "context_length", width_key];
    let mut lines = pivot(rows, &by, "phase", |row| mean_and_std(row, DECIMALS));
    for line in &mut lines {
        let number = |key: &str| line.get(key).and_then(|value| value.as_u64());
        let (length, width) = (number("context_length"), number(width_key));
        let name = line.get("implementation").and_then(|value| value.as_str());
        let speedup = analysis.speedups.iter().find(|s| {
            let at = (Some(s.context_length), Some(s.width));
            at == (length, width) && name == Some(s.implementation.as_str())
        });
        line.insert("speedup", speedup.and_then(|s| s.forward_backward));
    }
    lines
}
