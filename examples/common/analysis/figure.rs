//! The analysis as a picture.

use super::{Row, WHOLE, different};
use tallow::report::Fields;
use tallow::report::plot::{Figure, LineChart, Series};

const MIB: f64 = (1u64 << 20) as f64;

/// Time of forward and backward, and peak memory, over T, double logarithmic: a line for each implementation and width,
/// a colour for each width, a dash for each implementation. The arguments are those of
/// [`Analysis::of`](super::Analysis::of) and [`Analysis::notes`](super::Analysis::notes).
///
/// Memory is left out where none was measured. A figure without a point cannot be drawn.
pub fn figure(rows: &[Fields], width_key: &str, width: &str) -> Figure {
    let rows: Vec<Row<'_>> = rows
        .iter()
        .filter_map(|fields| Row::read(fields, width_key))
        .filter(|row| row.phase == WHOLE)
        .collect();
    let implementations = different(rows.iter().map(|row| row.implementation));
    let widths = different(rows.iter().map(|row| row.width));
    let lines: Vec<(&str, u64)> = implementations
        .iter()
        .flat_map(|name| widths.iter().map(|width| (*name, *width)))
        .collect();
    let chart = |title: &str, y_label: &str, key: &str, unit: f64| {
        let series = lines.iter().map(|(name, size)| {
            let own = rows
                .iter()
                .filter(|row| (row.implementation, row.width) == (*name, *size));
            let point = |row: &Row<'_>| Some((row.context_length as f64, row.number(key)? / unit));
            let points = own.filter_map(point).collect();
            Series::new(format!("{name}, {width} {size}"), points)
        });
        LineChart {
            title: title.into(),
            x_label: "sequence length T".into(),
            y_label: y_label.into(),
            log_x: true,
            log_y: true,
            series: series.collect(),
            colours: Some(widths.len()),
        }
    };
    let time = chart("Forward and backward", "median time (ms)", "median_ms", 1.0);
    let memory = chart("Peak memory", "peak (MiB)", "peak_bytes", MIB);
    let measured = memory.series.iter().any(|line| !line.points.is_empty());
    let mut charts = vec![time];
    charts.extend(measured.then_some(memory));
    Figure { charts }
}
