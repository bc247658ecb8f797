//! Compact tables of a profile's ops and kernels.

use tallow::profile;
use tallow::report::{Column, Fields, list_in_note};

/// Returns the columns of a table of ops, the name first.
pub fn columns() -> Vec<Column> {
    laid_out(profile::ProfileReport::columns(), "Op")
}

/// Returns the columns of a table of kernels, the name first.
pub fn kernel_columns() -> Vec<Column> {
    laid_out(profile::ProfileReport::kernel_columns(), "Kernel")
}

fn laid_out(mut columns: Vec<Column>, name: &str) -> Vec<Column> {
    for column in &mut columns {
        let (title, minor) = match column.key.as_str() {
            "name" => (name, 0),
            "grid" | "block" | "ops" => (column.title.as_str(), 0),
            "products_ms_per_step" => ("Matmuls a step", 1),
            "softmax_ms_per_step" => ("Softmax a step", 1),
            "time_percent" | "instances_per_step" => (column.title.as_str(), 0),
            "mean_ms" => ("Mean", 0),
            "std_ms" => ("Std", 1),
            "flops_per_s" | "bytes_per_s" => (column.title.as_str(), 2),
            "total_ms" => ("Total", 3),
            "median_ms" => ("Median", 4),
            _ => (column.title.as_str(), 5),
        };
        *column = match column.unit == "ms" {
            true => Column::ms(column.key.as_str(), title),
            false => Column {
                title: title.into(),
                ..column.clone()
            },
        }
        .minor(minor);
    }
    columns.sort_by_key(|column| column.key != "name");
    columns
}

/// Returns the rows of a summary, and a note on other ops whose work is inside theirs.
pub fn lines(summary: &profile::ProfileReport) -> (Vec<Fields>, Option<String>) {
    let mut lines = summary.fields();
    let mut inside: Vec<String> = Vec::new();
    for line in &mut lines {
        let label = line.get("name").and_then(|name| name.as_str());
        let label = label.unwrap_or_default().to_string();
        line.insert("name", short(&label));
        let parts = label
            .strip_suffix(" inside)")
            .and_then(|label| label.split_once(" ("));
        let parts =
            parts.map(|(op, parts)| format!("{} has {parts}", op.trim_end_matches(" backward")));
        inside.extend(parts.filter(|parts| !inside.contains(parts)));
    }
    let note = (!inside.is_empty()).then(|| list_in_note("Inside ops", &inside));
    (lines, note)
}

/// Returns a label without the description of the work inside: `linear_cross_entropy backward`.
pub fn short(label: &str) -> &str {
    label.split_once(" (").map_or(label, |(name, _)| name)
}
