//! What the tables show: a line a configuration, its phases side by side.

use crate::analysis::Analysis;
use tallow::report::{Column, Fields, mean_and_std, pivot};

/// From left to right.
pub fn columns(module: bool) -> Vec<Column> {
    let time = |key, title| Column::ms(key, title);
    let memory = |key, title| Column::mib(key, title).under("Memory");
    let mut columns = vec![
        match module {
            true => Column::text("d_model", "D"),
            false => Column::text("head_dim", "d"),
        },
        Column::text("context_length", "T"),
        Column::text("implementation", "Attention"),
        Column::text("precision", "Precision"),
        Column::text("heads", "Heads"),
        time("forward", "Forward"),
        time("backward", "Backward"),
        time("forward+backward", "F+B").minor(6),
    ];
    columns.extend(match module {
        true => vec![
            memory("model_bytes", "model").minor(4),
            memory("model_forward_bytes", "+forward").minor(4),
            memory("model_forward_backward_bytes", "+backward").minor(4),
            memory("forward_bytes", "forward").minor(2),
            memory("backward_bytes", "backward").minor(2),
        ],
        false => vec![memory("before_backward_bytes", "before B")],
    });
    columns.extend([
        memory("peak_bytes", "peak"),
        Column::number("saved_percent", "saved", "%", 1)
            .under("Memory")
            .minor(5),
        Column::number("speedup", "Speed-up", "", 2).minor(3),
        Column::text("status", "Status").minor(1),
        Column::number("n", "n", "", 0).minor(7),
    ]);
    columns
}

/// The table's lines of one group: on those of others, how many times as long naive takes,
/// and how much less than naive's peak theirs is.
pub fn lines(rows: &[Fields], analysis: &Analysis, width_key: &str) -> Vec<Fields> {
    let by = ["implementation", "context_length", width_key];
    let mut lines = pivot(rows, &by, "phase", mean_and_std);
    for line in &mut lines {
        let number = |key: &str| line.get(key).and_then(|value| value.as_u64());
        let (length, width) = (number("context_length"), number(width_key));
        let name = line.get("implementation").and_then(|value| value.as_str());
        let speedup = analysis.speedups.iter().find(|s| {
            let at = (Some(s.context_length), Some(s.width));
            at == (length, width) && name == Some(s.implementation.as_str())
        });
        let ratio = speedup.and_then(|s| s.peak);
        let saved = ratio.map(|ratio| 100.0 * (1.0 - 1.0 / ratio));
        line.insert("speedup", speedup.and_then(|s| s.forward_backward));
        line.insert("saved_percent", saved);
    }
    lines
}
