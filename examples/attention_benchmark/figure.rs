//! Time and memory over T as a picture.

use super::measured::{BOTH, Measured, by_name};
use tallow::report::bytes_to_mib;
use tallow::report::plot::{Figure, LineChart, Series};

/// Time of forward and backward, and peak memory, over T, double logarithmic: a line for each implementation and width,
/// a colour for each width, a dash for each implementation. Memory is left out where none was measured. A figure
/// without a point cannot be drawn.
pub fn figure(all: &[Measured], letter: &str) -> Figure {
    let mut widths: Vec<u64> = Vec::new();
    for own in all {
        if !widths.contains(&own.width) {
            widths.push(own.width);
        }
    }
    let names = by_name(all);
    let chart = |title: &str, y_label: &str, of: fn(&Measured) -> Option<f64>| {
        let series = names.iter().flat_map(|(name, own)| {
            widths.iter().map(move |width| {
                let own = own.iter().filter(|m| m.width == *width);
                let points = own.filter_map(|m| Some((m.context_length as f64, of(m)?)));
                Series::new(format!("{name}, {letter} {width}"), points.collect())
            })
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
    let time = chart("Forward and backward", "mean time (ms)", |m| {
        Some(m.times[BOTH]?.mean_ms)
    });
    let memory = chart("Peak memory", "peak (MiB)", |m| {
        m.peak_bytes.map(bytes_to_mib)
    });
    let is_measured = memory.series.iter().any(|line| !line.points.is_empty());
    let mut charts = vec![time];
    charts.extend(is_measured.then_some(memory));
    Figure { charts }
}
