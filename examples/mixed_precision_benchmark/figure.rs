//! The comparison as a picture.

use crate::compared::{Configuration, Measured, precisions};
use tallow::report::plot::{Figure, LineChart, Series};

const MIB: f64 = (1u64 << 20) as f64;

/// Mean time and peak memory, double logarithmic: over parameters where models of several sizes were measured, else over
/// the context length. A colour for each configuration, a dash for each precision.
pub fn figure(all: &[Configuration]) -> Figure {
    let over_sizes = all
        .iter()
        .any(|c| c.first().parameters != all[0].first().parameters);
    let (x_label, x): (_, fn(&Measured) -> Option<f64>) = match over_sizes {
        true => ("parameters", |own| Some(own.parameters? as f64)),
        false => ("sequence length T", |own| Some(own.context_length as f64)),
    };
    let line_of = |own: &Measured| {
        let other = match over_sizes {
            true => format!("T {}", own.context_length),
            false => format!("B {}", own.batch_size),
        };
        format!("{}, {}, {other}", own.mode, own.variant())
    };
    let mut lines: Vec<String> = Vec::new();
    for line in all.iter().map(|c| line_of(c.first())) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let chart = |title: &str, y_label: &str, y: fn(&Measured) -> Option<f64>| {
        let mut series = Vec::new();
        for precision in precisions(all) {
            for line in &lines {
                let own = all.iter().filter_map(|c| c.side(&precision));
                let own = own.filter(|side| line_of(side) == *line);
                let points = own.filter_map(|side| Some((x(side)?, y(side)?)));
                series.push(Series::new(
                    format!("{precision}, {line}"),
                    points.collect(),
                ));
            }
        }
        LineChart {
            title: title.into(),
            x_label: x_label.into(),
            y_label: y_label.into(),
            log_x: true,
            log_y: true,
            series,
            colours: Some(lines.len()),
        }
    };
    let time = chart("Time of a step", "mean time (ms)", |side| side.mean_ms);
    let memory = chart("Peak memory", "peak (MiB)", |side| {
        Some(side.peak_bytes? as f64 / MIB)
    });
    let measured = |chart: &LineChart| chart.series.iter().any(|line| !line.points.is_empty());
    Figure {
        charts: [time, memory].into_iter().filter(measured).collect(),
    }
}
